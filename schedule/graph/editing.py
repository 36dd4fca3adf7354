"""Fuses, replaces and checkpoints subgraphs.

Hooks and exchanges of a module move to one that replaces it; modules and parameters that nothing uses any more are removed.
"""

import inspect
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import (
    children_of,
    forward_hooks_of,
    has_backward_hooks,
)
from ...base.errors import ScheduleError
from ..forward import Layer, layers_of
from ..parallel.exchange import WithoutBias, syncs_of
from ..parallel.sharding import holders, shards_of
from ..tree import ScheduledModule, Tree, give_hooks, join, own_tensors, places, replace_tensor
from .called import used_modules
from .pattern import Attribute
from .subgraph import Subgraph, chosen, extract, merged
from .trace import ITSELF, Call, SubgraphCall, Traced


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
    replaced_modules = _replaced_modules(sch.tree, handles, new, label)
    called, _ = used_modules(sch.tree.module, without={node for subgraph in handles for node in subgraph.nodes})
    lost: list[str] = []
    for subgraph, replaced in zip(handles, replaced_modules):
        module = sch.tree.module.get_submodule(subgraph.path)
        nodes = list(subgraph.layer.graph.nodes)
        attributes = {node.target for node in nodes if node.op == "get_attr"}
        target: Any = Call(new, name)
        if isinstance(new, nn.Module):
            target = _free(children_of(module), name)
            module.add_module(target, new.train(module.training))
        _insert(subgraph, target, list(subgraph.inputs), with_module=False)
        if replaced is not None:
            _take_over(sch.tree, replaced, join(subgraph.path, target), called)
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


def _insert(subgraph: Subgraph, target: Any, inputs: Sequence[Any], with_module: bool) -> None:
    """Replaces a subgraph's nodes by one node."""
    graph = subgraph.layer.graph
    anchor = _place(subgraph, inputs)

    def add(make: Callable[..., fx.Node], *args: Any) -> fx.Node:
        nonlocal anchor
        with graph.inserting_after(anchor):
            anchor = make(*args)
        return anchor

    args = [add(graph.get_attr, value.target) if isinstance(value, Attribute) else value for value in inputs]
    if with_module:
        # The traced module itself, which is `self` in the graph's code, for attributes that the subgraph reads.
        args.insert(0, add(graph.get_attr, ITSELF))
    replacement = add(graph.call_module if isinstance(target, str) else graph.call_function, target, tuple(args))
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


def _replaced_modules(
    tree: Tree, handles: Sequence[Subgraph], new: Any, label: str
) -> list[tuple[str, nn.Module] | None]:
    """Returns the module, with its path, that a module replaces in each subgraph, including its hooks, exchanges and deferred
    work; None for a subgraph of several operations, or a function.

    Raises:
        ScheduleError: a hook, exchange or deferred work of a module would be lost; the message has it.
    """
    replaced = [_of_subgraph(tree, subgraph, new, label) for subgraph in handles]
    same_module = replaced[0] is not None and len(set(replaced)) == 1
    if len(replaced) > 1 and not same_module and any(taken is not None and _state(tree, *taken) for taken in replaced):
        raise ScheduleError(
            f"{label}: one module in {len(replaced)} places cannot have the hooks or deferred work of a module at one of "
            "them only; replace them one by one"
        )
    return replaced


def _of_subgraph(tree: Tree, subgraph: Subgraph, new: Any, label: str) -> tuple[str, nn.Module] | None:
    replaced_module = None
    traced = tree.module.get_submodule(subgraph.path)
    reused = set(new.modules()) if isinstance(new, nn.Module) else set()
    for node, target in _calls(subgraph.nodes):
        module = traced.get_submodule(target)
        if module in reused:
            continue  # `new` calls the module itself, with its hooks
        path = join(subgraph.path, target)
        submodules = dict(module.named_modules())
        if isinstance(new, nn.Module) and subgraph.nodes == (node,):
            replaced_module = (path, submodules.pop(""))
        for name, submodule in submodules.items():
            if state := _state(tree, join(path, name), submodule):
                raise ScheduleError(
                    f"{label}: '{join(path, name)}' has {state[0]}, which would be lost in the graph of "
                    f"'{subgraph.path or 'the root'}'; replace first, or fuse, which keeps the modules"
                )
    return replaced_module


def _state(tree: Tree, path: str, module: nn.Module) -> list[str]:
    """Returns what a schedule has added to a module, in words."""
    state = [work.phase for work in tree.deferred if work.path == path]
    state += [type(layer).__name__ for layer in layers_of(module, Layer) if not isinstance(layer, WithoutBias)]
    state += [f"sync({sync.mode!r}, {sync.op!r})" for sync in syncs_of(module)]
    return state + (["a hook"] if has_backward_hooks(module) or forward_hooks_of(module) else [])


def _take_over(tree: Tree, replaced: tuple[str, nn.Module], path: str, called: set[nn.Module]) -> None:
    """Moves hooks, exchanges and deferred work to the module at `path`; a module with another call keeps its own, too."""
    old_path, old = replaced
    give_hooks(old, tree.module.get_submodule(path))
    for work in [work for work in tree.deferred if work.path == old_path]:
        if old in called:
            tree.deferred.append(replace(work, path=path))
        else:
            work.path = path


def _calls(nodes: Any) -> Iterator[tuple[fx.Node | None, str]]:
    """Yields the modules that nodes call: the node, or None if the call is in a `SubgraphCall`, and the target."""
    for node in nodes:
        if node.op == "call_module":
            yield node, node.target
        elif isinstance(node.target, SubgraphCall):
            for _, target in _calls(node.target.graph.nodes):
                yield None, target


# Unused modules and tensors


def prune(tree: Tree, subgraph: Subgraph, attributes: set[str]) -> list[str]:
    """Removes modules and tensors that only a replaced subgraph has used.

    Args:
        subgraph: the subgraph, whose nodes are no longer in its graph.
        attributes: targets of the graph's attributes before the replacement.

    Returns:
        The removed parameters, with their shapes.
    """
    traced = tree.module.get_submodule(subgraph.path)
    alive, read = used_modules(tree.module)
    replaced_modules = [traced.get_submodule(target) for _, target in _calls(subgraph.nodes)]
    suspects = [
        (module, name)
        for old in replaced_modules
        if old not in alive
        for module in old.modules()
        for name, _ in own_tensors(module)
    ]
    for target in attributes - {ITSELF}:
        holder, _, name = target.rpartition(".")
        suspects.append((traced.get_submodule(holder), name))
    messages: dict[torch.Tensor, str] = {}
    for module, name in suspects:
        tensor = dict(own_tensors(module)).get(name)
        reads_all = module in alive and not layers_of(module, Traced)
        if tensor is None or reads_all or (module, name) in read:
            continue
        holder_path = next(
            path
            for path, holder, tensor_name in holders(tree.module, tensor)
            if holder is module and tensor_name == name
        )
        if isinstance(tensor, nn.Parameter):
            messages[tensor] = f"{join(holder_path, name)} {tuple(tensor.shape)}"
        replace_tensor(module, name, None)
        if name in shards_of(module):
            module.__dict__["_shards"] = {key: shard for key, shard in shards_of(module).items() if key != name}
        tree.annotations.pop((holder_path, name), None)
    for old in replaced_modules:
        is_read = any(module is old for module, _ in read)
        if old not in alive and not is_read and not any(own_tensors(module) for module in old.modules()):
            for parent, name, _ in places(tree.module, old):
                del children_of(parent)[name]
    remaining = set(tree.module.parameters())
    return [message for tensor, message in messages.items() if tensor not in remaining]
