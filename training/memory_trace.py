"""Traces the memory of one rank: every storage of its build and of two steps, with its size, life and purpose.

The rank runs as an emulated one does (`emulation.py`), within `WithoutCompute`: operators on large tensors allocate their
outputs and compute nothing. Nothing reads or writes that memory, so the kernel never commits it, and a rank of any size is
traced on a small host. Tensors are real ones, and small tensors have their values. So models that are made from a record of
their constructor, resizes of storages by FSDP, pipelines that exchange shapes and routers of experts run unchanged.
`FakeTensorMode` alone does not allow that: models are recorded on meta tensors, and the values of fake tensors cannot be read.
It only gives shapes of outputs.

torch's own `MemTracker` observes storages in the same way. It keeps totals for each module instead of the order of allocations,
which a model of an allocator needs, and it has no names.
"""

import logging
import math
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers

from ..base._torch import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    active_fake_mode,
    autograd_node,
    kernel_on_cpu,
    schema_of,
    sequence_number,
    sequence_number_of,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from ..base._transformers import quiet
from ..models.workload import Workload
from ..schedule import Schedule
from .emulation import RECEIVED, Message, Recorder, join_emulated
from .training import SHORT_STEPS, Training
from .world import World


class Role(StrEnum):
    """Purpose of a storage."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATION = "activations"
    COMMUNICATION = "communication"
    BUFFER = "buffers"
    DATA = "data"
    TEMPORARY = "temporary"


class Phase(StrEnum):
    """PhaseEvents of a rank's work."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of one storage."""

    num_bytes: int
    begin: int
    """Number of the event that allocated it."""
    end: int | None
    """Number of the event that freed it; None if it outlives the trace."""
    role: Role
    name: str
    """Name of the parameter, or path of the module and operator that allocated it."""
    shape: tuple[int, ...]
    dtype: str
    stream: int
    """Number of the stream that allocated it; 0 for the stream of computation."""


