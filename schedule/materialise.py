"""Weights for a model that was built on the meta device: allocated on the target and initialised by seed."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import ScheduleError
from . import sharding
from .schedule import join

Init = Callable[[nn.Module], Any]


def materialise(
    root: nn.Module, device: torch.device, seed: int, init: Init | None = None, namespace: str = ""
) -> None:
    """Moves a model to a device, giving what is on the meta device memory and seeded initial values.

    Values come from `init(module)` where given and it returns true, from a Hugging Face model's own
    `_init_weights`, or from `reset_parameters`. The random stream of each module depends on the seed and its
    path alone, so any part of a model is initialised as the whole would be. Sharded parameters are made
    whole, initialised and cut, a repeated block at a time. The global random state is left as it was.

    Raises:
        ScheduleError: tensors that nothing initialises; names them.
    """
    job = _Job(root, device, seed, init, namespace)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), _guarded():
        job.run()


class _Job:
    def __init__(
        self, root: nn.Module, device: torch.device, seed: int, init: Init | None, namespace: str
    ) -> None:
        self.root, self.device, self.seed, self.init, self.namespace = root, device, seed, init, namespace
        self.moved: dict[torch.Tensor, torch.Tensor] = {}
        self.visited: set[nn.Module] = set()
        self.tied: list[torch.Tensor] = []
        self.sharded = any("_shards" in each.__dict__ for each in root.modules())

    def run(self) -> None:
        # The originals stay referenced by `moved`, so that no id is used twice.
        self.fresh: dict[torch.Tensor, str] = {}
        self.flagged: list[torch.Tensor] = []
        try:
            self.visit(self.root, "", None, False)
            self.finish()
        finally:
            for tensor in self.flagged:
                tensor.__dict__.pop("_is_hf_initialized", None)

    def visit(self, module: nn.Module, path: str, hub: nn.Module | None, inside: bool) -> bool:
        """Places and initialises a subtree, children first; whether anything in it was fresh."""
        if module in self.visited:
            return False
        self.visited.add(module)
        if hasattr(module, "_init_weights") and hasattr(module, "initialize_weights"):
            hub = module
        repeated = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        fresh = False
        for name, child in module.named_children():
            fresh |= self.visit(child, join(path, name), hub, inside or repeated)
            if repeated and not inside and self.sharded:
                # Only the block's own: what is outside may yet get its values from a module around all.
                self.finish(join(path, name) + ".")
        fresh |= self.place(module, path)
        if fresh:
            self.initialise(module, path, hub)
        return fresh

    def place(self, module: nn.Module, path: str) -> bool:
        """Allocates the tensors a module itself holds; whether any was on the meta device."""
        fresh, self.tied = False, []
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if tensor in self.moved:
                    self.tied.append(self.moved[tensor])
                else:
                    self.moved[tensor] = self.allocate(tensor, module, name, join(path, name))
                held[name] = self.moved[tensor]
                fresh |= self.moved[tensor] in self.fresh
        return fresh

    def allocate(self, tensor: torch.Tensor, module: nn.Module, name: str, path: str) -> torch.Tensor:
        if not tensor.is_meta:
            data = tensor.detach().to(self.device)
        else:
            shape = sharding.full_shape(module, name) or tensor.shape
            data = torch.empty(shape, dtype=tensor.dtype, device=self.device)
            _mark(data)
        if isinstance(tensor, nn.Parameter):
            # A parameter already in place stays the same object: an optimizer may hold it.
            if not tensor.is_meta and data.device == tensor.device:
                new: torch.Tensor = tensor
            else:
                new = type(tensor)(data, requires_grad=tensor.requires_grad)
        else:
            new = data
        if new is not tensor:
            new.__dict__.update(tensor.__dict__)
        if tensor.is_meta:
            self.fresh[new] = path
        else:
            new.__dict__["_is_hf_initialized"] = True
            self.flagged.append(new)
        return new

    def initialise(self, module: nn.Module, path: str, hub: nn.Module | None) -> None:
        digest = hashlib.sha256(f"{self.seed}/{join(self.namespace, path)}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        # Tied tensors keep the values that the first module to hold them has given them.
        values = [(tensor, tensor.clone()) for tensor in self.tied]
        self.apply(module, hub)
        for tensor, value in values:
            tensor.copy_(value)

    def apply(self, module: nn.Module, hub: nn.Module | None) -> None:
        if self.init is not None and self.init(module):
            return
        if hub is not None:
            with _stand_ins(module, self.device):
                hub._init_weights(module)
            if not any(_marked(each) for each in self.own(module)):
                return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()

    def own(self, module: nn.Module) -> list[torch.Tensor]:
        held = [*module._parameters.values(), *module._buffers.values()]
        return [each for each in held if each is not None and each in self.fresh]

    def finish(self, prefix: str = "") -> None:
        """Checks that everything fresh below a path has a value, and cuts what is sharded."""
        done = {tensor: path for tensor, path in self.fresh.items() if path.startswith(prefix)}
        kept = {tensor: path for tensor, path in self.fresh.items() if not path.startswith(prefix)}
        missed = [path for tensor, path in done.items() if _marked(tensor)]
        if missed:
            shown = ", ".join(missed[:5]) + (f" and {len(missed) - 5} more" if len(missed) > 5 else "")
            raise ScheduleError(
                f"build: the model was made on the meta device, and nothing initialises {shown}; give the "
                "module a reset_parameters method, pass build(init=...), or make the model on a real device"
            )
        if self.sharded:
            sharding.cut_fresh(self.root, done, self.moved)
        for tensor in done:
            tensor.__dict__["_is_hf_initialized"] = True
            self.flagged.append(tensor)
        self.fresh = kept


def _mark(data: torch.Tensor) -> None:
    """Fills a tensor with values no initialisation yields, so that a missed one is noticed."""
    if data.is_floating_point() and data.dtype.itemsize >= 2:
        data.fill_(float("nan"))
    elif data.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        data.fill_(torch.iinfo(data.dtype).min)
    else:
        data.zero_()


def _marked(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    # Any initialisation sets the last element; looking at one keeps the check cheap.
    last = tensor.detach().reshape(-1)[-1]
    if tensor.is_floating_point() and tensor.dtype.itemsize >= 2:
        return bool(last.isnan())
    if tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return bool(last == torch.iinfo(tensor.dtype).min)
    return False


@contextmanager
def _stand_ins(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Real tensors for those of a module's children that live on another rank: its initialisation may set them
    (T5's does), and draws as much from the random stream as it would there."""
    absent = [
        (child, name, value)
        for child in module.children()
        for name, value in child.__dict__.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    for child, name, value in absent:
        child.__dict__[name] = torch.empty_like(value, device=device)
    try:
        yield
    finally:
        for child, name, value in absent:
            child.__dict__[name] = value


@contextmanager
def _guarded() -> Iterator[None]:
    """Lets `_init_weights` of Hugging Face models pass over what has its value already."""
    module: Any = sys.modules.get("transformers.initialization")
    with ExitStack() as stack:
        if module is not None:
            stack.enter_context(module.guard_torch_init_functions())
        yield
