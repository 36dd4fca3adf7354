"""Weights for a model that was made without memory: those of its constructor, or by rule."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..base._torch import buffers_of, parameters_of
from ..base._transformers import initialise
from ..base.errors import ScheduleError
from . import held
from .deferred import going_on
from .parallel import sharding
from .random_state import full
from .recording import Recording, View, recording_of
from .replay import replay, tensor_of
from .tree import called_with_path, join

Init = Callable[..., Any]
"""`init(module)` or `init(module, path)`."""
Arrived = Callable[[nn.Module, str], None]
"""`arrived(module, name)`: a module's own tensor now has memory and values."""


def materialise(
    root: nn.Module,
    device: torch.device,
    seed: int,
    init: Init | None = None,
    arrived: Arrived = lambda module, name: None,
) -> list[torch.Tensor]:
    """Moves a model to a device; tensors on the meta device get memory and seeded initial values.

    A model made within `deferred` gets the values that its constructor would have given it after
    `torch.manual_seed(seed)`; each rank gets its part. Other models on the meta device are initialised by rules:
    `init(module)` if given and it returns true, a Hugging Face model's own `_init_weights`, or `reset_parameters`.
    There the random stream of each module depends only on the seed and its path, so that any part of a model is
    initialised like the whole. Sharded tensors are made whole and cut at once. The global random state is restored.

    Args:
        arrived: called for each tensor that was on the meta device, in the order of initialisation. It may replace the
            tensor, whose memory is then freed before the next is made.

    Returns:
        The new parameters and buffers.

    Raises:
        ScheduleError: tensors have no initialisation; the message names them.
    """
    recording = recording_of(root)
    missing = [
        (module, name) for module in root.modules() for name, tensor in held.own_tensors(module) if tensor.is_meta
    ]
    held.exchange(root, lambda tensor, path: _moved(tensor, device), _kept)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        if recording is None:
            recording = Recording(device)
            _Rules(root, recording, seed, init).follow()
        _replay(root, recording, device, seed, arrived)
    return [dict(held.own_tensors(module))[name] for module, name in missing]


def _replay(root: nn.Module, recording: Recording, device: torch.device, seed: int, arrived: Arrived) -> None:
    """Replaces the model's tensors on the meta device by recorded ones, each as soon as it is made."""
    views: dict[torch.Tensor, View] = {}
    homes: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    loose: set[torch.Tensor] = set()
    for path, module in root.named_modules():
        for name, tensor in held.own_tensors(module):
            if tensor.is_meta and recording.view(tensor) is None:
                raise ScheduleError(
                    f"build: {join(path, name)} is on the meta device, and nothing is known of its values"
                )
        elsewhere = held.loose(module)
        for name, tensor in held.own_tensors(module) + elsewhere:
            if (view := recording.view(tensor)) is None:
                continue
            if not tensor.is_leaf:
                raise ScheduleError(
                    f"build: {join(path, name)} has a gradient to pass on, which only a model made in place can"
                )
            views[tensor] = view
        for name, tensor in held.own_tensors(module):
            if tensor in views:
                homes.setdefault(tensor, []).append((module, name))
        loose.update(tensor for _, tensor in elsewhere if tensor in views)
    of_memory: dict[int, list[torch.Tensor]] = {}
    for tensor, view in views.items():
        of_memory.setdefault(view.memory, []).append(tensor)
    kept: dict[torch.Tensor, torch.Tensor] = {}

    def made(number: int, storage: torch.UntypedStorage) -> None:
        here = []
        for tensor in of_memory[number]:
            new = _with(tensor, tensor_of(views[tensor], storage).to(device))
            if tensor in loose:
                kept[tensor] = new
            for module, name in homes.get(tensor, ()):
                held.replace_tensor(module, name, new)
                here.append((module, name))
        del storage, new
        for module, name in here:
            arrived(module, name)

    replay(recording, of_memory, device, seed, made)

    def change(tensor: torch.Tensor, path: str) -> torch.Tensor:
        return kept.get(tensor, tensor)

    held.exchange(root, _kept, change)


