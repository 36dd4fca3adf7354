"""Determines what the replacement of a subgraph takes over from the modules inside it, and what then leaves the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import (
    children_of,
    forward_hooks_of,
    give_pre_hook,
    has_backward_hooks,
    parameters_of,
    pre_hooks_of,
    take_forward_hook,
)
from ...base.errors import ScheduleError
from ..forward import layers_of
from ..held import give_hooks, own_tensors, replace_tensor
from ..parallel import collectives
from ..parallel.exchange import Exchange, InputSync, OutputSync, ParameterSync, syncs_of
from ..parallel.partial import BiasOnce, WithoutBias, once
from ..parallel.sharding import holders, shards_of
from ..tree import Tree, join, places
from .called import used_modules
from .operations import SubgraphCall
from .subgraph import Subgraph
from .trace import ITSELF, Traced

Hook = InputSync | OutputSync


@dataclass(slots=True)
class Handover:
    """Hooks, exchanges and deferred work that move from replaced modules to their replacement."""

    before: dict[fx.Node, list[Hook]] = field(default_factory=dict)
    """Exchanges on its inputs."""
    after: list[Hook] = field(default_factory=list)
    """Exchanges on its outputs."""
    parameters: dict[str, list[tuple[Callable[[torch.Tensor], torch.Tensor], str]]] = field(default_factory=dict)
    """Functions applied to its parameters, with their names, by target."""
    replaced: list[nn.Module] = field(default_factory=list)
    """Modules of these exchanges."""
    before_new: list[tuple[nn.Module, Callable[..., Any]]] = field(default_factory=list)
    """Hooks before the forward of a replaced module that the new one takes over, with their module."""
    called: set[nn.Module] = field(default_factory=set)
    """Modules with other calls, which keep their hooks, exchanges and deferred work."""
    whole: tuple[str, nn.Module] | None = None
    """The single module, with its path, that a module replaces, including its hooks and deferred work."""

    def settle(self, tree: Tree, path: str, target: Any) -> None:
        """Gives the new module what it takes over, and removes it from the old modules without another call."""
        for module in self.replaced:
            if module in self.called:
                continue
            # Sums after the replacement are over the pieces of its inputs.
            module.__dict__["_handed_over"] = [*module.__dict__.get("_handed_over", ()), *syncs_of(module)]
            for hook in [each for each in forward_hooks_of(module) if isinstance(each, Exchange)]:
                take_forward_hook(module, hook)
        for module, function in self.before_new:
            give_pre_hook(module, function, tree.module.get_submodule(join(path, target)))
            if module not in self.called:
                take_forward_hook(module, function)
        if self.whole is not None:
            old_path, old = self.whole
            give_hooks(old, tree.module.get_submodule(join(path, target)))
            for each in [each for each in tree.deferred if each.path == old_path]:
                if old in self.called:
                    tree.deferred.append(replace(each, path=join(path, target)))
                else:
                    each.path = join(path, target)


def hand_over(tree: Tree, handles: Sequence[Subgraph], new: Any, label: str) -> list[Handover]:
    """Determines which hooks, exchanges and deferred work of each subgraph's modules its replacement takes over.

    Raises:
        ScheduleError: something cannot be moved to the replacement; says what and why.
    """
    nodes = {node for each in handles for node in each.nodes}
    called, _ = used_modules(tree.module, without=nodes)
    plans = [_of_subgraph(tree, each, new, label, called) for each in handles]
    same = plans[0].whole is not None and len({plan.whole for plan in plans}) == 1
    if len(plans) > 1 and not same and any(_gives_hooks(tree, plan) for plan in plans):
        raise ScheduleError(
            f"{label}: one module in {len(plans)} places cannot have the hooks or deferred work of a module at one of "
            "them only; replace them one by one"
        )
    return plans


def _gives_hooks(tree: Tree, plan: Handover) -> bool:
    """True if the new module itself gets hooks or deferred work."""
    if plan.whole is None:
        return bool(plan.before_new)
    path, module = plan.whole
    deferred = any(each.path == path for each in tree.deferred)
    return bool(deferred or forward_hooks_of(module) or has_backward_hooks(module))


def _of_subgraph(tree: Tree, each: Subgraph, new: Any, label: str, called: set[nn.Module]) -> Handover:
    plan = Handover(called=called)
    traced = tree.module.get_submodule(each.path)
    kept = set(new.modules()) if isinstance(new, nn.Module) else set()
    for node, target in _calls(each.nodes):
        module = traced.get_submodule(target)
        if module in kept:
            continue
        path = join(each.path, target)
        if node is None:
            _nothing_on(tree, path, module, label, "is in a separate operation")
        elif isinstance(new, nn.Module) and each.nodes == (node,):
            _nothing_below(tree, path, module, label)
            plan.whole = (path, module)
        else:
            _nothing_below(tree, path, module, label)
            _module(tree, plan, each, node, path, module, label, new)
    return plan


def _module(
    tree: Tree, plan: Handover, each: Subgraph, node: fx.Node, path: str, module: nn.Module, label: str, new: Any
) -> None:
    """Adds the state of one module of the subgraph to a plan.

    Hooks before the forward of its first module move to a module that replaces it with the same inputs.
    """
    what = next((item for item in tree.deferred if item.path == path), None)
    if what is not None:
        raise ScheduleError(f"{label}: '{path}' has {what.phase}, which would be lost; replace first")
    for layer in layers_of(module):
        if isinstance(layer, BiasOnce):
            plan.parameters.setdefault(f"{node.target}.bias", []).append((once(layer.axis), "bias_once"))
        elif not isinstance(layer, WithoutBias):
            raise ScheduleError(f"{label}: '{path}' has {type(layer).__name__}, which would be lost; replace first")
    own = [hook for hook in forward_hooks_of(module) if not isinstance(hook, Exchange)]
    # Before the new module the hook also acts on what other operations inside take.
    alone = {user for value in node.all_input_nodes for user in value.users if user in each.nodes} == {node}
    same = alone and not node.kwargs and tuple(each.inputs) == tuple(node.args)
    moves = isinstance(new, nn.Module) and each.nodes[0] is node and same
    if own and moves and not has_backward_hooks(module) and pre_hooks_of(module).issuperset(own):
        plan.before_new += [(module, hook) for hook in own]
    elif own or has_backward_hooks(module):
        raise ScheduleError(
            f"{label}: '{path}' has a hook, which a part of what '{each.path or 'the root'}' computes cannot keep, or "
            "which would also act on what other operations inside take; replace first, and hook what takes its place"
        )
    for hook in forward_hooks_of(module):
        if isinstance(hook, OutputSync):
            if each.outputs != (node,):
                raise ScheduleError(f"{label}: {_describe(path, hook)} is inside the replaced part; replace less")
            plan.after.append(hook)
        elif isinstance(hook, InputSync):
            _input(plan, each, node, path, hook, label)
        elif isinstance(hook, ParameterSync):
            if module in plan.called:
                raise ScheduleError(
                    f"{label}: {_describe(path, hook)} is on the parameters, and '{path}' has another call that keeps "
                    "it, so gradients would be summed twice; replace all its calls at once"
                )
            whole = [name for name in parameters_of(module) if name not in shards_of(module)]
            for name in whole:
                function = partial(collectives.through, backward=partial(collectives.all_reduce, axis=hook.axis))
                plan.parameters.setdefault(f"{node.target}.{name}", []).append((function, "sync_parameter"))
    plan.replaced.append(module)


def _input(plan: Handover, each: Subgraph, node: fx.Node, path: str, hook: InputSync, label: str) -> None:
    """Adds an exchange on a module's input before the replacement, if that has the same input."""
    values = [value for value in [*node.args, *node.kwargs.values()] if isinstance(value, fx.Node)]
    for value in values[:1] if hook.first else values:
        if value in each.nodes:
            raise ScheduleError(f"{label}: {_describe(path, hook)} is inside the replaced part; replace less")
        others = [user for user in value.users if user in each.nodes]
        if any(hook.sync not in _syncs(each, user) for user in others):
            names = ", ".join(user.name for user in others if user is not node)
            raise ScheduleError(
                f"{label}: {_describe(path, hook)} concerns what {names} inside of it takes too, as it is; replace less, "
                f"or give {names} the same sync"
            )
        found = plan.before.setdefault(value, [])
        if not any(other.sync == hook.sync for other in found):
            found.append(hook)


