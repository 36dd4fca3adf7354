"""Makes the values of recorded tensors as the recorded code would have made them, and no others.

An operation's *time* is its number in the log if it draws or has no inputs, otherwise the latest time of its inputs.
In that order draws happen as they would have, and everything else as soon as possible, so that tensors that are whole
only until they are cut are freed soon.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .recording import Operation, Recording, Reseed, Unrecordable, View, map_leaves, tensors_in

Numbered = list[tuple[int, Operation | Reseed]]


def replay(
    recording: Recording,
    wanted: Iterable[int],
    device: torch.device,
    seed: int,
    made: Callable[[int, torch.UntypedStorage], None],
) -> None:
    """Makes memory of a recording, with its values at the end of the log.

    Random numbers are those after `torch.manual_seed(seed)`. Draws for other memory also happen and are dropped at
    once. Sets the global random state.

    Args:
        wanted: numbers of its memory.
        seed: seed of draws before a seed is set in the recording.
        made: called with a number and its memory as soon as it has its final values; nothing else keeps it then.

    Raises:
        Unrecordable: an operation gives tensors of another form than recorded.
    """
    kept = set(wanted)
    operations = _ordered(_needed(recording.log, kept))
    player = _Player(recording, device)
    torch.manual_seed(seed)
    for each, (dropped, finished) in zip(operations, _done_with(operations, kept), strict=True):
        if isinstance(each, Reseed):
            torch.manual_seed(each.seed)
            continue
        player.play(each)
        for number in dropped:
            player.storages.pop(number, None)
        for number in finished:
            made(number, player.take(number))
    used = {number for each in operations if isinstance(each, Operation) for number in each.reads | each.writes}
    for number in kept - used:
        made(number, player.take(number))


def _needed(log: list[Operation | Reseed], wanted: set[int]) -> Numbered:
    """Numbered operations that the wanted memory depends on: those that made its contents, and all draws before the
    last of them.
    """
    live, drawing = set(wanted), False
    kept: Numbered = []
    for number in range(len(log) - 1, -1, -1):
        each = log[number]
        if isinstance(each, Reseed):
            if drawing:
                kept.append((number, each))
            drawing = False
        elif live & each.writes or (each.draws and drawing):
            drawing |= each.draws
            live = (live - each.whole) | each.reads
            kept.append((number, each))
    return kept[::-1]


def _ordered(numbered: Numbered) -> list[Operation | Reseed]:
    """Operations by time; see above."""
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    timed = []
    for number, each in numbered:
        time = number
        if isinstance(each, Operation):
            needs = [written[memory] for memory in each.reads | each.writes if memory in written]
            needs += [read[memory] for memory in each.writes if memory in read]
            if needs and not each.draws:
                time = max(needs)
            read.update({memory: max(time, read.get(memory, 0)) for memory in each.reads})
            written.update(dict.fromkeys(each.writes, time))
        timed.append((time, each))
    return [each for _, each in sorted(timed, key=lambda pair: pair[0])]


def _done_with(operations: list[Operation | Reseed], wanted: set[int]) -> list[tuple[frozenset[int], frozenset[int]]]:
    """For each operation, the memory whose contents nothing needs after it, and the wanted memory that nothing uses
    after it.
    """
    live, later = set(wanted), set[int]()
    out: list[tuple[frozenset[int], frozenset[int]]] = []
    for each in reversed(operations):
        if isinstance(each, Reseed):
            out.append((frozenset(), frozenset()))
            continue
        used = each.reads | each.writes
        out.append((used - live, (used & wanted) - later))
        live = (live - each.whole) | each.reads
        later |= used
    return out[::-1]


class _Player:
    """Runs operations on a device."""

    def __init__(self, recording: Recording, device: torch.device) -> None:
        self.recording, self.device = recording, device
        self.storages: dict[int, torch.UntypedStorage] = {}
        """Existing memory, by number."""

    def play(self, operation: Operation) -> None:
        """Runs an operation, and keeps its new memory."""
        args, kwargs = map_leaves(self.real, (operation.args, operation.kwargs))
        outputs = tensors_in(operation.call(*args, **kwargs))
        for view, tensor in zip(operation.made, outputs, strict=False):
            if view is None:
                continue
            form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            if form != (view.dtype, view.size, view.stride, view.offset):
                raise Unrecordable(f"{operation.call} gives {form} on {self.device}, but was noted as {view}")
            self.storages[view.memory] = tensor.untyped_storage()

    def real(self, value: Any) -> Any:
        """Converts an argument for the device."""
        if isinstance(value, View):
            return tensor_of(value, self.storage(value.memory))
        if isinstance(value, torch.Tensor):
            return value.to(self.place(value.device))
        return self.place(value) if isinstance(value, torch.device) else value

    def storage(self, number: int) -> torch.UntypedStorage:
        """Memory by its number, allocated if it does not exist."""
        if number not in self.storages:
            memory = self.recording.memories[number]
            count = memory.nbytes // memory.dtype.itemsize
            made = torch.empty(count, dtype=memory.dtype, device=self.place(memory.device))
            self.storages[number] = made.untyped_storage()
        return self.storages[number]

    def take(self, number: int) -> torch.UntypedStorage:
        storage = self.storage(number)
        del self.storages[number]
        return storage

    def place(self, device: torch.device) -> torch.device:
        """Device that replaces one of the recording."""
        own = self.recording.device
        return self.device if device.type == own.type and device.index in (None, own.index) else device


def tensor_of(view: View, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)
