"""fuse: run subgraphs of a traced module as one compiled function each."""

from collections.abc import Callable
from typing import Any

from ...base.errors import ScheduleError, unknown
from ..graph.compiled import COMPILERS
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
    """Runs subgraphs found by `find` as one compiled function each; `compile` does that with a whole module.

    Parameters stay where they are, so `state_dict` and the optimizer see no difference.

    Args:
        subgraph: one match or a list of matches.
        compiler: `inductor` is `torch.compile`; `none` only groups the operations; a function is given the
            callable to be fused and returns the one to call.
        name: of the operation in the graph that a subgraph becomes.

    Raises:
        ScheduleError: no subgraph; unknown compiler; matches that overlap; an inner value of the subgraph is used
            outside of it.
    """
    if not callable(compiler) and compiler not in COMPILERS:
        raise ScheduleError(f"fuse on '{sch.name}': {unknown('compiler', compiler, COMPILERS)}")
    if subgraph is None:
        raise ScheduleError(
            f"fuse on '{sch.name}': it takes subgraphs that find returned; compile() runs a whole module through "
            "torch.compile"
        )
    fuse_subgraph(sch, subgraph, compiler, name)
