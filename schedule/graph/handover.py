"""What the replacement of a subgraph takes over from the modules inside it, and what then leaves the model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import (
    buffers_of,
    children_of,
    forward_hooks_of,
    has_backward_hooks,
    move_pre_hook,
    parameters_of,
    pre_hooks_of,
    take_forward_hook,
)
from ...base.errors import ScheduleError
from ..forward import layers_of
from ..held import give_hooks
from ..parallel import collectives
from ..parallel.exchange import Exchange, InputSync, OutputSync, ParameterSync, syncs_of
from ..parallel.partial import BiasOnce, WithoutBias, once
from ..parallel.sharding import holders, shards_of
from ..tree import Tree, join, places
from .called import used
from .operations import SubgraphCall
from .subgraph import Subgraph
from .trace import ITSELF, Traced

Hook = InputSync | OutputSync


@dataclass(slots=True)
class Handover:
    """What is done around a replacement in the place of the modules that it replaces."""

    before: dict[fx.Node, list[Hook]] = field(default_factory=dict)
    """Exchanges of what it is given."""
    after: list[Hook] = field(default_factory=list)
    """Exchanges of what it gives."""
    parameters: dict[str, list[tuple[Callable[[torch.Tensor], torch.Tensor], str]]] = field(default_factory=dict)
    """What is done to parameters on their way to it, by target: functions and their names."""
    replaced: list[nn.Module] = field(default_factory=list)
    """The modules whose exchanges these are."""
    before_new: list[tuple[nn.Module, Callable[..., Any]]] = field(default_factory=list)
    """Hooks before the forward of a replaced module that go to the new one, with the module that has each."""
    whole: tuple[str, nn.Module] | None = None
    """The one module, and its path, that a module takes the place of, with its hooks and what is deferred."""

    def settle(self, tree: Tree, path: str, target: Any) -> None:
        """Takes from the old modules what went over."""
        for module in self.replaced:
            # What is added up behind the replacement counts for the pieces that it is given.
            module.__dict__["_handed_over"] = syncs_of(module)
            for hook in [each for each in forward_hooks_of(module) if isinstance(each, Exchange)]:
                take_forward_hook(module, hook)
        for module, function in self.before_new:
            move_pre_hook(module, function, tree.module.get_submodule(join(path, target)))
        if self.whole is not None:
            old_path, old = self.whole
            give_hooks(old, tree.module.get_submodule(join(path, target)))
            for each in tree.deferred:
                if each.path == old_path:
                    each.path = join(path, target)


def hand_over(tree: Tree, each: Subgraph, new: Any, label: str) -> Handover:
    """What of hooks, exchanges and deferred work on the modules of a subgraph its replacement takes over.

    Raises:
        ScheduleError: something has no place at the replacement; says what and why.
    """
    plan = Handover()
    traced = tree.module.get_submodule(each.path)
    kept = set(new.modules()) if isinstance(new, nn.Module) else set()
    for node, target in _calls(each.nodes):
        module = traced.get_submodule(target)
        if module in kept:
            continue
        path = join(each.path, target)
        if node is None:
            _nothing_on(tree, path, module, label, "lies in an operation of its own")
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
    """Adds to a plan what sits on one module of the subgraph.

    Hooks before the forward of its first module go to a module that takes its place and is given the same.
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
    moves = isinstance(new, nn.Module) and each.nodes[0] is node and tuple(each.inputs) == tuple(node.args)
    if own and moves and not has_backward_hooks(module) and pre_hooks_of(module).issuperset(own):
        plan.before_new += [(module, hook) for hook in own]
    elif own or has_backward_hooks(module):
        raise ScheduleError(
            f"{label}: '{path}' has a hook, which a part of what '{each.path or 'the root'}' computes cannot keep; "
            "replace first, and hook what takes its place"
        )
    for hook in forward_hooks_of(module):
        if isinstance(hook, OutputSync):
            if each.outputs != (node,):
                raise ScheduleError(f"{label}: {_said(path, hook)} lies inside of what is replaced; replace less")
            plan.after.append(hook)
        elif isinstance(hook, InputSync):
            _input(plan, each, node, path, hook, label)
        elif isinstance(hook, ParameterSync):
            whole = [name for name in parameters_of(module) if name not in shards_of(module)]
            for name in whole:
                function = partial(collectives.through, backward=partial(collectives.all_reduce, axis=hook.axis))
                plan.parameters.setdefault(f"{node.target}.{name}", []).append((function, "sync_parameter"))
    plan.replaced.append(module)


