"""Memory and initial values for tensors on the meta device, by the rules of the model.

Notation: a *key* is a tensor on the meta device with the unsharded shape, in place of each tensor (or shard) without
values. A *rule* sets the values of keys. Every rule first runs on the meta device, which shows the keys that it uses. A
key gets memory before the first rule that uses it. After the last one it is sharded and replaces the model's tensor.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base._torch import TorchDispatchMode, schema_of, tree_leaves
from ..base._transformers import initialise, initialises
from ..base.errors import ScheduleError
from .parallel import sharding
from .random_state import with_index
from .tree import called_with_path, join, own_tensors, replace_tensor

Init = Callable[..., Any]
"""`init(module)` or `init(module, path)`."""
Arrived = Callable[[nn.Module, str], None]
"""`arrived(module, name)` is called once a module's own tensor has memory and values."""
META = torch.device("meta")
_HOLDERS = (torch.Tensor, list, tuple, dict)
Place = tuple[nn.Module, str]
"""A module, and the name of a tensor of its own."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Attribute `_replaces` of a module that replaces one on the meta device: its initial values are those of `old`."""

    old: nn.Module
    path: str
    factory: Callable[..., Any] | None
    """Makes the module from `old`, and is called again when `old` has values; None if the user passed the module."""


@dataclass(frozen=True, slots=True)
class _Rule:
    path: str
    steps: tuple[Callable[[], Any], ...]
    uses: tuple[torch.Tensor, ...]
    """Keys that the steps read or set."""
    keeps: tuple[torch.Tensor, ...]
    """Keys in `uses` whose values are restored after the steps, because a replaced module has set them."""


def materialise(
    root: nn.Module,
    device: torch.device,
    seed: int,
    init: Init | None = None,
    arrived: Arrived = lambda module, name: None,
    hub: nn.Module | None = None,
) -> list[torch.Tensor]:
    """Moves a model to a device; tensors on the meta device get memory and seeded initial values.

    A module's tensors are set by `init(module)` if it returns true, by the Hugging Face model's own `_init_weights`, or by
    `reset_parameters` or `init_weights`, children first. The random stream of each module depends only on the seed and its
    path, so that values do not depend on the schedule or on the part of the model that is built. A module that was replaced
    is initialised as before, and its replacement is made from it again. A sharded tensor is initialised unsharded and then
    cut. The global random state is restored.

    Args:
        arrived: called for each tensor that was on the meta device, in the order of initialisation. It may replace the
            tensor, whose memory is then freed before the next is made.
        hub: the Hugging Face model that contains `root`.

    Returns:
        The new parameters and buffers.

    Raises:
        ScheduleError: tensors have no initialisation; the message names them.
    """
    places = [(module, name) for module in root.modules() for name, tensor in own_tensors(module) if tensor.is_meta]
    # Tensors with values first, in place: rules may read them, and an optimizer or an attribute may refer to them.
    for module in root.modules():
        elsewhere = [tensor for _, tensor in own_tensors(module) if tensor.device not in (META, with_index(device))]
        for tensor in elsewhere:
            tensor.data = tensor.data.to(device)
        if elsewhere and isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN takes its weights in one piece of memory
    if places:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            _Initialisation(root, init, hub).run(device, seed, arrived)
    return [dict(own_tensors(module))[name] for module, name in places]


