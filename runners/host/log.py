"""A trial's log file: the output of its ranks, limited in size."""

import os
from collections import deque
from io import FileIO
from pathlib import Path
from types import TracebackType

from ...base.host_memory import MIB


class LogFile:
    """Writes the beginning of a stream as it comes, and its end when it closes. The number of bytes left out in between is
    written as well.

    Args:
        path: the file; None to discard.
        head: bytes at the beginning that are written as they come.
        tail: bytes at the end that are written when it closes.
        continues: True to append to the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        head: int = 4 * MIB,
        tail: int = 4 * MIB,
        continues: bool = False,
    ) -> None:
        self._file: FileIO | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab" if continues else "wb", buffering=0)  # noqa: SIM115
        self._room = head
        self._tail_room = tail
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._left_out = 0
        self._at_line_start: dict[int, bool] = {}

    def write(self, data: bytes, *, rank: int | None = None) -> None:
        """Appends data. With `rank`, each line begins with it."""
        if self._file is None or not data:
            return
        if rank is not None:
            data = self._label(data, rank)
        if self._room > 0:
            self._put(data[: self._room])
            data, self._room = data[self._room :], max(0, self._room - len(data))
        if data:
            self._left_out += max(0, len(data) - self._tail_room)
            data = data[-self._tail_room :]
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._tail_room:
                dropped = self._tail.popleft()
                self._tail_size -= len(dropped)
                self._left_out += len(dropped)

    def close(self) -> None:
        """Writes the end and closes the file."""
        if self._file is None:
            return
        if self._left_out:
            self._put(b"\n[... %d bytes left out ...]\n" % self._left_out)
        for data in self._tail:
            self._put(data)
        self._tail.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, data: bytes) -> None:
        if self._file is None:  # closed when the disk was full
            return
        try:
            self._file.write(data)
        except OSError:  # a full disk must not end the trial, only its log
            self._file.close()
            self._file = None
            self._room = 0

    def _label(self, data: bytes, rank: int) -> bytes:
        label = b"[rank %d] " % rank
        start = label if self._at_line_start.get(rank, True) else b""
        self._at_line_start[rank] = data.endswith(b"\n")
        body = data[:-1] if data.endswith(b"\n") else data
        end = b"\n" if data.endswith(b"\n") else b""
        return start + body.replace(b"\n", b"\n" + label) + end

    def __enter__(self) -> "LogFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
