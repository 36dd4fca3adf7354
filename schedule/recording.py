"""The log of what was done to tensors that have no memory yet, from which their values can be made later.

A recorded tensor is on the meta device. Its storage says which memory of which recording it stands for, so that every
view of it, and every parameter that shares it, is recorded as well. An operation is noted with its arguments; what
happened to a tensor is what happened to its memory, in order. Views are no operations: a tensor is a piece of memory.

What is made of values that are at hand (`torch.tensor`, `torch.from_numpy`, `torch.arange`) is real, and so is what
is computed from real tensors alone. The two meet in one direction only: recorded tensors may take in real ones.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ..base._torch import schema_of
from ..base.errors import ScheduleError
from .random_state import RandomState, full

_ATEN = torch.ops.aten
_META = torch.device("meta")
_UNDEFINED = {
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_permuted,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
}
"""Operators that give memory as it is."""
_DEFERRED = _UNDEFINED | {
    _ATEN.full,
    _ATEN.full_like,
    _ATEN.new_full,
    _ATEN.new_ones,
    _ATEN.new_zeros,
    _ATEN.ones,
    _ATEN.ones_like,
    _ATEN.zeros,
    _ATEN.zeros_like,
}
"""Operators without recorded inputs that are noted all the same: what weights begin as."""
_OVERWRITING = {
    _ATEN.bernoulli_,
    _ATEN.cauchy_,
    _ATEN.copy_,
    _ATEN.exponential_,
    _ATEN.fill_,
    _ATEN.geometric_,
    _ATEN.log_normal_,
    _ATEN.normal_,
    _ATEN.random_,
    _ATEN.uniform_,
    _ATEN.zero_,
}
"""Operators that set their first argument without a look at what it held."""
_RESIZING = {_ATEN.resize_, _ATEN.resize_as_}
"""Operators that change how much memory there is."""


class Unrecordable(ScheduleError):
    """A model cannot be made without memory: its constructor asks for what is not there yet."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of recorded memory."""

    memory: int
    """Number of the memory."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements, as is the offset of the first."""
    offset: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What was allocated."""

    nbytes: int
    dtype: torch.dtype
    """What for."""
    device: torch.device
    """Where."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation as it was called."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    """Its arguments, with a `View` for each recorded tensor and a copy of each real one."""
    kwargs: dict[str, Any]
    reads: frozenset[int]
    """Memory whose contents it depends on."""
    writes: frozenset[int]
    """Memory whose contents it sets, in whole or in part."""
    whole: frozenset[int]
    """What of it is set whole, so that nothing from before is left."""
    made: tuple[View | None, ...]
    """Of its outputs, in order, those that are in new memory."""
    draws: bool
    """Whether it takes random numbers from the global generators."""


@dataclass(frozen=True, slots=True, eq=False)
class Reseed:
    """A call of `torch.manual_seed`."""

    seed: int