@dataclass(frozen=True, slots=True)
class PhaseEvents:
    """Events of one phase, from its first to that of the next part."""

    phase: Phase
    step: int
    """Number of the step from 0; -1 during the build."""
    begin: int


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Memory of one rank, in order."""

    rank: int
    blocks: tuple[Block, ...]
    """In the order of allocation."""
    parts: tuple[PhaseEvents, ...]
    num_events: int
    """Number of allocations and frees."""
    messages: int
    """Number of collectives."""
    groups: int
    """Number of groups that communicated."""

    def part_at(self, event: int) -> PhaseEvents:
        """The part that contains an event."""
        return self.parts[bisect_right([each.begin for each in self.parts], event) - 1]


def trace_memory(
    workload: Workload,
    config: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    gloo: bool = True,
    operators: AbstractContextManager[Any] | None = None,
    kernels: Callable[[Schedule], object] | None = None,
) -> MemoryTrace:
    """Traces the build and two steps of a rank. Nothing is computed, and no device is needed.

    Code is traced as it is before compilation: `fusion` is ignored.

    Args:
        workload: what is trained.
        config: its configuration.
        rank, world_size: the rank. `torch.distributed` must not be initialised; afterwards it is not.
        gloo: include the copies that gloo makes of what it gathers and reduces; NCCL makes none.
        operators: a mode to trace under, such as one that allocates what operators of another device allocate.
        kernels: as that of `Training`, for modules of another device.

    Raises:
        WorkloadError: the configuration is invalid for the workload or for this number of ranks.
    """
    World.of(config, rank, world_size)  # before there is a group
    watch = _Watch()
    recorder = _Recorder(rank, watch, gloo)
    config = {**config, "fusion": False} if config.get("fusion") else config
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(warnings.catch_warnings(action="ignore", category=UserWarning))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if world_size > 1:
            join_emulated(rank, world_size, recorder)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(watch.resizes())
        stack.enter_context(operators or nullcontext())
        stack.enter_context(WithoutCompute(watch))
        training = Training(workload, config, torch.device("cpu"), rank=rank, world_size=world_size, kernels=kernels)
        _label_built(training, watch)
        for name, param in training.model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(_label_gradient, watch, name))
        with watch.modules(training.model), watch.optimizers():
            for step, micro_batches in enumerate(SHORT_STEPS):
                watch.begin(step)
                watch.update_of = lambda: _label_gradients(training, watch)
                training.short_step(micro_batches)
                _label_states(training, watch)
        watch.closed = True
    return watch.trace(rank, recorder)


def _label_built(training: Training, watch: "_Watch") -> None:
    for name, tensor in training.model.named_buffers():
        watch.label(tensor, Role.BUFFER, name)
    for name, param in training.model.named_parameters():
        watch.label(param, Role.PARAMETER, name)
    for micro_batches in training.data:
        for batch in micro_batches:
            for tensor in (each for each in tree_flatten(batch)[0] if isinstance(each, torch.Tensor)):
                watch.label(tensor, Role.DATA, "batch")


def _label_gradient(watch: "_Watch", name: str, param: torch.Tensor) -> None:
    if param.grad is not None:
        watch.label(param.grad, Role.GRADIENT, name)


def _label_gradients(training: Training, watch: "_Watch") -> None:
    # Hooks do not run for parameters that `fully_shard` shards.
    for name, param in training.model.named_parameters():
        _label_gradient(watch, name, param)


def _label_states(training: Training, watch: "_Watch") -> None:
    names = {param: name for name, param in training.model.named_parameters()}
    for param, state in training.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                watch.label(value, Role.OPTIMIZER, f"{names.get(param, 'replicated part')}: {key}")


@dataclass(slots=True, eq=False)
class _Live:
    """A block while it is traced."""

    num_bytes: int
    begin: int
    forward: bool
    communicates: bool
    name: str
    shape: tuple[int, ...]
    dtype: str
    stream: int
    end: int | None = None
    kept: bool = False
    """True if it outlived the forward pass that allocated it."""
    role: Role | None = None
    alive: Any = None
    """Weak reference to its storage."""

    def block(self) -> Block:
        role = self.role
        if role is None:
            role = Role.ACTIVATION if self.forward and self.kept else Role.TEMPORARY
            role = Role.COMMUNICATION if self.communicates else role
        return Block(self.num_bytes, self.begin, self.end, role, self.name, self.shape, self.dtype, self.stream)


class _Watch:
    """Records allocations and frees of storages, and what the rank is doing meanwhile."""

    def __init__(self) -> None:
        self.closed = False
        self.paused = self.communicating = 0
        self.step = -1
        self.update_of: Callable[[], None] = lambda: None
        """Called before the optimizer's step."""
        self._updates = False
        self._event = 0
        self._blocks: list[_Live] = []
        self._parts: list[PhaseEvents] = []
        self._paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._entered: list[tuple[int, str]] = []
        """Sequence numbers of autograd at which the innermost module changed, and that module."""
        self._streams: dict[int, int] = {}
        self._stream_objects: list[Any] = []

    def begin(self, step: int) -> None:
        """Begins a step; from the optimizer's on, the phase is that of the optimizer."""
        self.step, self._updates = step, False

    def phase(self) -> Phase:
        """Phase of the step that the rank is in."""
        if self.step < 0:
            return Phase.BUILD
        if self._updates:
            return Phase.OPTIMIZER
        return Phase.FORWARD if autograd_node() is None else Phase.BACKWARD

    def saw(self, tensor: torch.Tensor, operator: str) -> None:
        """Records a tensor's storage if it is new."""
        if self.paused or self.closed or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if getattr(storage, "_traced", None) is None:
            self._open(storage, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), self._name(operator))

    def _open(self, storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: str, name: str) -> None:
        if not storage.nbytes():
            return
        live = _Live(
            num_bytes=storage.nbytes(),
            begin=self._next(),
            # Recomputed activations are made within modules, during backward.
            forward=bool(self._stack) or self.phase() is Phase.FORWARD,
            communicates=bool(self.communicating) or self._stream() > 0,
            name=name,
            shape=shape,
            dtype=dtype,
            stream=self._stream(),
        )
        live.alive = weakref.ref(storage, lambda _: self._close(live))
        storage._traced = live
        self._blocks.append(live)

    def _close(self, live: _Live) -> None:
        if live.end is None and not self.closed:
            live.end = self._next()
            live.kept = self._parts[-1].begin > live.begin or not (self._stack or self.phase() is Phase.FORWARD)

    def _next(self) -> int:
        phase = self.phase()
        if not self._parts or (self._parts[-1].phase, self._parts[-1].step) != (phase, self.step):
            self._parts.append(PhaseEvents(phase, self.step, self._event))
        self._event += 1
        return self._event - 1

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Records that a storage has another size: `fully_shard` frees and restores gathered weights in this way."""
        live = getattr(storage, "_traced", None)
        if self.paused or self.closed or (live is not None and live.num_bytes == storage.nbytes()):
            return
        if live is not None:
            self._close(live)
            storage._traced = None
        shape, dtype = (live.shape, live.dtype) if live is not None else ((storage.nbytes(),), "uint8")
        self._open(storage, shape, dtype, live.name if live is not None else self._name("gathered weights"))
        if (opened := getattr(storage, "_traced", None)) is not None:
            opened.communicates = True

    def label(self, tensor: torch.Tensor, role: Role, name: str) -> None:
        """Sets the purpose of a tensor's storage, if it has none yet."""
        from ..schedule.parallel.sharding import local

        live = getattr(local(tensor.detach()).untyped_storage(), "_traced", None)
        if live is not None and live.role is None:
            live.role, live.name = role, name
        elif live is not None and live.role is role and name not in live.name.split(" + ") and live.name.count("+") < 2:
            live.name = f"{live.name} + {name}"

    def _name(self, operator: str) -> str:
        path = self._stack[-1] if self._stack else ""
        node = autograd_node()
        if not path and node is not None:
            at = bisect_right(self._entered, sequence_number_of(node), key=lambda each: each[0]) - 1
            path = self._entered[at][1] if at >= 0 else ""
        return f"{path}: {operator}" if path else operator

    def _stream(self) -> int:
        stream = torch.cpu.current_stream()
        if id(stream) not in self._streams:
            self._streams[id(stream)] = len(self._streams)
            self._stream_objects.append(stream)  # no other stream gets its id
        return self._streams[id(stream)]

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Follows the module that runs."""
        self._paths = {id(each): path for path, each in model.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(self._paths.get(id(module), "") or (self._stack[-1] if self._stack else ""))
            self._entered.append((sequence_number(), self._stack[-1]))

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
            self._entered.append((sequence_number(), self._stack[-1] if self._stack else ""))

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for each in handles:
                each.remove()

    @contextmanager
    def optimizers(self) -> Iterator[None]:
        """Follows steps of optimizers."""

        def begin(*_: Any) -> None:
            self.update_of()
            self._updates = True

        handle = optimizers.register_optimizer_step_pre_hook(begin)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Follows resizes of storages, which are not operators."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original

    def trace(self, rank: int, recorder: Recorder) -> MemoryTrace:
        for each in self._blocks:
            each.kept = each.kept or each.end is None
        return MemoryTrace(
            rank=rank,
            blocks=tuple(each.block() for each in self._blocks),
            parts=tuple(self._parts),
            num_events=self._event,
            messages=recorder.messages,
            groups=len(recorder.groups),
        )


class _Recorder(Recorder):
    """Notes which memory belongs to communication."""

    def __init__(self, rank: int, watch: _Watch, gloo: bool) -> None:
        super().__init__(rank, torch.device("cpu"))
        self._watch, self.copies = watch, gloo

    def begin(self, message: Message, work: Callable[[], None]) -> int:
        # Received values are made up: a real rank has no memory for that.
        made_up = message.peer is not None
        self._watch.communicating += 1
        self._watch.paused += made_up
        try:
            return super().begin(message, work)
        finally:
            self._watch.communicating -= 1
            self._watch.paused -= made_up


SMALL = 1 << 12
"""Operators on at most this many elements are computed."""
SMALL_INTEGERS = 1 << 24
"""Operators on integers and booleans of at most this many bytes are computed: positions, masks, routes of tokens."""
_ATEN = torch.ops.aten
_VIEWS = {_ATEN._unsafe_view, _ATEN.lift, _ATEN.lift_fresh, _ATEN.set_, _ATEN._local_scalar_dense, _ATEN.equal}
"""Operators that run as they are, though their schema does not tell that they allocate nothing."""


class WithoutCompute(TorchDispatchMode):
    """Mode in which operators on large CPU tensors allocate their outputs and compute nothing.

    Small floating-point outputs of operators that are not computed have a small constant, integer ones zeros; the experts of a
    router are chosen in turn.
    """

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._forms: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active_fake_mode() is not None:
            return func(*args, **kwargs)  # a DTensor infers shapes
        if any(each.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for each in types):
            return NotImplemented  # a DTensor calls the operators of its piece
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if func.namespace not in ("aten", "prims"):
            if not tensors:
                return func(*args, **kwargs)
            with self:  # its kernel calls other operators
                return kernel_on_cpu(func)(*args, **kwargs)
        if any(each.is_meta for each in tensors) or kwargs.get("device") == torch.device("meta"):
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs, tensors)
        operator = func.overloadpacket.__name__
        for each in tree_flatten(result)[0]:
            if isinstance(each, torch.Tensor):
                self._watch.saw(each, operator)
        if torch.Tag.inplace_view in func.tags:
            self._watch.resized(tensors[0].untyped_storage())
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if torch.Tag.inplace_view in func.tags or func.overloadpacket in _VIEWS or _is_view(func) or _small(tensors):
            return func(*args, **kwargs)
        if func.overloadpacket in _BY_HAND:
            return _BY_HAND[func.overloadpacket](*args, **kwargs)
        if (form := self._form(func, args, kwargs)) is None:
            return func(*args, **kwargs)
        spec, outputs = form
        if not tensors and _small([each for each in outputs if isinstance(each, _Form)]):
            return func(*args, **kwargs)
        named = {each.name: at for at, each in enumerate(schema_of(func).arguments)}
        made = []
        for each in outputs:
            if isinstance(each, _Form):
                made.append(each.make())
            elif isinstance(each, _Same):
                at = named[each.argument]
                given = args[at] if at < len(args) else kwargs[each.argument]
                made.append(given if each.index is None else given[each.index])
            else:
                made.append(each)
        return tree_unflatten(made, spec)

    def _form(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Forms of an operator's outputs; None if they depend on values."""
        leaves, tree = tree_flatten((args, kwargs))
        key = (func, str(tree), tuple(_key(each) for each in leaves), torch.get_default_dtype())
        if key not in self._forms:
            self._forms[key] = self._inferred(func, args, kwargs)
        return self._forms[key]

    def _inferred(self, func: Any, args: Any, kwargs: Any) -> Any:
        given: dict[int, torch.Tensor] = {}

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in given:
                given[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            return given[id(value)]

        with self._fake, _unlogged():
            fakes, keywords = tree_map(fake, (args, kwargs))
            try:
                result = func(*fakes, **keywords)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                return None
        schema = schema_of(func)
        outputs, spec = tree_flatten(result)
        same: dict[int, _Same] = {}
        for at, each in enumerate(schema.arguments):
            if each.alias_info is None or not each.alias_info.is_write:
                continue
            value = fakes[at] if at < len(fakes) else keywords.get(each.name)
            for index, tensor in enumerate(value) if isinstance(value, (list, tuple)) else ((None, value),):
                same[id(tensor)] = _Same(each.name, index)
        return spec, [
            same.get(id(each)) or (_Form.of(each) if isinstance(each, torch.Tensor) else each) for each in outputs
        ]


@dataclass(frozen=True, slots=True)
class _Same:
    """An output that is an argument."""

    argument: str
    index: int | None


@dataclass(frozen=True, slots=True)
class _Form:
    """An output's shape, strides and number format."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Form":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        if not self.dtype.is_floating_point:
            return made.zero_() if made.numel() * made.element_size() <= SMALL_INTEGERS else made
        return made.fill_(RECEIVED) if made.numel() <= SMALL else made


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    return (type(value), value)


def _is_view(func: OpOverload) -> bool:
    returns = schema_of(func).returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _small(tensors: "Sequence[torch.Tensor | _Form]") -> bool:
    numbers = [(each.dtype, math.prod(each.shape)) for each in tensors]
    elements = sum(count for dtype, count in numbers if dtype.is_floating_point)
    integers = sum(count * dtype.itemsize for dtype, count in numbers if not dtype.is_floating_point)
    # An operator without inputs makes a tensor, which may be large.
    return bool(tensors) and elements <= SMALL and integers <= SMALL_INTEGERS


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silences the log of operators whose outputs depend on values: these are computed."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _in_turn(scores: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of `topk` in which every index occurs equally often."""
    shape = list(scores.shape)
    count, shape[dim] = shape[dim], k
    indices = (torch.arange(scores.numel() // count * k) % count).view(*shape) if dim in (-1, scores.dim() - 1) else 0
    indices = indices if isinstance(indices, torch.Tensor) else torch.zeros(shape, dtype=torch.int64)
    return scores.new_empty(shape), indices


def _grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Result of a grouped product: of rows with a matrix for each group, or of two groups of rows, as for gradients of these
    matrices. `FakeTensorMode` rejects it in float32."""
    groups = () if (a.dim() == 2) != (b.dim() == 2) else (len(offs) if offs is not None else a.shape[0],)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


_BY_HAND: dict[Any, Callable[..., Any]] = {_ATEN.topk: _in_turn, _ATEN._grouped_mm: _grouped}
"""Operators whose outputs are made without `FakeTensorMode`."""
