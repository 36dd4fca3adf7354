"""Fuses, replaces and checkpoints subgraphs.

Hooks and exchanges of replaced modules move to their replacement; modules and parameters that nothing uses any more are
removed.
"""

import inspect
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import (
    children_of,
    forward_hooks_of,
    has_backward_hooks,
    parameters_of,
    take_forward_hook,
)
from ...base.errors import ScheduleError
from ..forward import Layer, layers_of
from ..parallel import collectives
from ..parallel.exchange import BiasOnce, Exchange, InputSync, OutputSync, ParameterSync, WithoutBias, once, syncs_of
from ..parallel.sharding import holders, shards_of
from ..tree import ScheduledModule, Tree, give_hooks, join, own_tensors, places, replace_tensor
from .called import used_modules
from .pattern import Attribute
from .subgraph import Subgraph, chosen, extract, merged
from .trace import ITSELF, Call, SubgraphCall, SyncCall, Traced


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
    subgraph: Subgraph, target: Any, inputs: Sequence[Any], with_module: bool, plan: "Handover | None" = None
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
                value = add(graph.call_function, Call(*function), (value,))
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


Hook = InputSync | OutputSync


@dataclass(slots=True)
class Handover:
    """Hooks, exchanges and deferred work that a replacement takes over from the modules of its subgraph."""

    before_inputs: dict[fx.Node, list[Hook]] = field(default_factory=dict)
    """Exchanges on the replacement's inputs."""
    after_outputs: list[Hook] = field(default_factory=list)
    """Exchanges on the replacement's outputs."""
    parameters: dict[str, list[tuple[Callable[[torch.Tensor], torch.Tensor], str]]] = field(default_factory=dict)
    """Functions applied to the parameters that the replacement gets, with their names, by target."""
    replaced: list[nn.Module] = field(default_factory=list)
    """Modules that had the exchanges."""
    called: set[nn.Module] = field(default_factory=set)
    """Modules with other calls, which keep their hooks, exchanges and deferred work."""
    replaced_module: tuple[str, nn.Module] | None = None
    """The single module, with its path, that a module replaces, including its hooks and deferred work."""

    def settle(self, tree: Tree, path: str, target: Any) -> None:
        """Moves hooks and deferred work to the new module; modules with another call keep theirs, too."""
        for module in self.replaced:
            if module in self.called:
                continue
            # `check_synced` counts these: sums after the replacement also add up this module's partial sums.
            module.__dict__["_handed_over"] = [*module.__dict__.get("_handed_over", ()), *syncs_of(module)]
            for hook in [hook for hook in forward_hooks_of(module) if isinstance(hook, Exchange)]:
                take_forward_hook(module, hook)
        if self.replaced_module is not None:
            old_path, old = self.replaced_module
            give_hooks(old, tree.module.get_submodule(join(path, target)))
            for work in [work for work in tree.deferred if work.path == old_path]:
                if old in self.called:
                    tree.deferred.append(replace(work, path=join(path, target)))
                else:
                    work.path = join(path, target)


def hand_over(tree: Tree, handles: Sequence[Subgraph], new: Any, label: str) -> list[Handover]:
    """Determines which hooks, exchanges and deferred work of each subgraph's modules its replacement takes over.

    Raises:
        ScheduleError: a hook, exchange or deferred work cannot move to the replacement; the message has the reason.
    """
    nodes = {node for subgraph in handles for node in subgraph.nodes}
    called, _ = used_modules(tree.module, without=nodes)
    plans = [_of_subgraph(tree, subgraph, new, label, called) for subgraph in handles]
    same_module = plans[0].replaced_module is not None and len({plan.replaced_module for plan in plans}) == 1
    if len(plans) > 1 and not same_module and any(_gives_hooks(tree, plan) for plan in plans):
        raise ScheduleError(
            f"{label}: one module in {len(plans)} places cannot have the hooks or deferred work of a module at one of "
            "them only; replace them one by one"
        )
    return plans


def _gives_hooks(tree: Tree, plan: Handover) -> bool:
    """True if the new module itself gets hooks or deferred work."""
    if plan.replaced_module is None:
        return False
    path, module = plan.replaced_module
    deferred = any(work.path == path for work in tree.deferred)
    return bool(deferred or forward_hooks_of(module) or has_backward_hooks(module))


