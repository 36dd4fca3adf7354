"""hook: call a function before or after a module's forward or backward."""

from collections.abc import Callable
from typing import Any

from ...base.errors import ScheduleError, unknown
from ..graph.called import check_called
from ..primitive import primitive
from ..tree import ScheduledModule

KINDS = {
    "fwd_pre": "register_forward_pre_hook",
    "fwd_post": "register_forward_hook",
    "bwd_pre": "register_full_backward_pre_hook",
    "bwd_post": "register_full_backward_hook",
}


@primitive
def hook(sch: ScheduledModule, kind: str, fn: Callable[..., Any]) -> None:
    """Calls `fn` before or after this module's forward or backward, as PyTorch's own hooks do.

    Args:
        kind: `fwd_pre`: `fn(module, args)`; `fwd_post`: `fn(module, args, output)`;
            `bwd_pre`: `fn(module, grad_output)`; `bwd_post`: `fn(module, grad_input, grad_output)`.
        fn: what it returns, if not None, takes the place of the arguments, the output, the gradient with
            respect to the output, or that with respect to the input.

    Raises:
        ScheduleError: unknown kind, or `fn` is not callable.
    """
    if kind not in KINDS:
        raise ScheduleError(f"hook on '{sch.name}': {unknown('kind', kind, KINDS)}")
    if not callable(fn):
        raise ScheduleError(f"hook on '{sch.name}': fn must be callable, but got {type(fn).__name__}")
    check_called(sch, "hook")
    getattr(sch.module, KINDS[kind])(fn)
