"""find: subgraphs of traced modules."""

from collections.abc import Callable
from typing import Any

from ..graph.subgraph import Subgraph, find_subgraphs
from ..tree import ScheduledModule


def find(sch: ScheduledModule, pattern: str | Callable[..., Any]) -> list[Subgraph]:
    """The subgraphs that match, of this module and of the traced ones below it; they do not overlap.

    A function is a pattern: its parameters stand for anything, those with defaults are constants, and what it
    computes is looked for regardless of the order of nodes and of commutative operands. A module matches the
    function that it stands for (`nn.ReLU` and `torch.relu`, `nn.Linear` and `F.linear`); any other module is
    asked for by `call_module(regular expression or class, inputs...)`. A string is a regular expression for
    the whole of one operation's name: the path of a module, or a function's or method's name.

    Returns:
        Handles for `fuse`, `replace` and `checkpoint`; they print as code.

    Raises:
        ScheduleError: nothing here is traced.
    """
    return find_subgraphs(sch, pattern)
