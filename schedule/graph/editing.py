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


def fuse_subgraph(sch: ScheduledModule, given: Any, compiler: Any, name: str | None) -> None:
    """Converts subgraphs to one operation each, run through a compiler."""
    _check_name(sch, "fuse", name)
    for each in chosen(sch, "fuse", given):
        graph, outside = extract(each)
        made = name or "fused_" + "_".join(dict.fromkeys(re.sub(r"\W|_?\d+$", "", n) for n in each.names))
        _insert(each, SubgraphCall(graph, made, compiler), outside, with_module=True)


def checkpoint_subgraph(sch: ScheduledModule, given: Any, extra: Callable[[nn.Module], dict[str, Any]]) -> None:
    """Converts subgraphs to one operation each, recomputed in the backward pass."""
    for each in chosen(sch, "checkpoint", given):
        graph, outside = extract(each)
        _insert(each, SubgraphCall(graph, "checkpointed", checkpoint=extra), outside, with_module=True)


def replace_subgraph(sch: ScheduledModule, new: Any, given: Any, name: str | None, together: bool) -> None:
    """Replaces subgraphs by a call of `new` with the pattern's inputs."""
    label = f"replace on '{sch.name}'"
    _check_name(sch, "replace", name)
    handles = chosen(sch, "replace", given)
    if together:
        handles = chosen(sch, "replace", merged(label, handles))
    if not callable(new) or isinstance(new, type):
        made = f"; make one: {new.__name__}(...)" if isinstance(new, type) else ""
        raise ScheduleError(f"{label}: new must be a module or a function, but got {new!r}{made}")
    owned = isinstance(new, nn.Module) and any(True for _ in new.parameters())
    if owned and len(handles) > 1:
        raise ScheduleError(
            f"{label}: one module with parameters cannot replace {len(handles)} subgraphs, or they would share "
            "them; replace them one by one, or by one call that gives an output for each with together=True"
        )
    for each in handles:
        _arity(sch, new, each)
    plans = hand_over(sch.tree, handles, new, label)
    lost: list[str] = []
    for each, plan in zip(handles, plans):
        module = sch.tree.module.get_submodule(each.path)
        before = list(each.layer.graph.nodes)
        attributes = {node.target for node in before if node.op == "get_attr"}
        target: Any = Call(new, name)
        if isinstance(new, nn.Module):
            target = _free(children_of(module), name)
            module.add_module(target, new.train(module.training))
        _insert(each, target, list(each.inputs), with_module=False, plan=plan)
        plan.settle(sch.tree, each.path, target)
        lost += prune(sch.tree, each, attributes)
    if lost:
        warnings.warn(f"{label}: not kept, since nothing uses it any more: {', '.join(lost)}", stacklevel=4)


def _check_name(sch: ScheduledModule, primitive: str, name: str | None) -> None:
    if name is not None and not str(name).isidentifier():
        raise ScheduleError(f"{primitive} on '{sch.name}': name must be an identifier, but got {name!r}")


def _free(used: Any, name: str | None) -> str:
    """An unused name for a child."""
    numbered = (f"{name or 'replaced'}_{i}" for i in range(len(used) + 1))
    return next(each for each in ([name] if name else []) + list(numbered) if each not in used)


def _arity(sch: ScheduledModule, new: Any, each: Subgraph) -> None:
    try:
        signature = inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except ValueError:
        # A builtin without a signature.
        return
    try:
        signature.bind(*each.inputs)
    except TypeError as error:
        raise ScheduleError(
            f"replace on '{sch.name}': new is called with the {len(each.inputs)} inputs of the pattern, but {error}"
        ) from error


def _insert(
    each: Subgraph, target: Any, inputs: Sequence[Any], with_module: bool, plan: Handover | None = None
) -> None:
    """Replaces a subgraph's nodes by one node."""
    graph, plan = each.layer.graph, plan or Handover()
    anchor = _place(each, inputs)

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
            for hook in plan.before.get(value, ()):
                value = add(graph.call_function, SyncCall(hook), (value,))
        args.append(value)
    if with_module:
        # The traced module itself: `self` in the graph's code.
        args.insert(0, add(graph.get_attr, ITSELF))
    new = add(graph.call_module if isinstance(target, str) else graph.call_function, target, tuple(args))
    for hook in plan.after:
        new = add(graph.call_function, SyncCall(hook), (new,))
    if len(each.outputs) == 1:
        each.outputs[0].replace_all_uses_with(new)
    else:
        for i, output in enumerate(each.outputs):
            item = add(graph.call_function, operator.getitem, (new, i))
            output.replace_all_uses_with(item)
    for node in reversed(each.nodes):
        graph.erase_node(node)
    each.layer.changed()


def _place(each: Subgraph, inputs: Sequence[Any]) -> fx.Node:
    """Node after which a subgraph's operation is inserted: its last node, or its last input if that is later."""
    nodes = list(each.layer.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    last = max(each.nodes, key=order.__getitem__)
    users = [user for node in each.outputs for user in node.users if user not in each.nodes]
    if all(order[user] > order[last] for user in users):
        return last
    given = [node for node in inputs if isinstance(node, fx.Node)]
    heads = [node for node in nodes if node.op == "placeholder"]
    return max([*given, *heads], key=order.__getitem__)