class Recording:
    """What was done to tensors, in order.

    Args:
        device: where the tensors will be.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = full(torch.device(device))
        """Where the tensors will be."""
        self.log: list[Operation | Reseed] = []
        """What was done."""
        self.memories: list[Memory] = []
        """What was allocated, by number."""
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        """What stands for it, as long as a tensor has it."""
        self.unknown: set[int] = set()
        """Memory of adopted tensors, as far as no operation has set it."""
        self.broken = ""
        """Why it cannot be gone on with."""
        self.random = RandomState(self.device)
        self.active = False
        """Whether operations are being noted."""
        self.plain = 0
        """Above 0 recorded tensors are shown as they are, on the meta device."""

    @contextmanager
    def shown_as_they_are(self) -> Iterator[None]:
        """For redline's own looks at tensors while operations are being noted."""
        self.plain += 1
        try:
            yield
        finally:
            self.plain -= 1

    def refuse(self, why: str) -> NoReturn:
        """Ends the recording; a constructor cannot go on by catching this."""
        self.broken = self.broken or why
        raise Unrecordable(why)

    def view(self, tensor: torch.Tensor) -> View | None:
        """A tensor as it is recorded here; None for any other."""
        found = recorded(tensor)
        if found is None or found[0] is not self:
            return None
        if tensor.is_conj() or tensor.is_neg():
            self.refuse("it holds a tensor that is conjugated or negated when it is read")
        return View(found[1], tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _known(self, tensor: torch.Tensor) -> View:
        found = self.view(tensor)
        assert found is not None, "only what is recorded here is asked for"
        return found

    def adopt(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of memory whose contents are unknown until an operation sets them."""
        with self.shown_as_they_are():
            tensor = torch.empty(tuple(shape), dtype=dtype, device=_META)
            self.unknown.add(self._allocated(tensor, self.device).memory)
        return tensor

    def lacks(self, tensor: torch.Tensor) -> bool:
        """Whether something of an adopted tensor is still unknown."""
        with self.shown_as_they_are():
            return self._known(tensor).memory in self.unknown

    def reseed(self, seed: int) -> None:
        """Notes that what follows draws as after `torch.manual_seed(seed)`."""
        self.log.append(Reseed(seed))

    def draw(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> None:
        """Notes a function that sets a tensor by drawing, as many numbers as it may turn out to need."""
        self.follow_random_state()
        self._note(function, (tensor, *args), {}, [tensor], overwrites=True, made=(), draws=True)

    def follow_random_state(self) -> None:
        """Notes a `torch.manual_seed` since the last draw."""
        seed = self.random.changed()
        if seed is None:
            return
        if seed < 0:
            self.refuse("it sets the random state")
        self.reseed(seed)
        self.random.nudge()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of real tensors, or notes one of recorded tensors and returns the form of its result."""
        tensors = tensors_in((args, kwargs))
        mine = [each for each in tensors if recorded(each) is not None]
        kind = func.overloadpacket
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        device = _destination(kwargs, mine or tensors)
        if not mine and device == _META and kind is _ATEN.scalar_tensor:
            device = self.device  # a number that is assigned to a part of a recorded tensor
        elif not mine and (device == _META or not (draws or kind in _DEFERRED)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        self._check(func, kwargs, tensors, written)
        if draws:
            self.follow_random_state()
        out = self._form(func, args, kwargs)
        made = tuple(self._allocated(each, device) if recorded(each) is None else None for each in tensors_in(out))
        if kind is _ATEN.set_ and any(made):
            self.refuse("it gives a tensor memory that has no values")
        # From now on a tensor that was set is a piece of other memory, with no need for a note.
        if kind is not _ATEN.set_ and kind not in _UNDEFINED and (written or any(made)):
            kwargs = {**kwargs, "device": device} if kwargs.get("device") == _META else kwargs
            self._note(func, args, kwargs, written, overwrites=kind in _OVERWRITING, made=made, draws=draws)
        return out

    def _check(
        self, func: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """Refuses what is not an operation on known tensors with known effects."""
        kind = func.overloadpacket
        found = [recorded(each) for each in tensors]
        if any(each is not None and each[0] is not self for each in found):
            self.refuse("it takes a tensor of another recording")
        if kind in (_ATEN._local_scalar_dense, _ATEN.equal):
            self.refuse("it looks at the value of a tensor")
        if kind in _RESIZING:
            self.refuse(f"{func} changes the size of a tensor")
        if kwargs.get("generator") is not None:
            self.refuse("it sets a tensor by a generator of its own")
        if any(each.layout is not torch.strided for each in tensors):
            self.refuse("it has a tensor that is not dense")
        strange = any(each.is_meta and place is None for each, place in zip(tensors, found, strict=True))
        if strange and kind not in _UNDEFINED:
            self.refuse(f"it calls {func} with a tensor on the meta device that has no values")
        if any(not each.is_meta for each in written):
            self.refuse(f"it sets a tensor that was made of values at hand by {func}")
        if kind is _ATEN._to_copy and _may_be_itself(tensors[0], self._memory(tensors[0]).device, kwargs):
            self.refuse("it may copy a tensor, or not")

    def _form(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns, without values."""
        if func.overloadpacket in _OVERWRITING and func.overloadpacket is not _ATEN.copy_:
            return args[0]
        args, kwargs = map_leaves(_on_meta, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            self.refuse(f"{func}: {error}")

    def _note(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        *,
        overwrites: bool,
        made: tuple[View | None, ...],
        draws: bool,
    ) -> None:
        noted, keywords = map_leaves(self._noted, (args, kwargs))
        reads = [each.memory for each in _found(View, (noted, keywords))]
        new = {each.memory for each in made if each is not None}
        whole = set(new)
        if overwrites and self._covers(written[0]):
            whole.add(reads.pop(0))
        writes = new | {self._known(each).memory for each in written}
        if self.unknown.intersection(reads):
            self.unknown |= writes
        else:
            self.unknown -= whole
        self.log.append(
            Operation(call, noted, keywords, frozenset(reads), frozenset(writes), frozenset(whole), made, draws)
        )
        if draws:
            self.random.nudge()

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # A copy, since what is real may change.
        return self.view(value) if value.is_meta else value.detach().clone()

    def _covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of its memory."""
        return tensor.is_contiguous() and tensor.numel() * tensor.itemsize == self._memory(tensor).nbytes

    def _memory(self, tensor: torch.Tensor) -> Memory:
        return self.memories[self._known(tensor).memory]

    def _allocated(self, tensor: torch.Tensor, device: torch.device) -> View:
        """Makes a tensor on the meta device stand for new memory."""
        storage = tensor.untyped_storage()
        storage._recorded = (self, len(self.memories))
        self.storages.append(weakref.ref(storage))
        self.memories.append(Memory(storage.nbytes(), tensor.dtype, full(device)))
        return self._known(tensor)


def recorded(tensor: torch.Tensor) -> tuple[Recording, int] | None:
    """The recording that a tensor is of, and the number of its memory there; None where it is of none."""
    return getattr(tensor.untyped_storage(), "_recorded", None) if tensor.is_meta else None


def recording_of(module: nn.Module) -> Recording | None:
    """The recording that a module's tensors are of; None where they are of none."""
    for tensor in (*module.parameters(), *module.buffers()):
        found = recorded(tensor)
        if found is not None:
            return found[0]
    return None


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """An operator's arguments or outputs, which nest in plain containers, with a function applied to each."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(function, each) for each in value])
    if isinstance(value, dict):
        return {name: map_leaves(function, each) for name, each in value.items()}
    return function(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or outputs, in order."""
    return _found(torch.Tensor, value)


def _found(kind: type, value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in _found(kind, each)]
    if isinstance(value, dict):
        return _found(kind, list(value.values()))
    return [value] if isinstance(value, kind) else []


def _destination(kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.device:
    """Where an operator's outputs would be."""
    device, own = kwargs.get("device"), torch.device("cpu")
    place = recorded(tensors[0]) if tensors else None
    if place is not None:
        own = place[0].memories[place[1]].device
    elif tensors:
        own = tensors[0].device
    return own if device is None or (device == _META and place is not None) else device


def _may_be_itself(tensor: torch.Tensor, device: torch.device, kwargs: dict[str, Any]) -> bool:
    """Whether a copy to where a tensor says it is would be the tensor itself, were it there: `to` cannot tell."""
    asked = kwargs.get("device", _META)
    return (
        asked != _META
        and full(asked) == device
        and kwargs.get("dtype") in (None, tensor.dtype)
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )


def _on_meta(value: Any) -> Any:
    """An argument as the meta device takes it."""
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return _META if isinstance(value, torch.device) else value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator sets."""
    return tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func)])


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(schema_of(func).arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write)
