"""Process groups of one rank without peers, and the record of what the rank communicates.

An emulated rank runs alone at its true rank and world size. Every collective returns at once with values of plausible scale.
The recorder notes when it began and when it was waited for; `runners/place/replay.py` adds the time that it would take. torch's
own `fake` process group is not used for two reasons: it leaves received tensors unchanged, so they may be NaN or denormal and
change the speed of kernels; and recording its collectives needs a TorchDispatchMode, which runs Python for every other operator
as well.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import torch
import torch.distributed as dist

from ..base._torch import FakeProcessGroup, TorchDispatchMode

BACKEND = "emulated"
RECEIVED = 0.02
"""Standard deviation of received numbers. It is that of weights as transformers initialises them, so that sums of products
neither overflow nor become denormal."""


class Kind(StrEnum):
    """Kind of a communication."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SEND = "send"
    RECEIVE = "receive"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True)
class Message:
    """One communication of a rank."""

    kind: Kind
    num_bytes: int
    """Bytes of the whole group for an all-gather or reduce-scatter; otherwise the bytes that this rank sends."""
    dtype: str
    """Number format, as `float32`."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    group: str
    """Name of the group: its messages run one after another."""
    peer: int | None = None
    """Global rank at the other end of a send or receive."""
    tag: int = 0
    """Tag of a send or receive; those with the same tag arrive in order."""


class Act(IntEnum):
    """Kind of a recorded event."""

    BEGIN = 0
    """A communication starts."""
    WAIT = 1
    """The rank, or its stream, waits for one."""
    RECORD = 2
    """A CUDA event is recorded on a stream."""
    AWAIT = 3
    """A CUDA stream waits for an event."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the record of a step."""

    act: Act
    number: int
    """Number of the communication or of the CUDA event."""
    message: Message | None
    """The communication of a `BEGIN`."""
    at: float
    """Seconds since the step began."""
    left: float
    """Time at which the call returned, s; the time between `at` and `left` is the emulation's own work."""
    stream: int
    """CUDA stream; 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Communications of one optimizer step of a rank, with their times."""

    rank: int
    seconds: float
    """Duration of the step, the emulation's own work included."""
    entries: tuple[Entry, ...]
    """In the order in which the host issued them."""
    stream: int
    """The stream on which the step begins and ends."""

    @property
    def own_seconds(self) -> float:
        """The part of `seconds` without the emulation's own work."""
        return self.seconds - sum(entry.left - entry.at for entry in self.entries)


