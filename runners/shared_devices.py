"""The devices of this host that trials take and give back."""

import threading
from collections.abc import Sequence


class SharedDevices:
    """Devices that several trials share, of one runner or of many; each device is one trial's at a time.

    Args:
        ids: of the devices, as `CUDA_VISIBLE_DEVICES` names them.
        count: how many there are where they have no ids, as a CPU's.
    """

    def __init__(self, ids: Sequence[str] = (), *, count: int = 0) -> None:
        self._named = bool(ids)
        self._free = list(ids) if ids else [""] * count
        self._changed = threading.Condition()

    def take(self, count: int) -> tuple[str, ...]:
        """So many devices, the first that are free; waits until there are as many. Devices without ids give none."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        return tuple(taken) if self._named else ()

    def give_back(self, ids: Sequence[str], count: int) -> None:
        """Devices that `take` gave, and how many it was asked for."""
        with self._changed:
            self._free = sorted([*self._free, *(ids if self._named else [""] * count)])
            self._changed.notify_all()