def _input(plan: Handover, each: Subgraph, node: fx.Node, path: str, hook: InputSync, label: str) -> None:
    """Puts an exchange of what a module is given before the replacement, where that is given the same."""
    values = [value for value in [*node.args, *node.kwargs.values()] if isinstance(value, fx.Node)]
    for value in values[:1] if hook.first else values:
        if value in each.nodes:
            raise ScheduleError(f"{label}: {_said(path, hook)} lies inside of what is replaced; replace less")
        others = [user for user in value.users if user in each.nodes]
        if any(hook.sync not in _syncs(each, user) for user in others):
            names = ", ".join(user.name for user in others if user is not node)
            raise ScheduleError(
                f"{label}: {_said(path, hook)} concerns what {names} inside of it takes too, as it is; replace less, "
                f"or give {names} the same sync"
            )
        found = plan.before.setdefault(value, [])
        if not any(other.sync == hook.sync for other in found):
            found.append(hook)


def _syncs(each: Subgraph, node: fx.Node) -> list[Any]:
    module = each.module
    return syncs_of(module.get_submodule(node.target)) if node.op == "call_module" else []


def _said(path: str, hook: Exchange) -> str:
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
    """The modules that nodes call: the node, or None where the call lies in an operation, and the target."""
    for node in nodes:
        if node.op == "call_module":
            yield node, node.target
        elif isinstance(node.target, SubgraphCall):
            for _, target in _calls(node.target.graph.nodes):
                yield None, target


# What nothing uses any more


def prune(tree: Tree, each: Subgraph, attributes: set[str]) -> list[str]:
    """Takes modules and tensors out of the model that only a replaced subgraph has used.

    Args:
        tree: the model's.
        each: the subgraph, which has left its graph.
        attributes: targets of the graph's attributes before it did.

    Returns:
        The parameters that the model has nowhere any more, with their shapes.
    """
    traced = tree.module.get_submodule(each.path)
    alive, read = used(tree.module)
    gone = [traced.get_submodule(target) for _, target in _calls(each.nodes)]
    suspects = [(module, name) for old in gone if old not in alive for module in old.modules() for name in _own(module)]
    for target in attributes - {ITSELF}:
        holder, _, name = target.rpartition(".")
        suspects.append((traced.get_submodule(holder), name))
    lost: dict[torch.Tensor, str] = {}
    for module, name in suspects:
        tensor = _own(module).get(name)
        used_whole = module in alive and not layers_of(module, Traced)
        if tensor is None or used_whole or (module, name) in read:
            continue
        held = next(path for path, holder, own in holders(tree.module, tensor) if holder is module and own == name)
        if isinstance(tensor, nn.Parameter):
            lost[tensor] = f"{join(held, name)} {tuple(tensor.shape)}"
        (parameters_of(module) if name in parameters_of(module) else buffers_of(module))[name] = None
        if name in shards_of(module):
            module.__dict__["_shards"] = {key: cut for key, cut in shards_of(module).items() if key != name}
        tree.annotations.pop((held, name), None)
    for old in gone:
        asked = any(module is old for module, _ in read)
        if old not in alive and not asked and not any(_own(module) for module in old.modules()):
            for parent, name, _ in places(tree.module, old):
                del children_of(parent)[name]
    left = set(tree.module.parameters())
    return [said for tensor, said in lost.items() if tensor not in left]


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    held = {**parameters_of(module), **buffers_of(module)}
    return {name: tensor for name, tensor in held.items() if tensor is not None}