class Recorder:
    """Records the communications of this process, step by step.

    On a CPU, times are read from a host clock. On CUDA they are events on the current stream, read after the last step: the host
    never waits for the device in between, and a collective is recorded at its position in its stream.

    Args:
        rank: of this process.
        device: where it computes.
        clock: host clock, s. By default the CPU time of this thread, which other processes on the same core do not prolong.
    """

    def __init__(self, rank: int, device: torch.device, clock: Callable[[], float] = time.thread_time) -> None:
        self.rank, self.clock = rank, clock
        self.recording = False
        self._cuda = device.type == "cuda"
        self.copies = not self._cuda
        """True if groups make the copies that gloo makes."""
        self._number = self.messages = 0
        """Number of collectives so far, including those outside steps; sends and receives are not counted."""
        self._messages: dict[Message, int] = {}
        self._steps: list[_RawStep] = []
        self._alive: list[Any] = []
        self.groups: set[str] = set()
        """Names of the groups that communicated."""

    def begin(self, message: Message, work: Callable[[], None]) -> int:
        """Records the begin of a communication; `work` produces the received values, and its time is excluded."""
        self._number += 1
        self.messages += message.peer is None
        self.groups.add(message.group)
        if not self.recording:
            with torch.no_grad():
                work()
            return self._number
        began = self.now()
        with torch.no_grad():
            work()
        self._note(Act.BEGIN, self._number, self._messages.setdefault(message, len(self._messages)), began, self.now())
        return self._number

    def wait(self, number: int) -> None:
        if self.recording:
            moment = self.now()
            self._note(Act.WAIT, number, -1, moment, moment)

    def begin_step(self) -> None:
        self._steps.append(_RawStep(self.now(), self._stream(), array("q"), [] if self._cuda else array("d")))
        self.recording = True

    def end_step(self) -> None:
        self.recording = False
        self._steps[-1].end = self.now()

    def forget(self) -> None:
        """Drops the steps so far."""
        self._steps.clear()
        self._alive.clear()

    def traces(self) -> tuple[StepTrace, ...]:
        """The steps so far. On CUDA it waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        messages = list(self._messages)
        return tuple(self._read(step, messages) for step in self._steps)

    def _read(self, raw: "_RawStep", messages: list[Message]) -> StepTrace:
        def since(moment: Any) -> float:
            return raw.begin.elapsed_time(moment) * 1e-3 if self._cuda else moment - raw.begin

        entries = []
        for line in range(len(raw.times) // 2):
            act, number, message, stream = raw.codes[4 * line : 4 * line + 4]
            began, returned = (since(moment) for moment in raw.times[2 * line : 2 * line + 2])
            entries.append(
                Entry(Act(act), number, messages[message] if message >= 0 else None, began, returned, stream)
            )
        return StepTrace(self.rank, since(raw.end), tuple(entries), raw.stream)

    def now(self) -> Any:
        """The current time: a clock reading, or an event on the current stream."""
        if not self._cuda:
            return self.clock()
        event = _Event(enable_timing=True)
        event.record()
        return event

    def _note(self, act: Act, number: int, message: int, began: Any, returned: Any) -> None:
        raw = self._steps[-1]
        raw.codes.extend((act, number, message, self._stream()))
        raw.times.extend((began, returned))

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self._cuda else 0

    @contextmanager
    def watching_streams(self) -> Iterator[None]:
        """Context manager that records the events by which one CUDA stream waits for another: a gather that FSDP issues on its
        own stream delays only those that wait for it. Does nothing on a CPU, which has no streams."""
        if not self._cuda:
            yield
            return
        events = torch.cuda.Event
        record, wait = events.record, events.wait

        def note(act: Act, event: Any, stream: Any) -> None:
            if self.recording and not isinstance(event, _Event):
                self._alive.append(event)  # no other event gets its id while it lives
                with torch.cuda.stream(stream):
                    moment = self.now()
                    self._note(act, id(event), -1, moment, moment)

        def recorded(event: Any, stream: Any = None) -> None:
            record(event, stream)
            note(Act.RECORD, event, stream)

        def waited(event: Any, stream: Any = None) -> None:
            wait(event, stream)
            note(Act.AWAIT, event, stream)

        events.record, events.wait = recorded, waited
        try:
            yield
        finally:
            events.record, events.wait = record, wait


@dataclass(slots=True)
class _RawStep:
    """A step while it is recorded. It takes little memory, since the rank's memory is measured at the same time."""

    begin: Any
    stream: int
    codes: "array[int]"
    """Act, number, message and stream of each entry."""
    times: Any
    """Begin and end of each entry."""
    end: Any = None


class _Event(torch.cuda.Event):
    """A CUDA event that the recorder created."""


