"""find: subgraphs of traced modules."""

from collections.abc import Callable
from typing import Any

from torch import fx

from ..graph.subgraph import Subgraph, find_subgraphs
from ..tree import ScheduledModule


def find(
    sch: ScheduledModule,
    pattern: str | Callable[..., Any] | None = None,
    *,
    where: Callable[[fx.Node], bool] | None = None,
    explain: bool = False,
) -> list[Subgraph]:
    """The subgraphs that match, of this module and of the traced ones below it; they do not overlap.

    A function is a pattern: its parameters stand for anything (options such as `p`, `eps` or `dim` included), those
    with defaults are constants, and what it
    computes is looked for regardless of the order of nodes and of commutative operands. A module matches the
    function that it stands for (`nn.ReLU` and `torch.relu`, `nn.Linear` and `F.linear`); any other module is
    asked for by `call_module(regular expression or class, inputs...)`. A string is a regular expression for
    the whole of one operation's name: the path of a module, or a function's or method's name.

    Args:
        pattern: what to look for, as above.
        where: a predicate on nodes of `torch.fx`. Alone it finds every operation for which it is true, with a pattern
            the matches in which there is such a node.
        explain: raise where nothing matches, and say what came nearest.

    Returns:
        Handles for `fuse`, `replace` and `checkpoint`; they print as code.

    Raises:
        ScheduleError: nothing here is traced; with `explain`, nothing matches.
    """
    return find_subgraphs(sch, pattern, where, explain)
