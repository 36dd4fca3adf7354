"""fuse: run a module, or a subgraph of a traced one, as one compiled function."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ...base.errors import ScheduleError, unknown
from ..forward import Layer, add_layer, layers_of
from ..graph.called import check_called
from ..graph.compiled import COMPILERS, compiled
from ..graph.editing import fuse_subgraph
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def fuse(
    sch: ScheduledModule,
    subgraph: Any = None,
    compiler: str | Callable[[Callable[..., Any]], Callable[..., Any]] = "inductor",
    name: str | None = None,
) -> None:
    """Runs this module, or subgraphs of it found by `find`, as one compiled function.

    Parameters stay where they are, so `state_dict` and the optimizer see no difference.

    Args:
        subgraph: one match or a list of matches; None fuses the whole module.
        compiler: `inductor` is `torch.compile`; `none` only groups the operations; a function is given the
            callable to be fused and returns the one to call.
        name: of the operation in the graph that a subgraph becomes.

    Raises:
        ScheduleError: unknown compiler; the module is fused already; an inner value of the subgraph is used
            outside of it.
    """
    if not callable(compiler) and compiler not in COMPILERS:
        raise ScheduleError(f"fuse on '{sch.name}': {unknown('compiler', compiler, COMPILERS)}")
    if subgraph is not None:
        fuse_subgraph(sch, subgraph, compiler, name)
        return
    if name is not None:
        raise ScheduleError(f"fuse on '{sch.name}': name goes with a subgraph")
    if layers_of(sch.module, Fused):
        raise ScheduleError(f"fuse on '{sch.name}': a module is fused once, and it already is")
    check_called(sch, "fuse")
    add_layer(sch.module, Fused(compiler))


class Fused(Layer):
    """Runs what lies within through a compiler; compiled anew in a copy."""

    order = 30

    def __init__(self, compiler: Any) -> None:
        self.compiler = compiler
        self.function: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"compiler": self.compiler, "function": None}

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.function is None:
            self.function = compiled(inner, self.compiler)
        return self.function(*args, **kwargs)