def _of_subgraph(tree: Tree, subgraph: Subgraph, new: Any, label: str, called: set[nn.Module]) -> Handover:
    plan = Handover(called=called)
    traced = tree.module.get_submodule(subgraph.path)
    reused = set(new.modules()) if isinstance(new, nn.Module) else set()
    for node, target in _calls(subgraph.nodes):
        module = traced.get_submodule(target)
        if module in reused:
            continue  # `new` calls the module itself, with its hooks
        path = join(subgraph.path, target)
        if node is None:
            _nothing_on(tree, path, module, label, "is in a separate operation")
        elif isinstance(new, nn.Module) and subgraph.nodes == (node,):
            _nothing_below(tree, path, module, label)
            plan.replaced_module = (path, module)
        else:
            _nothing_below(tree, path, module, label)
            _module(tree, plan, subgraph, node, path, module, label)
    return plan


def _module(
    tree: Tree, plan: Handover, subgraph: Subgraph, node: fx.Node, path: str, module: nn.Module, label: str
) -> None:
    """Adds the state of one module of the subgraph to a plan."""
    deferred = next((work for work in tree.deferred if work.path == path), None)
    if deferred is not None:
        raise ScheduleError(f"{label}: '{path}' has {deferred.phase}, which would be lost; replace first")
    for layer in layers_of(module, Layer):
        if isinstance(layer, BiasOnce):
            plan.parameters.setdefault(f"{node.target}.bias", []).append((once(layer.axis), "bias_once"))
        elif not isinstance(layer, WithoutBias):
            raise ScheduleError(f"{label}: '{path}' has {type(layer).__name__}, which would be lost; replace first")
    if has_backward_hooks(module) or any(not isinstance(hook, Exchange) for hook in forward_hooks_of(module)):
        raise ScheduleError(
            f"{label}: '{path}' has a hook, which would be lost in the graph of '{subgraph.path or 'the root'}'; replace "
            "first, and hook the replacement"
        )
    for hook in forward_hooks_of(module):
        if isinstance(hook, OutputSync):
            if subgraph.outputs != (node,):
                raise ScheduleError(f"{label}: {_describe(path, hook)} is inside the replaced part; replace less")
            plan.after_outputs.append(hook)
        elif isinstance(hook, InputSync):
            _input(plan, subgraph, node, path, hook, label)
        elif isinstance(hook, ParameterSync):
            if module in plan.called:
                raise ScheduleError(
                    f"{label}: {_describe(path, hook)} is on the parameters, and '{path}' has another call that keeps "
                    "it, so gradients would be summed twice; replace all its calls at once"
                )
            unsharded = [name for name in parameters_of(module) if name not in shards_of(module)]
            for name in unsharded:
                function = partial(collectives.through, backward=partial(collectives.all_reduce, axis=hook.axis))
                plan.parameters.setdefault(f"{node.target}.{name}", []).append((function, "sync_parameter"))
    plan.replaced.append(module)


def _input(plan: Handover, subgraph: Subgraph, node: fx.Node, path: str, hook: InputSync, label: str) -> None:
    """Adds an exchange on a module's input before the replacement, if all operations inside have the same exchange."""
    values = [value for value in [*node.args, *node.kwargs.values()] if isinstance(value, fx.Node)]
    for value in values[:1] if hook.first else values:
        if value in subgraph.nodes:
            raise ScheduleError(f"{label}: {_describe(path, hook)} is inside the replaced part; replace less")
        users = [user for user in value.users if user in subgraph.nodes]
        if any(hook.sync not in _syncs(subgraph, user) for user in users):
            names = ", ".join(user.name for user in users if user is not node)
            raise ScheduleError(
                f"{label}: {_describe(path, hook)} is on an input that {names} takes too, without a sync; replace less, or give "
                f"{names} the same sync"
            )
        hooks = plan.before_inputs.setdefault(value, [])
        if not any(earlier.sync == hook.sync for earlier in hooks):
            hooks.append(hook)


def _syncs(subgraph: Subgraph, node: fx.Node) -> list[Any]:
    return syncs_of(subgraph.module.get_submodule(node.target)) if node.op == "call_module" else []


def _describe(path: str, hook: Exchange) -> str:
    return f"sync({hook.sync.mode!r}, {hook.sync.op!r}) of '{path}'"


def _nothing_below(tree: Tree, path: str, module: nn.Module, label: str) -> None:
    for name, child in module.named_modules():
        if name:
            _nothing_on(tree, join(path, name), child, label, f"is in '{path}'")


def _nothing_on(tree: Tree, path: str, module: nn.Module, label: str, location: str) -> None:
    state = [work.phase for work in tree.deferred if work.path == path]
    state += [type(layer).__name__ for layer in layers_of(module, Layer)]
    state += ["a hook"] if has_backward_hooks(module) or forward_hooks_of(module) else []
    if state:
        raise ScheduleError(f"{label}: '{path}' {location} and has {state[0]}, which would be lost; replace first")


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