class _Work(dist.Work):
    """A completed communication."""

    def __init__(self, recorder: Recorder, number: int, result: Any) -> None:
        super().__init__()
        self._recorder, self._number, self._result = recorder, number, result
        self.held: Any = None
        """Tensors that a real work object keeps alive until it is dropped."""

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.wait(self._number)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class EmulatedGroup(dist.ProcessGroup):
    """A process group of which only this process exists.

    Received values are derived from this rank's own, since ranks are alike on average: a gather repeats its piece, a reduction
    leaves its input unchanged, and an exchange receives from every rank the piece that this rank keeps for itself. Collectives
    that no step runs (scatter, gather to one rank) are torch's fake ones.

    Args:
        rank: along the group.
        ranks: global ranks of the group.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], name: str, recorder: Recorder) -> None:
        super().__init__(rank, len(ranks))
        # This backend has the options that callers read, and handles whatever is not overridden here.
        fake = FakeProcessGroup._create_internal(rank, len(ranks))
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, fake)
        self._rank, self._ranks, self._name, self.recorder = rank, ranks, name, recorder

    def getBackendName(self) -> str:  # torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._rank

    def _begin(
        self,
        kind: Kind,
        like: torch.Tensor,
        num_bytes: int,
        result: Any,
        work: Callable[[], None] = lambda: None,
        peer: int | None = None,
        tag: int = 0,
    ) -> _Work:
        peer_rank = None if peer is None else self._ranks[peer]
        dtype = str(like.dtype).removeprefix("torch.")
        message = Message(kind, num_bytes, dtype, self._ranks, self._name, peer_rank, tag)
        return _Work(self.recorder, self.recorder.begin(message, work), result)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._begin(Kind.ALL_REDUCE, tensors[0], _bytes(tensors), tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._begin(Kind.BROADCAST, tensors[0], _bytes(tensors), tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._begin(Kind.REDUCE, tensors[0], _bytes(tensors), tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Work:
        def fill() -> None:
            for gathered, source in zip(outputs, inputs, strict=True):
                for output in gathered:
                    output.detach().copy_(source)

        return self._begin(Kind.ALL_GATHER, inputs[0], sum(map(_bytes, outputs)), outputs, fill)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> _Work:
        def fill() -> None:
            self._gathered(output, source)

        return self._begin(Kind.ALL_GATHER, source, _bytes([output]), output, fill)

    _allgather_base = all_gather_single

    def _gathered(self, output: torch.Tensor, piece: torch.Tensor) -> None:
        _repeated(output, piece, self.size())
        if self.recorder.copies:
            output.detach().clone()  # gloo gathers into a temporary tensor and copies it

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> _Work:
        def fill() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                self._gathered(output, source)

        return self._begin(Kind.ALL_GATHER, inputs[0], _bytes(outputs), outputs, fill)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> _Work:
        def fill() -> None:
            for output, pieces in zip(outputs, inputs, strict=True):
                output.detach().copy_(pieces[self._rank])

        return self._begin(Kind.REDUCE_SCATTER, outputs[0], sum(map(_bytes, inputs)), outputs, fill)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> _Work:
        def fill() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                piece = source.detach().reshape(self.size(), -1)[self._rank]
                output.detach().copy_(piece.view(output.shape))

        work = self._begin(Kind.REDUCE_SCATTER, outputs[0], _bytes(inputs), outputs, fill)
        if self.recorder.copies:
            # gloo reduces a copy, which lives as long as the work object.
            work.held = [source.clone() for source in inputs]
        return work

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> _Work:
        def fill() -> None:
            sent, taken = source.detach(), output.detach()
            if not output_sizes and not input_sizes:
                pieces = sent.view(self.size(), -1)
                taken.view(self.size(), -1).copy_(pieces[self._rank : self._rank + 1])
                return
            begin_of_own = sum(input_sizes[: self._rank])
            own_part = sent[begin_of_own : begin_of_own + input_sizes[self._rank]]
            own_part = own_part if len(own_part) else sent
            if not len(own_part):
                _received(taken)
                return
            filled = 0
            for size in output_sizes:
                for begin in range(filled, filled + size, len(own_part)):
                    piece = taken[begin : min(begin + len(own_part), filled + size)]
                    piece.copy_(own_part[: len(piece)])
                filled += size

        return self._begin(Kind.ALL_TO_ALL, source, _bytes([source]), output, fill)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Work:
        return self._begin(Kind.SEND, tensors[0], _bytes(tensors), tensors, peer=peer, tag=tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Work:
        def fill() -> None:
            for tensor in tensors:
                _received(tensor)

        return self._begin(Kind.RECEIVE, tensors[0], _bytes(tensors), tensors, fill, peer=peer, tag=tag)

    def barrier(self, opts: Any = None) -> _Work:
        none = torch.empty(0)
        return self._begin(Kind.BARRIER, none, 0, none)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _repeated(output: torch.Tensor, piece: torch.Tensor, times: int) -> None:
    """Fills a tensor with `times` copies of a piece, which may be a view of it."""
    for chunk in output.detach().view(-1).chunk(times):
        if chunk.data_ptr() != piece.data_ptr():
            chunk.copy_(piece.detach().reshape(-1))


def _received(tensor: torch.Tensor) -> None:
    """Fills a tensor with plausible received values: small numbers, and ones for integers and booleans (the stages of
    torch.distributed.pipelining vote with these on whether shapes are known)."""
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor.copy_(_noise(tensor.dtype, tensor.device, tensor.numel()).view(tensor.shape))
    else:
        tensor.fill_(1)


_NOISE = 1 << 14
"""Length of the generated noise; longer tensors repeat it."""


def _noise(dtype: torch.dtype, device: torch.device, count: int) -> torch.Tensor:
    """Returns `count` small numbers, the same at every call, without drawing from the generator that training uses."""
    index = torch.arange(min(count, _NOISE), device=device, dtype=torch.float32)
    # A sine has a deviation of 1 / sqrt(2); a step that is not a rational multiple of pi spreads its phases.
    wave = (RECEIVED * math.sqrt(2)) * torch.sin(index * 12.9898 + 0.5)
    return wave.to(dtype).repeat(-(-count // max(1, len(wave))))[:count] if count else wave.to(dtype)


class WithoutProducts(TorchDispatchMode):
    """Mode in which products and fused attention are allocated and filled but not computed, on a CPU. Memory is the same as with
    them, and a model that takes hours to train on a CPU takes seconds. Their temporary memory, such as packed copies, is
    missing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        make = _PRODUCTS.get(getattr(func, "overloadpacket", func))
        tensor = next((argument for argument in args if isinstance(argument, torch.Tensor)), None)
        if make is None or tensor is None or tensor.device.type != "cpu" or (kwargs and "out" in kwargs):
            return func(*args, **(kwargs or {}))
        return make(*args)


