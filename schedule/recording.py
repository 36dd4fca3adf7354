"""Log of operations on tensors without memory, from which their values can be made later.

A recorded tensor is on the meta device. Its storage identifies memory of a recording, so that every view of it, and
every parameter that shares it, is recorded as well. An operation is recorded with its arguments; the history of a
tensor is the history of its memory, in order. Views are not operations: a tensor is a piece of memory.

Tensors made of existing values (`torch.tensor`, `torch.from_numpy`, `torch.arange`) are real, and so are those
computed only from real tensors. The two meet in one direction only: recorded tensors may use real ones.
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
"""Operators that return uninitialised memory."""
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
"""Operators without recorded inputs that are recorded anyway: initial values of weights."""
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
"""Operators that set their first argument without reading it."""
_RESIZING = {_ATEN.resize_, _ATEN.resize_as_}
"""Operators that change the size of memory."""


class Unrecordable(ScheduleError):
    """A model cannot be made without memory: its constructor reads something that does not exist yet."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of recorded memory."""

    memory: int
    """Number of the memory."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements, like the offset of the first."""
    offset: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Allocated memory."""

    nbytes: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A recorded operation."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    """Arguments, with a `View` for each recorded tensor and a copy of each real one."""
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    """Memory that it writes, wholly or partly."""
    whole: frozenset[int]
    """Memory that it overwrites completely."""
    made: tuple[View | None, ...]
    """Outputs in new memory, in order."""
    draws: bool
    """True if it draws from the global generators."""


@dataclass(frozen=True, slots=True, eq=False)
class Reseed:
    """A call of `torch.manual_seed`."""

    seed: int


class Recording:
    """Operations on tensors, in order."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = full(torch.device(device))
        """Future device of the tensors."""
        self.log: list[Operation | Reseed] = []
        self.memories: list[Memory] = []
        """Allocated memory, by number."""
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        """Storages of the memory, as long as a tensor uses them."""
        self.unknown: set[int] = set()
        """Memory of adopted tensors that no operation has set."""
        self.broken = ""
        """Reason why it cannot be continued."""
        self.random = RandomState(self.device)
        self.active = False
        self.plain = 0
        """Above 0, recorded tensors appear on the meta device."""

    @contextmanager
    def access(self) -> Iterator[None]:
        """For redline's own access to tensors while operations are recorded."""
        self.plain += 1
        try:
            yield
        finally:
            self.plain -= 1

    def refuse(self, reason: str) -> NoReturn:
        """Ends the recording; a constructor cannot continue by catching this."""
        self.broken = self.broken or reason
        raise Unrecordable(reason)

    def view(self, tensor: torch.Tensor) -> View | None:
        """View of a recorded tensor; None for any other."""
        found = recorded(tensor)
        if found is None or found[0] is not self:
            return None
        if tensor.is_conj() or tensor.is_neg():
            self.refuse("it contains a tensor with a lazy conjugate or negative")
        return View(found[1], tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _known(self, tensor: torch.Tensor) -> View:
        found = self.view(tensor)
        assert found is not None, "only tensors of this recording are used"
        return found

    def adopt(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of memory whose contents are unknown until an operation sets them."""
        with self.access():
            tensor = torch.empty(tuple(shape), dtype=dtype, device=_META)
            self.unknown.add(self._allocated(tensor, self.device).memory)
        return tensor

    def lacks(self, tensor: torch.Tensor) -> bool:
        """True if a part of an adopted tensor is still unknown."""
        with self.access():
            return self._known(tensor).memory in self.unknown

    def reseed(self, seed: int) -> None:
        """Records that later draws follow `torch.manual_seed(seed)`."""
        self.log.append(Reseed(seed))

    def draw(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> None:
        """Records a function that sets a tensor by drawing any number of random numbers."""
        self.follow_random_state()
        self._note(function, (tensor, *args), {}, [tensor], overwrites=True, made=(), draws=True)

    def follow_random_state(self) -> None:
        """Records a `torch.manual_seed` since the last draw."""
        seed = self.random.changed()
        if seed is None:
            return
        if seed < 0:
            self.refuse("it sets the random state")
        self.reseed(seed)
        self.random.advance()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of real tensors, or records one of recorded tensors and returns a result without values."""
        tensors = tensors_in((args, kwargs))
        recorded_tensors = [each for each in tensors if recorded(each) is not None]
        kind = func.overloadpacket
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        device = _destination(kwargs, recorded_tensors or tensors)
        if not recorded_tensors and device == _META and kind is _ATEN.scalar_tensor:
            device = self.device  # a number assigned to a part of a recorded tensor
        elif not recorded_tensors and (device == _META or not (draws or kind in _DEFERRED)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        self._check(func, kwargs, tensors, written)
        if draws:
            self.follow_random_state()
        out = self._form(func, args, kwargs)
        made = tuple(self._allocated(each, device) if recorded(each) is None else None for each in tensors_in(out))
        if kind is _ATEN.set_ and any(made):
            self.refuse("it gives a tensor memory that has no values")
        # From now on a set tensor is a piece of other memory, which needs no record.
        if kind is not _ATEN.set_ and kind not in _UNDEFINED and (written or any(made)):
            kwargs = {**kwargs, "device": device} if kwargs.get("device") == _META else kwargs
            self._note(func, args, kwargs, written, overwrites=kind in _OVERWRITING, made=made, draws=draws)
        return out

    def _check(
        self, func: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """Refuses operations on unknown tensors or with unknown effects."""
        kind = func.overloadpacket
        found = [recorded(each) for each in tensors]
        if any(each is not None and each[0] is not self for each in found):
            self.refuse("it takes a tensor of another recording")
        if kind in (_ATEN._local_scalar_dense, _ATEN.equal):
            self.refuse("it looks at the value of a tensor")
        if kind in _RESIZING:
            self.refuse(f"{func} changes the size of a tensor")
        if kwargs.get("generator") is not None:
            self.refuse("it sets a tensor by its own generator")
        if any(each.layout is not torch.strided for each in tensors):
            self.refuse("it has a tensor that is not dense")
        unrecorded_meta = any(each.is_meta and place is None for each, place in zip(tensors, found, strict=True))
        if unrecorded_meta and kind not in _UNDEFINED:
            self.refuse(f"it calls {func} with a tensor on the meta device that has no values")
        if any(not each.is_meta for each in written):
            self.refuse(f"it sets a tensor that was made of values at hand by {func}")
        if kind is _ATEN._to_copy and _may_be_itself(tensors[0], self._memory(tensors[0]).device, kwargs):
            self.refuse("it may copy a tensor, or not")

    def _form(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator, without values."""
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
            self.random.advance()

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # A copy, since real tensors may change.
        return self.view(value) if value.is_meta else value.detach().clone()

    def _covers(self, tensor: torch.Tensor) -> bool:
        """True if a tensor covers all of its memory."""
        return tensor.is_contiguous() and tensor.numel() * tensor.itemsize == self._memory(tensor).nbytes

    def _memory(self, tensor: torch.Tensor) -> Memory:
        return self.memories[self._known(tensor).memory]

    def _allocated(self, tensor: torch.Tensor, device: torch.device) -> View:
        """Assigns new memory to a tensor on the meta device."""
        storage = tensor.untyped_storage()
        storage._recorded = (self, len(self.memories))
        self.storages.append(weakref.ref(storage))
        self.memories.append(Memory(storage.nbytes(), tensor.dtype, full(device)))
        return self._known(tensor)


def recorded(tensor: torch.Tensor) -> tuple[Recording, int] | None:
    """Recording of a tensor, and the number of its memory there; None if it is not recorded."""
    return getattr(tensor.untyped_storage(), "_recorded", None) if tensor.is_meta else None


def recording_of(module: nn.Module) -> Recording | None:
    """Recording of a module's tensors; None if they are not recorded."""
    for tensor in (*module.parameters(), *module.buffers()):
        found = recorded(tensor)
        if found is not None:
            return found[0]
    return None


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to each of an operator's arguments or outputs, which nest in plain containers."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(function, each) for each in value])
    if isinstance(value, dict):
        return {name: map_leaves(function, each) for name, each in value.items()}
    return function(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors among an operator's arguments or outputs, in order."""
    return _found(torch.Tensor, value)


def _found(kind: type, value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in _found(kind, each)]
    if isinstance(value, dict):
        return _found(kind, list(value.values()))
    return [value] if isinstance(value, kind) else []


def _destination(kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.device:
    """Device of an operator's outputs."""
    device, own = kwargs.get("device"), torch.device("cpu")
    place = recorded(tensors[0]) if tensors else None
    if place is not None:
        own = place[0].memories[place[1]].device
    elif tensors:
        own = tensors[0].device
    return own if device is None or (device == _META and place is not None) else device


def _may_be_itself(tensor: torch.Tensor, device: torch.device, kwargs: dict[str, Any]) -> bool:
    """True if a copy to the tensor's reported device would be the tensor itself there: `to` cannot tell."""
    requested = kwargs.get("device", _META)
    return (
        requested != _META
        and full(requested) == device
        and kwargs.get("dtype") in (None, tensor.dtype)
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    )


def _on_meta(value: Any) -> Any:
    """Converts an argument for the meta device."""
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return _META if isinstance(value, torch.device) else value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operator sets."""
    return tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func)])


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(schema_of(func).arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write)