def uninitialised(model: nn.Module, init: Init | None = None) -> str | None:
    """Returns the path of a tensor on the meta device that `materialise` cannot initialise; None if it initialises all."""
    registered = {tensor for module in model.modules() for _, tensor in own_tensors(module)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or not isinstance(value, _HOLDERS):
                continue
            if any(
                isinstance(leaf, torch.Tensor) and leaf.is_meta and leaf not in registered
                for leaf in tree_leaves(value)
            ):
                return join(path, name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        plan = _Initialisation(model, init, None)
    for original, places in plan.originals.items():
        for holder, name in places:
            replace_tensor(holder, name, original)
    return next(iter(plan.unset), None)


class _Initialisation:
    """Keys and rules of a model. Creating it replaces the model's tensors on the meta device by keys.

    A tied tensor has a key at each of its places, as if it were not tied, and gets the values of the first.
    """

    def __init__(self, root: nn.Module, init: Init | None, hub: nn.Module | None) -> None:
        self.root, self.init = root, init
        self.homes: dict[torch.Tensor, list[Place]] = {}
        """Places of each key: in the model, in replaced modules, and in those of other pipeline stages."""
        self.keys: dict[Place, torch.Tensor] = {}
        """The key at each place in the model."""
        self.originals: dict[torch.Tensor, list[Place]] = {}
        """Places in the model of each tensor or shard that was on the meta device."""
        self.paths: dict[torch.Tensor, str] = {}
        """Path of each key in the model."""
        self.rules: list[_Rule] = []
        self._by_storage: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._numbers: dict[torch.Tensor, int] = {}
        self._set_by_owner: set[torch.Tensor] = set()
        """Keys that are set by a rule of the module that has them."""
        self._visited: set[nn.Module] = set()
        for path, module in root.named_modules():
            for name, tensor in own_tensors(module):
                if tensor.is_meta:
                    places = self.originals.setdefault(tensor, [])
                    self.keys[module, name] = key = self._add_key(module, name, tensor, again=bool(places))
                    self.paths[key] = join(path, name)
                    places.append((module, name))
        for module in root.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and value.is_meta and value not in self.originals:
                    self._add_key(module, name, value)
        with self._guard_initialised_tensors():
            self._visit(root, "", hub)
        used = {key for rule in self.rules for key in rule.uses}
        firsts = [self.keys[places[0]] for places in self.originals.values()]
        self.unset = [self.paths[key] for key in firsts if key.numel() and key not in used]
        """Paths of tensors that no rule sets."""

    # -- keys ------------------------------------------------------------------------------------------------

    def _add_key(self, module: nn.Module, name: str, tensor: torch.Tensor, again: bool = False) -> torch.Tensor:
        shard = sharding.shards_of(module).get(name)
        key = tensor
        if shard is not None or again or tensor in self.homes:
            shape = tensor.shape if shard is None else shard.shape
            key = sharding.with_data(tensor, torch.empty(shape, dtype=tensor.dtype, device="meta"))
        storage = key.untyped_storage()
        self._by_storage[id(storage)] = storage, key
        self._numbers[key] = len(self._numbers)
        self.homes[key] = [(module, name)]
        _set(module, name, key)
        return key

    def _inside(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the keys at and below a module, by path."""
        tensors = (
            (join(path, name), tensor)
            for path, submodule in module.named_modules()
            for name, tensor in own_tensors(submodule)
        )
        return {path: tensor for path, tensor in tensors if tensor in self.homes}

    @contextmanager
    def _guard_initialised_tensors(self) -> Iterator[None]:
        """Makes `_init_weights` of Hugging Face models skip tensors that have values."""
        initialised = [
            tensor for module in self.root.modules() for _, tensor in own_tensors(module) if not tensor.is_meta
        ]
        transformers: Any = sys.modules.get("transformers.initialization")
        for tensor in initialised:
            tensor.__dict__["_is_hf_initialized"] = True
        try:
            with ExitStack() as stack:
                if transformers is not None:
                    stack.enter_context(transformers.guard_torch_init_functions())
                yield
        finally:
            for tensor in initialised:
                tensor.__dict__.pop("_is_hf_initialized", None)

    # -- rules -----------------------------------------------------------------------------------------------

    def _visit(self, module: nn.Module, path: str, hub: nn.Module | None) -> None:
        """Adds the rules of a subtree, children first."""
        if module in self._visited:
            return
        self._visited.add(module)
        replaced = module.__dict__.get("_replaces")
        if replaced is not None:
            if replaced.old not in set(module.modules()):
                self._link(replaced.old, module)
            self._visit(replaced.old, path, hub)
            if replaced.factory is not None:
                self._make_again(replaced, module, path)
        if initialises(module):
            hub = module
        for name, child in module.named_children():
            self._visit(child, join(path, name), hub)
        keys_inside = self._inside(module)
        if keys_inside and not (replaced is not None and self._set_by_owner.issuperset(keys_inside.values())):
            self._initialise(module, path, hub, keys_inside)

    def _link(self, old: nn.Module, new: nn.Module) -> None:
        """Gives a replaced module the keys of the tensors that its replacement still has, and new keys for the others."""
        keys = self._inside(new)
        for path, module in old.named_modules():
            for name, tensor in own_tensors(module):
                if not tensor.is_meta:
                    continue
                key = keys.get(join(path, name))
                if key is None or key.shape != tensor.shape:
                    self._add_key(module, name, tensor)
                else:
                    self.homes[key].append((module, name))
                    _set(module, name, key)

    def _make_again(self, replaced: Replaced, module: nn.Module, path: str) -> None:
        """Adds the rule of a replacement: it copies a second one, made from the replaced module once that has values."""
        keys_to_copy = {name: key for name, key in self._inside(module).items() if key not in self._set_by_owner}
        factory = replaced.factory
        assert factory is not None

        def make() -> None:
            fresh = called_with_path(factory, replaced.old, replaced.path)
            tensors = {
                join(path, name): tensor
                for path, submodule in fresh.named_modules()
                for name, tensor in own_tensors(submodule)
            }
            for name in keys_to_copy:
                holder, local_name = sharding.owner(module, name)
                tensor = dict(own_tensors(holder))[local_name]
                if name in tensors and tensors[name] is not tensor and tensors[name].shape == tensor.shape:
                    tensor.copy_(tensors[name])

        if keys_to_copy:
            self._add(
                path,
                [make],
                list(keys_to_copy.values()),
                [*self._inside(replaced.old).values(), *keys_to_copy.values()],
            )

    def _initialise(
        self, module: nn.Module, path: str, hub: nn.Module | None, keys_inside: dict[str, torch.Tensor]
    ) -> None:
        """Adds the rule of a module: `init`, then the Hugging Face model's, then the module's own reset."""
        own_keys = [keys_inside[name] for name, _ in own_tensors(module) if name in keys_inside]
        if own_keys and self._set_by_owner.issuperset(own_keys):
            return
        if self.init is not None:
            rule = partial(called_with_path, self.init, module, path)
            with _Touched():
                done = rule()
            if done:
                self._add(path, [rule], own_keys, list(keys_inside.values()))
                return
        reset = _reset_of(module)
        if hub is None:
            self._add(path, [reset] if reset is not None else [], own_keys, list(keys_inside.values()))
            return
        steps: list[Callable[[], Any]] = [partial(initialise, hub, module)]
        if reset is not None and not self._uses(steps, list(keys_inside.values())).issuperset(own_keys):
            steps.append(reset)
        self._add(path, steps, own_keys, list(keys_inside.values()))

    def _add(
        self, path: str, steps: list[Callable[[], Any]], own_keys: list[torch.Tensor], keys_inside: list[torch.Tensor]
    ) -> None:
        uses = self._uses(steps, keys_inside)
        if uses:
            keeps = tuple(key for key in own_keys if key in self._set_by_owner and key in uses)
            # All ranks use the keys in the same order.
            self.rules.append(_Rule(path, tuple(steps), tuple(sorted(uses, key=self._numbers.__getitem__)), keeps))
            self._set_by_owner.update(key for key in own_keys if key in uses)

    def _uses(self, steps: list[Callable[[], Any]], keys_inside: list[torch.Tensor]) -> set[torch.Tensor]:
        """Returns the keys that steps use when they run on the meta device; all in `inside` if the steps need values."""
        touched = _Touched()
        try:
            with touched, torch.device("meta"):
                for step in steps:
                    step()
        except RuntimeError:
            return set(keys_inside)
        return {self._by_storage[storage][1] for storage in touched.storages if storage in self._by_storage}

    # -- values ----------------------------------------------------------------------------------------------

    def run(self, device: torch.device, seed: int, arrived: Arrived) -> None:
        """Replaces the keys by tensors with values, each as soon as its last rule has run."""
        _check_set(self.unset)
        # Backwards: a rule runs only if a later one, or the model, needs a key that it uses.
        needed = {self.keys[places[0]] for places in self.originals.values()}
        empty = [key for key in needed if not key.numel()]
        rules = [_Rule("", (), (key,), ()) for key in sorted(empty, key=self._numbers.__getitem__)]
        for rule in reversed(self.rules):
            if not needed.isdisjoint(rule.uses):
                needed.update(rule.uses)
                rules.append(rule)
        rules.reverse()
        last_rule = {key: number for number, rule in enumerate(rules) for key in rule.uses}
        values = _Values(self, set(last_rule), device, arrived)
        with self._guard_initialised_tensors():
            for number, rule in enumerate(rules):
                for key in rule.uses:
                    values.allocate(key)
                copies = [(values.live[key], values.live[key].clone()) for key in rule.keeps]
                torch.manual_seed(_seed_at(seed, rule.path))  # before every rule, so that rules do not depend on others
                with device:
                    for step in rule.steps:
                        step()
                for tensor, original in copies:
                    tensor.copy_(original)
                for key in rule.uses:
                    if last_rule[key] == number:
                        values.give(key)
        for module in self.root.modules():
            module.__dict__.pop("_replaces", None)


class _Values:
    """The tensors with values during the initialisation."""

    def __init__(self, plan: _Initialisation, used: set[torch.Tensor], device: torch.device, arrived: Arrived) -> None:
        self.plan, self.used, self.device, self.arrived = plan, used, device, arrived
        self.live: dict[torch.Tensor, torch.Tensor] = {}
        """Unsharded tensors by key; `used` has the keys that a later rule uses."""
        self.final: dict[torch.Tensor, torch.Tensor] = {}
        """Tensors that are still missing at some of their places, by the original on the meta device."""
        self._waiting: dict[Place, torch.Tensor] = {
            place: original for original, places in plan.originals.items() for place in places
        }

    def allocate(self, key: torch.Tensor) -> None:
        """Gives a key memory, if it has none."""
        if key in self.live:
            return
        tensor = self.live[key] = sharding.with_data(key, torch.empty(key.shape, dtype=key.dtype, device=self.device))
        if _may_be_nan(tensor):
            tensor.fill_(torch.nan)  # shows elements that no rule sets
        for module, name in self.plan.homes[key]:
            _set(module, name, tensor)

    def give(self, key: torch.Tensor) -> None:
        """Puts a tensor, or this rank's shard of it, in all of its places that no later rule uses."""
        tensor = self.live.pop(key)
        self.used.discard(key)
        place = self.plan.homes[key][0]
        for module, name in self.plan.homes[key]:
            _set(module, name, key)
        original = self._waiting.get(place)
        if original is None:
            return
        places = self.plan.originals[original]
        if place == places[0]:
            if _may_be_nan(tensor) and tensor.sum().isnan():
                _check_set([self.plan.paths[key]])
            shard = sharding.shards_of(place[0]).get(place[1])
            data = tensor.detach() if shard is None else shard.cut(tensor.detach()).contiguous()
            self.final[original] = sharding.with_data(original, data)
        del tensor
        if original not in self.final:
            return
        ready = [place for place in places if place in self._waiting and self.plan.keys[place] not in self.used]
        for module, name in ready:
            del self._waiting[module, name]
            replace_tensor(module, name, self.final[original])
        if all(place not in self._waiting for place in places):
            del self.final[
                original
            ]  # `arrived` may shard it further, which frees the memory only without this reference
        for module, name in ready:
            self.arrived(module, name)


class _Touched(TorchDispatchMode):
    """Records the storages of the tensors that operators get, or whose `is_meta` is read: functions of `torch.nn.init`
    may do nothing on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self._meta_queries = _MetaQueries(self.storages)

    def __enter__(self) -> Self:
        self._meta_queries.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._meta_queries.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self.storages.add(id(leaf.untyped_storage()))
        if torch.Tag.nondeterministic_seeded in func.tags and schema_of(func).name.endswith("_"):
            return args[0]  # random numbers in place, which are slow on the meta device
        return func(*args, **(kwargs or {}))


class _MetaQueries(TorchFunctionMode):
    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:
            self.storages.add(id(args[0].untyped_storage()))
        return func(*args, **(kwargs or {}))


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """Returns the method by which a module initialises itself, if it has one without arguments."""
    if initialises(module):
        return None
    for name in ("reset_parameters", "_reset_parameters", "init_weights"):
        method = getattr(module, name, None)
        if method is not None:
            try:
                inspect.signature(method).bind()
            except TypeError:
                continue
            return method
    return None


def _seed_at(seed: int, path: str) -> int:
    # torch.manual_seed takes a signed integer of 64 bits.
    return int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:8], "big") >> 1


def _may_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize > 1


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replaces a tensor of a module, or one among its other attributes."""
    if name in vars(module):
        module.__dict__[name] = tensor
    else:
        replace_tensor(module, name, tensor)


def _check_set(missed: list[str]) -> None:
    """Raises ScheduleError for tensors that no rule has initialised."""
    if missed:
        names = ", ".join(missed[:5]) + (f" and {len(missed) - 5} more" if len(missed) > 5 else "")
        raise ScheduleError(
            f"build: the model was made on the meta device, and nothing initialises {names}; make it on the CPU, give the "
            "module a reset_parameters method, or pass build(init=...)"
        )
