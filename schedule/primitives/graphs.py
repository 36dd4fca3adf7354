"""Primitives of traced modules: trace, find, decompose, fuse."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ...base.errors import ScheduleError, unknown
from ..forward import add_layer, layers_of
from ..graph.by_example import as_call, example_of, trace_by_example
from ..graph.called import check_called, graph_above, scheduled_below
from ..graph.editing import fuse_subgraph
from ..graph.subgraph import Subgraph, find_subgraphs
from ..graph.trace import COMPILERS, Traced
from ..graph.tracing import trace_symbolically
from ..parallel.exchange import WithoutBias, syncs_of
from ..parallel.sharding import shards_of
from ..tree import ScheduledModule, primitive


@primitive
def trace(
    sch: ScheduledModule,
    flatten: bool = False,
    leaves: Sequence[str | type[nn.Module]] = (),
    inputs: Sequence[str] = (),
    examples: Any = None,
) -> None:
    """Replaces this module's forward by a graph; the module, its children and its parameters stay in place.

    Children remain calls, so that the hierarchy is kept and each can be traced separately. Values that depend on
    `self.training` are evaluated when the graph runs. Without example inputs, arguments with defaults are fixed at
    these.

    With example inputs their tensors are inputs of the graph and all other arguments are constants. Sizes stay free,
    except for those that the control flow depends on, which the graph checks. Without `examples`, those of a module above
    are used: of its trace, or of an enclosing `verify`.

    Args:
        flatten: trace through children too, down to the modules of torch.nn, and to those with their own primitives or
            hooks.
        leaves: with `flatten`, children to keep as calls: regular expressions for paths, or classes.
        inputs: arguments with defaults that remain inputs of the graph.
        examples: a tensor, a tuple of positional or a mapping of keyword arguments.

    Raises:
        TraceError: a graph cannot express the forward (control flow that depends on values of tensors). The message has
            the operation and the line of the model's code.
        ScheduleError: the module is traced already.
    """
    if layers_of(sch.module, Traced):
        raise ScheduleError(f"trace on '{sch.name}': the module is traced already")
    check_called(sch, "trace")
    if examples is not None:
        sch.tree.examples[sch.path] = as_call(examples)
    example = example_of(sch)
    # Modules with deferred work stay calls, so that `build` can wrap them.
    leaf_modules = [*leaves, *scheduled_below(sch)]
    if example is None:
        traced = trace_symbolically(sch.module, sch.name, flatten, leaf_modules, inputs)
    else:
        traced = trace_by_example(sch.module, sch.name, flatten, leaf_modules, inputs, example)
    add_layer(sch.module, traced)


def find(
    sch: ScheduledModule,
    pattern: str | Callable[..., Any] | None = None,
    *,
    where: Callable[[fx.Node], bool] | None = None,
) -> list[Subgraph]:
    """Returns the non-overlapping subgraphs that match, of this module and of the traced ones below it.

    A function is a pattern: its parameters match anything (including options such as `p`, `eps` or `dim`), those with
    defaults are constants, and its computation is matched in any order of nodes and of commutative operands. A module
    matches its equivalent function (`nn.ReLU` and `torch.relu`, `nn.Linear` and `F.linear`); any other module is
    matched by `call_module(regular expression or class, inputs...)`. A string is a regular expression for the whole
    name of one operation: the path of a module, or a function's or method's name.

    Args:
        pattern: the pattern, as above.
        where: a predicate on nodes of `torch.fx`. Alone it finds every operation for which it is true; with a pattern,
            the matches with such a node.

    Returns:
        Handles for `fuse`, `replace` and `checkpoint`; they print as code.

    Raises:
        ScheduleError: no module here is traced.
    """
    return find_subgraphs(sch, pattern, where)


@primitive
def decompose(sch: ScheduledModule) -> None:
    """Splits the linear layers of this traced module into a product and the bias added, which can be fused with later
    operations.

    The children stay, with their hooks and exchanges, and compute the product only. On a module that is called in the
    graph of one above it, it splits only that call. A layer may be sharded before or after: cut along its input, the bias
    is added after the sum.

    Raises:
        ScheduleError: not traced; the graph has no linear layers with a bias; or the output of a layer is gathered while
            its bias is cut.
    """
    label = f"decompose on '{sch.name}'"
    schedule, target = _traced(sch, label)
    traced = layers_of(schedule.module, Traced)[0]
    calls = [node for node in traced.graph.nodes if node.op == "call_module" and target in (None, node.target)]
    linears = [node for node in calls if _splits(schedule, label, node)]
    if not linears:
        raise ScheduleError(f"{label}: there is no linear layer with a bias in its graph to split")
    for node in linears:
        add_layer(schedule.module.get_submodule(node.target), WithoutBias())
        with traced.graph.inserting_after(node):
            bias = traced.graph.get_attr(f"{node.target}.bias")
        with traced.graph.inserting_after(bias):
            total = traced.graph.call_function(torch.add, (node, bias))
        # Except for the sum itself, which must still use the product.
        node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
    traced.changed()


def _traced(sch: ScheduledModule, label: str) -> tuple[ScheduledModule, str | None]:
    """Returns the module with the graph, and the target of the call to split; None for all calls."""
    if layers_of(sch.module, Traced):
        return sch, None
    enclosing_path = graph_above(sch)
    if enclosing_path is None:
        raise ScheduleError(f"{label}: trace it first, or the module that calls it")
    return type(sch)(sch.tree, enclosing_path), sch.path.removeprefix(enclosing_path).removeprefix(".")


def _splits(sch: ScheduledModule, label: str, node: fx.Node) -> bool:
    """Returns True for the call of a linear layer with a bias that is not split yet."""
    child = sch.module.get_submodule(node.target)
    if type(child) is not nn.Linear or child.bias is None or layers_of(child, WithoutBias):
        return False
    gathered = any(sync.mode == "fwd_post" and sync.op == "all_gather" for sync in syncs_of(child))
    if gathered and "bias" in shards_of(child):
        raise ScheduleError(f"{label}: the output of '{node.target}' is gathered, so its bias must be whole")
    return True


@primitive
def fuse(
    sch: ScheduledModule,
    subgraph: Any = None,
    compiler: str | Callable[[Callable[..., Any]], Callable[..., Any]] = "inductor",
    name: str | None = None,
) -> None:
    """Compiles subgraphs found by `find` to one function each; `compile` does that with a whole module.

    Parameters stay in place, so `state_dict` and the optimizer do not change.

    Args:
        subgraph: one match or a list of matches.
        compiler: `inductor` is `torch.compile`; `none` only groups the operations; a function gets the callable to be
            fused and returns the one to call.
        name: name of the subgraph's operation in the graph.

    Raises:
        ScheduleError: no subgraph; unknown compiler; overlapping matches; or an inner value of the subgraph is used
            outside it.
    """
    if not callable(compiler) and compiler not in COMPILERS:
        raise ScheduleError(f"fuse on '{sch.name}': {unknown('compiler', compiler, COMPILERS)}")
    if subgraph is None:
        raise ScheduleError(
            f"fuse on '{sch.name}': it takes subgraphs that find returned; compile() runs a whole module through "
            "torch.compile"
        )
    fuse_subgraph(sch, subgraph, compiler, name)
