"""trace: turn a module's forward into a graph that other primitives can edit."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ...base.errors import ScheduleError, TraceError, unknown
from ..forward import add_layer, layers_of
from ..graph.by_example import trace_by_example
from ..graph.called import check_called, scheduled_below
from ..graph.examples import as_call, example_of
from ..graph.exported import trace_exported
from ..graph.trace import Traced
from ..graph.tracing import trace_symbolically
from ..primitive import primitive
from ..tree import ScheduledModule

TRACERS = ("fx", "export", "dynamo")


@primitive
def trace(
    sch: ScheduledModule,
    flatten: bool = False,
    leaves: Sequence[str | type[nn.Module]] = (),
    inputs: Sequence[str] = (),
    tracer: str | None = None,
    examples: Any = None,
) -> None:
    """Turns this module's forward into a graph; the module, its children and its parameters stay in place.

    Children remain calls, so that the hierarchy is kept and each can be traced by itself. Values that depend
    on `self.training` are read when the graph runs. Without example inputs, arguments with defaults are fixed at these.

    With example inputs the tensors among them are inputs of the graph and all else is fixed; sizes stay free, but for
    those on which the way of the code depends, which the graph checks. Where none are given they are taken from those
    of a module above: of its trace, or of a `verify` around.

    Args:
        flatten: trace through children too, down to the modules of torch.nn, and to those that have
            primitives or hooks of their own.
        leaves: with `flatten`, children to keep as calls: regular expressions for paths, or classes.
        inputs: arguments with defaults that remain inputs of the graph.
        tracer: `fx` follows the module's code; `export` and `dynamo` make a graph of operators without calls of
            children (torch.export, by running the code or by reading it), and need example inputs. By default
            whichever succeeds, in this order.
        examples: a tensor, a tuple of positional or a mapping of keyword arguments.

    Raises:
        TraceError: the forward does what a graph cannot express (control flow that depends on values of tensors);
            names the operation and the line of the model's code, for each tracer.
        ScheduleError: it is traced already; unknown tracer; a tracer that needs example inputs and has none.
    """
    label = f"trace on '{sch.name}'"
    if layers_of(sch.module, Traced):
        raise ScheduleError(f"{label}: a module is traced once, and it already is")
    if tracer is not None and tracer not in TRACERS:
        raise ScheduleError(f"{label}: {unknown('tracer', tracer, TRACERS)}")
    check_called(sch, "trace")
    if examples is not None:
        sch.tree.examples[sch.path] = as_call(examples)
    example = example_of(sch)
    module, name = sch.module, sch.name
    scheduled = scheduled_below(sch)
    kept = [*leaves, *scheduled]
    if example is None:
        if tracer not in (None, "fx"):
            raise ScheduleError(f"{label}: tracer '{tracer}' needs examples=, here or at a module above")
        add_layer(module, trace_symbolically(module, name, flatten, kept, inputs))
        return
    ways: dict[str, Callable[[], Traced]] = {
        "fx": partial(trace_by_example, module, name, flatten, kept, inputs, example),
        "export": partial(trace_exported, module, name, inputs, example, scheduled, strict=False),
        "dynamo": partial(trace_exported, module, name, inputs, example, scheduled, strict=True),
    }
    add_layer(module, _first(ways if tracer is None else {tracer: ways[tracer]}))


def _first(ways: dict[str, Callable[[], Traced]]) -> Traced:
    """What the first tracer gives that succeeds.

    Raises:
        TraceError: none does; says why of each.
    """
    failures = []
    for name, way in ways.items():
        try:
            return way()
        except TraceError as error:
            failures.append((name, error))
    if len(failures) == 1:
        raise failures[0][1]
    raise TraceError("; ".join(f"by {name}: {error}" for name, error in failures))