def _filled(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_full(shape, RECEIVED, dtype=dtype)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel's memory layout has heads behind tokens.
    batch, heads, tokens, _ = query.shape
    output = _filled(query, batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return output, _filled(query, batch, heads, tokens, dtype=torch.float32)


def _attention_backward(_: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full_like(tensor, RECEIVED) for tensor in inputs[:3])


_aten = torch.ops.aten
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    _aten.mm: lambda a, b, *_: _filled(a, a.shape[0], b.shape[1]),
    _aten.addmm: lambda _, a, b, *more: _filled(a, a.shape[0], b.shape[1]),
    _aten.bmm: lambda a, b, *_: _filled(a, a.shape[0], a.shape[1], b.shape[2]),
    _aten.baddbmm: lambda _, a, b, *more: _filled(a, a.shape[0], a.shape[1], b.shape[2]),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operators that are not computed, and the allocation that replaces each."""


def join_emulated(rank: int, world_size: int, recorder: Recorder) -> None:
    """Creates the default process group of an emulated rank; groups created from it later are emulated too."""

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _group, extended_api=True, devices=["cpu", "cuda"])
    store = dist.HashStore()
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size, pg_options=recorder)


def _group(options: Any, recorder: Recorder | None) -> EmulatedGroup:
    """Makes a group; one without a recorder of its own has that of the default group."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if recorder is None:
        recorder = dist.group.WORLD.recorder
    return EmulatedGroup(options.group_rank, ranks, options.group_id, recorder)
