"""A clock that a training program has of its own, independent of what observes the program from outside.

It appends lines of JSON to `$CLOCK/RANK.jsonl`, flushed at each one, because a measured program may be killed. Without `CLOCK` in
the environment nothing is written. All times are of `time.monotonic()`. A line is one of

- `{"start": s, "rank": int, "pid": int}`,
- `{"step": s, "samples": int, "losses": [str]}`: the end of a step, its samples over all ranks, and this rank's loss of each
  micro-batch as `float.hex`,
- `{"apart": str, "from": s, "to": s}`: time spent in something other than training.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Clock:
    def __init__(self, rank: int = 0) -> None:
        self._losses: list[str] = []
        folder = os.environ.get("CLOCK")
        self._file = (Path(folder) / f"{rank}.jsonl").open("a", encoding="utf-8") if folder else None
        self._write({"start": time.monotonic(), "rank": rank, "pid": os.getpid()})

    def loss(self, loss: float) -> None:
        """Records the loss of a micro-batch of the current step."""
        self._losses.append(float(loss).hex())

    def step(self, samples: int) -> None:
        """Records the end of a step over `samples` samples of all ranks."""
        self._write({"step": time.monotonic(), "samples": samples, "losses": self._losses})
        self._losses = []

    @contextmanager
    def apart(self, activity: str) -> Iterator[None]:
        """Records the time of an evaluation, a save or a generation."""
        start = time.monotonic()
        yield
        self._write({"apart": activity, "from": start, "to": time.monotonic()})

    def _write(self, line: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