def _syncs(each: Subgraph, node: fx.Node) -> list[Any]:
    return syncs_of(each.module.get_submodule(node.target)) if node.op == "call_module" else []


def _describe(path: str, hook: Exchange) -> str:
    return f"sync({hook.sync.mode!r}, {hook.sync.op!r}) of '{path}'"


def _nothing_below(tree: Tree, path: str, module: nn.Module, label: str) -> None:
    for name, child in module.named_modules():
        if name:
            _nothing_on(tree, join(path, name), child, label, f"lies in '{path}'")


def _nothing_on(tree: Tree, path: str, module: nn.Module, label: str, where: str) -> None:
    found = [each.phase for each in tree.deferred if each.path == path]
    found += [type(each).__name__ for each in layers_of(module)]
    found += ["a hook"] if has_backward_hooks(module) or forward_hooks_of(module) else []
    if found:
        raise ScheduleError(f"{label}: '{path}' {where} and has {found[0]}, which would be lost; replace first")


def _calls(nodes: Any) -> Iterator[tuple[fx.Node | None, str]]:
    """Modules that nodes call: the node, or None if the call is inside an operation, and the target."""
    for node in nodes:
        if node.op == "call_module":
            yield node, node.target
        elif isinstance(node.target, SubgraphCall):
            for _, target in _calls(node.target.graph.nodes):
                yield None, target


