"""compile: run a module through torch.compile, in place."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ...base.errors import ScheduleError
from ..graph.called import check_called
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def compile(sch: ScheduledModule, **options: Any) -> None:
    """Compiles this module with `torch.compile`, in place: no wrapper, names in `state_dict` unchanged.

    Compilation happens at the first call after `build`. Compile the repeated blocks rather than the whole
    model: identical blocks share the compiled code.

    Args:
        options: keyword arguments of `torch.compile`, such as `mode`, `fullgraph`, `dynamic`, `backend`.

    Raises:
        ScheduleError: it is compiled already; an unknown option.

    Source: https://pytorch.org/docs/stable/generated/torch.compile.html
    """
    if sch.deferred(_apply):
        raise ScheduleError(f"compile on '{sch.name}': a module is compiled once, and it already is")
    check_options(sch, options)
    check_called(sch, "compile")
    sch.defer("compile", _apply, options=options)


def on_compilation(began: Callable[[], None], ended: Callable[[], None]) -> None:
    """Has `began` called whenever torch.compile starts to compile in this process, be it a forward or a backward
    pass, and `ended` when it is through, also by an error. A compilation within another is part of that one.
    """
    from ...base._torch import dynamo

    dynamo.on_compile_start(lambda args: began())
    dynamo.on_compile_end(lambda args: ended())


def refusals() -> int:
    """How often torch.compile has given up on a function in this process, which then runs as it was written: for one
    reason, because it has met more shapes than `torch.compiler.config.recompile_limit`."""
    from ...base._torch import dynamo

    frames = dynamo.utils.counters["frames"]
    return frames["total"] - frames["ok"]


def check_options(sch: ScheduledModule, options: dict[str, Any]) -> None:
    """Refuses what `torch.compile` would not take."""
    import inspect

    import torch

    from ...base.errors import unknown

    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in known:
            raise ScheduleError(f"compile on '{sch.name}': {unknown('option', name, known)}")
    backend = options.get("backend", "inductor")
    if isinstance(backend, str):
        from ...base._torch import dynamo

        names = dynamo.list_backends(exclude_tags=())
        if backend not in names:
            raise ScheduleError(f"compile on '{sch.name}': {unknown('backend', backend, names)}")


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, options: dict[str, Any]) -> None:
    module.compile(**options)
