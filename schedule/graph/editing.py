"""Fuses, replaces and checkpoints subgraphs."""

import inspect
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from ...base._torch import children_of
from ...base.errors import ScheduleError
from ..tree import ScheduledModule
from .handover import Handover, hand_over, prune
from .operations import Call, SubgraphCall, SyncCall, TensorCall
from .pattern import Attribute
from .subgraph import Subgraph, chosen, extract, merged
from .trace import ITSELF


def fuse_subgraph(sch: ScheduledModule, subgraphs: Any, compiler: Any, name: str | None) -> None:
    """Converts subgraphs to one operation each, run through a compiler."""
    _check_name(sch, "fuse", name)
    for subgraph in chosen(sch, "fuse", subgraphs):
        graph, inputs = extract(subgraph)
        kinds = dict.fromkeys(re.sub(r"\W|_?\d+$", "", node_name) for node_name in subgraph.names)
        operation_name = name or "fused_" + "_".join(kinds)
        _insert(subgraph, SubgraphCall(graph, operation_name, compiler), inputs, with_module=True)


def checkpoint_subgraph(sch: ScheduledModule, subgraphs: Any, extra: Callable[[nn.Module], dict[str, Any]]) -> None:
    """Converts subgraphs to one operation each, recomputed in the backward pass."""
    for subgraph in chosen(sch, "checkpoint", subgraphs):
        graph, inputs = extract(subgraph)
        _insert(subgraph, SubgraphCall(graph, "checkpointed", checkpoint=extra), inputs, with_module=True)


def replace_subgraph(sch: ScheduledModule, new: Any, subgraphs: Any, name: str | None, together: bool) -> None:
    """Replaces subgraphs by a call of `new` with the pattern's inputs."""
    label = f"replace on '{sch.name}'"
    _check_name(sch, "replace", name)
    handles = chosen(sch, "replace", subgraphs)
    if together:
        handles = chosen(sch, "replace", merged(label, handles))
    if not callable(new) or isinstance(new, type):
        hint = f"; make one: {new.__name__}(...)" if isinstance(new, type) else ""
        raise ScheduleError(f"{label}: new must be a module or a function, but got {new!r}{hint}")
    has_parameters = isinstance(new, nn.Module) and any(True for _ in new.parameters())
    if has_parameters and len(handles) > 1:
        raise ScheduleError(
            f"{label}: one module with parameters cannot replace {len(handles)} subgraphs, or they would share "
            "them; replace them one by one, or by one call that returns an output for each with together=True"
        )
    for subgraph in handles:
        _check_arity(sch, new, subgraph)
    plans = hand_over(sch.tree, handles, new, label)
    lost: list[str] = []
    for subgraph, plan in zip(handles, plans):
        module = sch.tree.module.get_submodule(subgraph.path)
        nodes = list(subgraph.layer.graph.nodes)
        attributes = {node.target for node in nodes if node.op == "get_attr"}
        target: Any = Call(new, name)
        if isinstance(new, nn.Module):
            target = _free(children_of(module), name)
            module.add_module(target, new.train(module.training))
        _insert(subgraph, target, list(subgraph.inputs), with_module=False, plan=plan)
        plan.settle(sch.tree, subgraph.path, target)
        lost += prune(sch.tree, subgraph, attributes)
    if lost:
        warnings.warn(f"{label}: not kept, since nothing uses it any more: {', '.join(lost)}", stacklevel=4)


def _check_name(sch: ScheduledModule, primitive: str, name: str | None) -> None:
    if name is not None and not str(name).isidentifier():
        raise ScheduleError(f"{primitive} on '{sch.name}': name must be an identifier, but got {name!r}")


def _free(children: Any, name: str | None) -> str:
    """Returns an unused name for a child."""
    numbered = (f"{name or 'replaced'}_{number}" for number in range(len(children) + 1))
    return next(candidate for candidate in ([name] if name else []) + list(numbered) if candidate not in children)


def _check_arity(sch: ScheduledModule, new: Any, subgraph: Subgraph) -> None:
    """Raises ScheduleError if `new` cannot be called with the inputs of a subgraph."""
    try:
        signature = inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except ValueError:
        return  # a builtin without a signature
    try:
        signature.bind(*subgraph.inputs)
    except TypeError as error:
        raise ScheduleError(
            f"replace on '{sch.name}': new is called with the {len(subgraph.inputs)} inputs of the pattern, but {error}"
        ) from error


def _insert(
    subgraph: Subgraph, target: Any, inputs: Sequence[Any], with_module: bool, plan: Handover | None = None
) -> None:
    """Replaces a subgraph's nodes by one node."""
    graph, plan = subgraph.layer.graph, plan or Handover()
    anchor = _place(subgraph, inputs)

    def add(make: Callable[..., fx.Node], *args: Any) -> fx.Node:
        nonlocal anchor
        with graph.inserting_after(anchor):
            anchor = make(*args)
        return anchor

    args = []
    for value in inputs:
        if isinstance(value, Attribute):
            name = value.target
            value = add(graph.get_attr, name)
            for function in plan.parameters.get(name, ()):
                value = add(graph.call_function, TensorCall(*function), (value,))
        elif isinstance(value, fx.Node):
            for hook in plan.before_inputs.get(value, ()):
                value = add(graph.call_function, SyncCall(hook), (value,))
        args.append(value)
    if with_module:
        # The traced module itself, which is `self` in the graph's code, for attributes that the subgraph reads.
        args.insert(0, add(graph.get_attr, ITSELF))
    replacement = add(graph.call_module if isinstance(target, str) else graph.call_function, target, tuple(args))
    for hook in plan.after_outputs:
        replacement = add(graph.call_function, SyncCall(hook), (replacement,))
    if len(subgraph.outputs) == 1:
        subgraph.outputs[0].replace_all_uses_with(replacement)
    else:
        for index, output in enumerate(subgraph.outputs):
            item = add(graph.call_function, operator.getitem, (replacement, index))
            output.replace_all_uses_with(item)
    for node in reversed(subgraph.nodes):
        graph.erase_node(node)
    subgraph.layer.changed()


def _place(subgraph: Subgraph, inputs: Sequence[Any]) -> fx.Node:
    """Returns the node after which to insert a subgraph's operation: its last node, or its last input if a user precedes it."""
    nodes = list(subgraph.layer.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    last_node = max(subgraph.nodes, key=order.__getitem__)
    users = [user for node in subgraph.outputs for user in node.users if user not in subgraph.nodes]
    if all(order[user] > order[last_node] for user in users):
        return last_node
    input_nodes = [node for node in inputs if isinstance(node, fx.Node)]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    return max([*input_nodes, *placeholders], key=order.__getitem__)