# Unused modules and tensors


def prune(tree: Tree, each: Subgraph, attributes: set[str]) -> list[str]:
    """Removes modules and tensors that only a replaced subgraph has used.

    Args:
        each: the subgraph, which has left its graph.
        attributes: targets of the graph's attributes before.

    Returns:
        Parameters that no longer exist in the model, with their shapes.
    """
    traced = tree.module.get_submodule(each.path)
    alive, read = used_modules(tree.module)
    gone = [traced.get_submodule(target) for _, target in _calls(each.nodes)]
    suspects = [
        (module, name)
        for old in gone
        if old not in alive
        for module in old.modules()
        for name, _ in own_tensors(module)
    ]
    for target in attributes - {ITSELF}:
        holder, _, name = target.rpartition(".")
        suspects.append((traced.get_submodule(holder), name))
    lost: dict[torch.Tensor, str] = {}
    for module, name in suspects:
        tensor = dict(own_tensors(module)).get(name)
        used_whole = module in alive and not layers_of(module, Traced)
        if tensor is None or used_whole or (module, name) in read:
            continue
        held = next(path for path, holder, own in holders(tree.module, tensor) if holder is module and own == name)
        if isinstance(tensor, nn.Parameter):
            lost[tensor] = f"{join(held, name)} {tuple(tensor.shape)}"
        replace_tensor(module, name, None)
        if name in shards_of(module):
            module.__dict__["_shards"] = {key: cut for key, cut in shards_of(module).items() if key != name}
        tree.annotations.pop((held, name), None)
    for old in gone:
        is_read = any(module is old for module, _ in read)
        if old not in alive and not is_read and not any(own_tensors(module) for module in old.modules()):
            for parent, name, _ in places(tree.module, old):
                del children_of(parent)[name]
    left = set(tree.module.parameters())
    return [message for tensor, message in lost.items() if tensor not in left]
