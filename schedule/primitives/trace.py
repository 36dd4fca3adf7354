"""trace: turn a module's forward into a graph that other primitives can edit."""

from collections.abc import Sequence

from torch import nn

from ...errors import ScheduleError
from ..forward import add_layer, layers_of
from ..graph.trace import Traced, trace as trace_module
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def trace(
    sch: ScheduledModule,
    flatten: bool = False,
    leaves: Sequence[str | type[nn.Module]] = (),
    inputs: Sequence[str] = (),
) -> None:
    """Turns this module's forward into a graph; the module, its children and its parameters stay in place.

    Children remain calls, so that the hierarchy is kept and each can be traced by itself. Values that depend
    on `self.training` are read when the graph runs. Arguments with defaults are fixed at these.

    Args:
        flatten: trace through children too, down to the modules of torch.nn, and to those that have
            primitives or hooks of their own.
        leaves: with `flatten`, children to keep as calls: regular expressions for paths, or classes.
        inputs: arguments with defaults that remain inputs of the graph.

    Raises:
        TraceError: the forward does what a graph cannot express (control flow that depends on values, sizes
            taken apart); names the operation and the line of the model's code.
        ScheduleError: it is traced already.
    """
    if layers_of(sch.module, Traced):
        raise ScheduleError(f"trace on '{sch.name}': a module is traced once, and it already is")
    add_layer(sch.module, trace_module(sch.module, sch.name, flatten, leaves, inputs))
