"""Numbers in TensorBoard's event files, read while a command writes them."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.errors import MissingDependency, UsageError
from .reading import Told, renamed

_IN_NAME = "tfevents"
"""What the name of every event file holds, as TensorBoard looks for it."""


class Events:
    """Scalars in an event file, or in all of a folder, by their tags; `step` is the step they are of.

    What is in it already is an earlier run's, which is told by the events' times: these are those of the host's clock.

    Args:
        path: need not be there yet; files may come later, in folders below it too.
        names: metrics by their tags; all others are taken as they are called.
    """

    def __init__(self, path: Path, names: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._names = names or {}
        self._since = time.time()
        self._loaders: dict[Path, Any] = {}

    def read(self, now: float, *, ended: bool = False) -> list[Told]:
        """What was written since it was last asked, by the times of the events.

        Args:
            now: this moment, s of the monotonic clock.
            ended: whether nothing is written any more; event files are read alike.

        Raises:
            UsageError: it is a file of another kind.
        """
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        offset = now - time.time()
        found = []
        for path in self._files():
            if path not in self._loaders:
                self._loaders[path] = EventFileLoader(str(path))
            for event in self._loaders[path].Load():
                values = dict(_scalars(event))
                if values and event.wall_time >= self._since:
                    told = renamed({"step": float(event.step), **values}, self._names)
                    found.append(Told(told, event.wall_time + offset))
        return sorted(found, key=lambda told: told.at)

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(each for each in self.path.rglob(f"*{_IN_NAME}*") if each.is_file())
        if not self.path.is_file():
            return []
        if _IN_NAME not in self.path.name:
            raise UsageError(
                f"--metric-file: {self.path} is a file and no folder of TensorBoard's; give it an ending, .jsonl or .csv, if "
                "it is JSON lines or CSV"
            )
        return [self.path]


def of_events(path: Path, *, look: bool = True) -> bool:
    """Whether a path is that of event files: a folder, a name without an ending where nothing is yet, or such a name as
    TensorBoard gives; without `look` by its name alone."""
    if not look:
        return _IN_NAME in path.name or not path.suffix
    return path.is_dir() or _IN_NAME in path.name or not (path.suffix or path.exists())


def check_installed() -> None:
    """Raises:
    MissingDependency: what reads event files is not installed.
    """
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "--metric-file is a folder or an event file, which TensorBoard reads: pip install tensorboard. A file of JSON "
            "lines or CSV has an ending, .jsonl or .csv"
        ) from error


def _scalars(event: Any) -> Iterator[tuple[str, float]]:
    """The single numbers of an event, by tag, whichever way they were written."""
    from tensorboard.util.tensor_util import make_ndarray

    for value in event.summary.value:
        if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
            continue
        array = make_ndarray(value.tensor)
        if array.dtype.kind in "fiu":
            yield value.tag, float(array.reshape(-1)[0])