def _with(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer with other data."""
    new = data
    if isinstance(tensor, nn.Parameter):
        new = type(tensor)(data, requires_grad=tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    return new


def _kept(tensor: torch.Tensor, path: str) -> torch.Tensor:
    return tensor


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real tensor on a device."""
    # An existing tensor stays the same object: an optimizer or an attribute may refer to it.
    if tensor.is_meta or tensor.device == full(device):
        return tensor
    return _with(tensor, tensor.detach().to(device))


class _Rules:
    """Records what a model's own rules do to its tensors."""

    def __init__(self, root: nn.Module, recording: Recording, seed: int, init: Init | None) -> None:
        self.root, self.recording, self.seed, self.init = root, recording, seed, init
        self.paths: dict[torch.Tensor, str] = {}
        """First path of each adopted tensor."""
        self.visited: set[nn.Module] = set()
        self.seen: set[torch.Tensor] = set()

    def follow(self) -> None:
        """Makes the model's tensors on the meta device recorded ones, initialised and cut."""
        kept = [
            tensor for module in self.root.modules() for _, tensor in held.own_tensors(module) if not tensor.is_meta
        ]
        for tensor in kept:
            tensor.__dict__["_is_hf_initialized"] = True
        held.exchange(self.root, self.adopted, _kept)
        try:
            with going_on(self.recording), _guarded(), self.stand_ins():
                self.visit(self.root, "", None)
        finally:
            for tensor in kept:
                tensor.__dict__.pop("_is_hf_initialized", None)
        self.check_initialised()
        _cut(self.root, self.paths)

    def adopted(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        """A recorded tensor in place of one on the meta device, whole if that is a piece."""
        if not tensor.is_meta:
            return tensor
        module, name = sharding.owner(self.root, path)
        shard = sharding.shards_of(module).get(name)
        new = _with(tensor, self.recording.adopt(tensor.shape if shard is None else shard.shape, tensor.dtype))
        self.paths[new] = path
        return new

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Provides recorded tensors for those of other ranks: a module's initialisation may set its children's (T5's
        does), and must draw as many random numbers as there.
        """
        absent = [
            (module, name, value)
            for module in self.root.modules()
            for name, value in module.__dict__.items()
            if isinstance(value, torch.Tensor) and value.is_meta
        ]
        for module, name, value in absent:
            module.__dict__[name] = self.recording.adopt(value.shape, value.dtype)
        try:
            yield
        finally:
            for module, name, value in absent:
                module.__dict__[name] = value

    def visit(self, module: nn.Module, path: str, hub: nn.Module | None) -> bool:
        """Initialises a subtree, children first; returns True if anything in it was adopted."""
        if module in self.visited:
            return False
        self.visited.add(module)
        if hasattr(module, "_init_weights") and hasattr(module, "initialize_weights"):
            hub = module
        fresh = False
        for name, child in module.named_children():
            fresh |= self.visit(child, join(path, name), hub)
        own = [tensor for _, tensor in held.own_tensors(module) if tensor in self.paths]
        if fresh or own:
            self.initialise(module, path, hub, own)
        return bool(fresh or own)

    def initialise(self, module: nn.Module, path: str, hub: nn.Module | None, own: list[torch.Tensor]) -> None:
        digest = hashlib.sha256(f"{self.seed}/{path}".encode()).digest()
        self.recording.reseed(int.from_bytes(digest[:8], "big") >> 1)
        # Tied tensors keep the values of the first module that has them.
        values = [(tensor, tensor.clone()) for tensor in own if tensor in self.seen]
        self.apply(module, path, hub, own)
        for tensor, value in values:
            tensor.copy_(value)
        self.seen.update(own)

    def apply(self, module: nn.Module, path: str, hub: nn.Module | None, own: list[torch.Tensor]) -> None:
        if self.init is not None and called_with_path(self.init, module, path):
            return
        if hub is not None:
            initialise(hub, module)
            if not any(map(self.recording.lacks, own)):
                return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()

    def check_initialised(self) -> None:
        """Refuses tensors that no rule has initialised."""
        missed = [path for tensor, path in self.paths.items() if tensor.numel() and self.recording.lacks(tensor)]
        if missed:
            shown = ", ".join(missed[:5]) + (f" and {len(missed) - 5} more" if len(missed) > 5 else "")
            raise ScheduleError(
                f"build: the model was made on the meta device, and nothing initialises {shown}; make it within "
                "redline.deferred, give the module a reset_parameters method, or pass build(init=...)"
            )


def _cut(root: nn.Module, fresh: dict[torch.Tensor, str]) -> None:
    """Cuts whole tensors that are to be sharded; ties remain."""
    cut: dict[torch.Tensor, torch.Tensor] = {}
    for module in root.modules():
        for name, shard in sharding.shards_of(module).items():
            tensor = parameters_of(module).get(name, buffers_of(module).get(name))
            if tensor in fresh:
                if tensor not in cut:
                    cut[tensor] = sharding.cut_tensor(tensor, shard)
                held.replace_tensor(module, name, cut[tensor])


@contextmanager
def _guarded() -> Iterator[None]:
    """Lets `_init_weights` of Hugging Face models skip initialised tensors."""
    module: Any = sys.modules.get("transformers.initialization")
    with ExitStack() as stack:
        if module is not None:
            stack.enter_context(module.guard_torch_init_functions())
        yield
