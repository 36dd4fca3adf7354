"""The checkpoint folder: its layout, manifest, retention and validation.

A checkpoint is written to a temporary folder and renamed when it is complete, so that earlier ones stay intact if a
process dies. Its `manifest.json` contains a description, the size and SHA-256 of each of its files, and a SHA-256 of
the manifest itself.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from ...base.errors import StudyError
from ...base.writing import sync_folder, write_atomic

EVERY_S = 5.0
"""Interval between reports, s. Faster reads are not reported."""
Report = Callable[[Mapping[str, Any]], None]
"""Receives lines of a training's log."""


def ignore(line: Mapping[str, Any]) -> None:
    """Reports nothing."""


class Reading:
    """Counts the bytes that a rank has read.

    Args:
        what: description of what is read.
        of: number of bytes that this rank reads in all.
        report: receives a line of kind `progress` with `what`, `bytes` and `of`, at most every `EVERY_S`.
    """

    def __init__(self, what: str, of: int, report: Report) -> None:
        self._what, self._of, self._report = what, of, report
        self._bytes, self._reported_at = 0, time.monotonic()

    def __call__(self, size: int) -> None:
        self._bytes += size
        now = time.monotonic()
        if now - self._reported_at >= EVERY_S:
            self._reported_at = now
            self._report({"kind": "progress", "what": self._what, "bytes": self._bytes, "of": self._of})


MANIFEST = "manifest.json"
FROZEN = "frozen"
FORMAT = 1
PIECE_BYTES = 64 << 20
"""Size of the pieces of a larger file that have their own checksums."""
_BLOCK = 1 << 20
SEAL = "sha256"
"""Key of a manifest's checksum of itself."""
KEPT, REPLACES = "frozen", "replaces"
"""Keys of a manifest: the seal of a checkpoint's frozen tensors; the seals of the copies that frozen tensors replace."""
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.step-\d{8,}\.(saving|removing)")
"""Names of the leftovers of a killed save or removal."""
_ASIDE = re.compile(r"damaged-step-\d{8,}(-\d+)?")
_METADATA = ".metadata"
"""Metadata file of torch.distributed.checkpoint, which every checkpoint has."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a training."""

    path: Path

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return int(_NAME.fullmatch(self.path.name)[1])  # type: ignore[index]  # found by that name

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """Contents of the manifest.

        Raises:
            StudyError: it cannot be read, or was written by a later version.
        """
        try:
            document = json.loads((self.path / MANIFEST).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise StudyError(
                f"'{self.path}' is not a whole checkpoint: its {MANIFEST} cannot be read ({error})"
            ) from error
        if not isinstance(document, dict) or document.get("format") != FORMAT or not _valid_files(document):
            raise StudyError(
                f"'{self.path}' is not a checkpoint of this version of redline, which reads format {FORMAT}: "
                f"its {MANIFEST} has another format"
            )
        if document != _sealed(document) or document.get("step") != self.step:
            raise StudyError(f"'{self.path}' is damaged: its {MANIFEST} is not as it was when saved")
        return document

    @property
    def intact(self) -> bool:
        """True if the manifest has not changed since it was saved. Only such checkpoints are ever removed."""
        try:
            return bool(self.manifest)
        except StudyError:
            return False

    @property
    def frozen(self) -> "Checkpoint | None":
        """Checkpoint of the frozen tensors of the same training; None if this checkpoint contains everything."""
        return next(iter(CheckpointFolder(self.path.parent).frozen.all()), None)

    def check_frozen(self, rank: int = 0, ranks: int = 1, report: Report = ignore) -> None:
        """Reads the frozen tensors and compares them with their checksums, like `check`.

        Raises:
            StudyError: they are damaged, missing, or others than this checkpoint was saved with.
        """
        frozen, seal = self.frozen, self.manifest.get(KEPT)
        if frozen is not None:
            frozen.check(rank, ranks, report)
        if seal is not None and (frozen is None or seal not in frozen.seals):
            state = "gone" if frozen is None else "others"
            raise StudyError(
                f"'{self.path}' was saved beside weights in '{self.path.parent / FROZEN}' that are {state} now"
            )

    @property
    def seals(self) -> tuple[str, ...]:
        """Seals by which checkpoints refer to it: its own, and those of checkpoints that it replaces."""
        return (self.manifest[SEAL], *self.manifest.get(REPLACES, ()))

    def files(self) -> tuple[str, ...]:
        """Names of its files, apart from the manifest."""
        return tuple(sorted(self.manifest["files"]))

    def check(self, rank: int = 0, ranks: int = 1, report: Report = ignore) -> None:
        """Reads a share of the files and compares it with their checksums. All ranks together read every file once.

        Args:
            rank, ranks: this rank, whose share has about as many bytes as the others'.
            report: receives the progress.

        Raises:
            StudyError: a file is missing, cut off or altered.
        """
        share = self.shares(ranks)[rank]
        sizes = [self._size(name, number) for name, number in share]
        reading = Reading(f"checking {self.path.name}", sum(sizes), report)
        for (name, number), read in zip(share, sizes):
            entry = self.manifest["files"][name]
            path = self.path / name
            try:
                size = path.stat().st_size
                if size != entry["bytes"]:
                    raise StudyError(f"'{path}' is damaged: it has {size} bytes, and had {entry['bytes']} when saved")
                if number is None:
                    matches = checksum(path) == entry["sha256"]
                else:
                    matches = _piece_checksum(path, number) == entry["pieces"][number]
                if not matches:
                    raise StudyError(f"'{path}' is damaged: its checksum is not the one it was saved with")
            except OSError as error:
                raise StudyError(f"'{path}' cannot be read: {error.strerror or error}") from error
            reading(read)

    def _size(self, name: str, number: int | None) -> int:
        """Bytes of a file, or of a piece of it."""
        size = int(self.manifest["files"][name]["bytes"])
        return size if number is None else min(PIECE_BYTES, size - number * PIECE_BYTES)

    def shares(self, ranks: int) -> list[list[tuple[str, int | None]]]:
        """Units that each rank reads to check all files: numbered pieces of large files, whole other files (None)."""
        units: list[tuple[str, int | None, int]] = []
        for name in self.files():
            entry = self.manifest["files"][name]
            pieces = entry.get("pieces")
            numbers: Sequence[int | None] = [None] if pieces is None else range(len(pieces))
            units += [(name, number, self._size(name, number)) for number in numbers]
        loads, out = [0] * ranks, [list[tuple[str, int | None]]() for _ in range(ranks)]
        for name, number, size in sorted(
            units, key=lambda unit: -unit[2]
        ):  # stable, so that all ranks compute the same shares
            rank = min(range(ranks), key=loads.__getitem__)
            loads[rank] += size
            out[rank].append((name, number))
        return out


def _sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a checksum of its contents to a manifest."""
    rest = {name: value for name, value in document.items() if name != SEAL}
    return {**rest, SEAL: hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def _valid_files(document: Mapping[str, Any]) -> bool:
    """True if a manifest's list of files is valid, with names within the folder."""
    files = document.get("files")
    return isinstance(files, dict) and all(
        os.path.basename(name) == name
        and isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
        and _valid_pieces(entry)
        for name, entry in files.items()
    )


def _valid_pieces(entry: Mapping[str, Any]) -> bool:
    """True if a manifest's entry of a file has checksums of all its pieces, or of none."""
    pieces = entry.get("pieces")
    return pieces is None or (isinstance(pieces, list) and len(pieces) == -(-entry["bytes"] // PIECE_BYTES))


class CheckpointFolder:
    """The checkpoints in a folder, which need not exist yet.

    Args:
        keep: number of checkpoints to keep.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path, self.keep = path, keep

    def all(self) -> list[Checkpoint]:
        """The checkpoints, the latest first, including damaged ones. A folder with the name but not the contents of a
        checkpoint is ignored.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = [Checkpoint(each) for each in self.path.iterdir() if _NAME.fullmatch(each.name)]
            return sorted(filter(_written_as_one, found), key=lambda each: -each.step)
        return []

    @property
    def step(self) -> int:
        """Number of steps of the latest checkpoint; 0 if there is none."""
        return next((each.step for each in self.all()), 0)

    def obstacle(self) -> str:
        """Reason why no checkpoints may be saved here: other files. Empty if the folder is absent, empty, or contains
        checkpoints.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if foreign := [] if self.all() else self._foreign():
                more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
                return (
                    f"'{self.path}' contains {', '.join(foreign[:3])}{more} and no checkpoint: checkpoints need a separate "
                    "folder; give one that is new or empty"
                )
        return ""

    def _foreign(self) -> list[str]:
        """Names of files and folders that are not from a training."""
        own_names = {each.path.name for each in self.all()}
        return sorted(
            each.name
            for each in self.path.iterdir()
            if each.name not in own_names
            and not _LEFT.fullmatch(each.name)
            and not _ASIDE.fullmatch(each.name)
            and not (each.name == FROZEN and each.is_dir() and not self.frozen._foreign())
        )

    @property
    def frozen(self) -> "CheckpointFolder":
        """Folder of the frozen tensors, which are saved once for all checkpoints."""
        return CheckpointFolder(self.path / FROZEN, keep=1)

    def checkpoint(self, step: int) -> Checkpoint:
        """The checkpoint of a step, which need not exist yet."""
        return Checkpoint(self.path / f"step-{step:08d}")

    def temporary(self, step: int) -> Path:
        """Temporary folder that the checkpoint of a step is written to."""
        return self.path / f".step-{step:08d}.saving"

    def finish(self, step: int, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> Checkpoint:
        """Turns the temporary folder into a checkpoint, and removes surplus checkpoints.

        Args:
            files: size and checksum of each file.
            facts: description for the manifest.

        Raises:
            OSError: it cannot be written.
        """
        beside, checkpoint = self.temporary(step), self.checkpoint(step)
        # Compared in its JSON form, because other values would change when they are read again.
        kept = next((each for each in self.frozen.all() if each.intact), None)
        named = {} if kept is None else {KEPT: kept.seals[0]}
        document = json.loads(json.dumps({"format": FORMAT, "step": step, **facts, **named, "files": dict(files)}))
        write_atomic(beside / MANIFEST, json.dumps(_sealed(document), indent=1).encode())
        sync_folder(beside)
        if checkpoint.path.exists():  # of a training that went back to an earlier step
            self._remove(checkpoint)
        os.rename(beside, checkpoint.path)
        sync_folder(self.path)
        older = [each for each in self.all() if each.step < step and each.intact]
        for each in older[self.keep - 1 :]:
            self._remove(each)
        return checkpoint

    def discard(self, step: int) -> None:
        """Removes the temporary folder of a failed save."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def prepare(self, found: Checkpoint | None = None) -> None:
        """Creates the folder, and removes only leftovers of killed saves.

        Args:
            found: checkpoint that the training continues from. Later ones are damaged and get another name: they are
                no longer the latest, and do not count among those to keep.

        Raises:
            OSError: it cannot be created.
            StudyError: it contains something else.
        """
        if obstacle := self.obstacle():
            raise StudyError(obstacle)
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.frozen.path):
            for each in folder.iterdir() if folder.is_dir() else ():
                if _LEFT.fullmatch(each.name):
                    shutil.rmtree(each, ignore_errors=True)
        if not self.all():  # of another training, which never saved a checkpoint
            for kept in self.frozen.all():
                self._remove(kept)
            with contextlib.suppress(OSError):  # missing, or not empty
                self.frozen.path.rmdir()
        for later in self.all():
            if found is not None and later.step > found.step:
                put_aside(later)

    def _remove(self, old: Checkpoint) -> None:
        """Removes the files that a checkpoint's manifest lists, and the folder if nothing else is in it."""
        if not old.intact:
            return
        names = {MANIFEST, *old.files()}
        with contextlib.suppress(OSError):
            if {each.name for each in old.path.iterdir()} <= names:
                # Renamed first, so that a killed process does not leave half a checkpoint under its name.
                removing = old.path.with_name(f".{old.path.name}.removing")
                os.rename(old.path, removing)
                shutil.rmtree(removing, ignore_errors=True)
                return
            for name in sorted(
                names, key=lambda name: name != MANIFEST
            ):  # without its manifest it is no longer a checkpoint
                (old.path / name).unlink(missing_ok=True)


def _written_as_one(each: Checkpoint) -> bool:
    """True if a folder was saved as a checkpoint, even if it is damaged now."""
    path = each.path
    if path.name != f"step-{each.step:08d}" or path.is_symlink() or not path.is_dir():
        return False
    return (path / MANIFEST).is_file() and ((path / _METADATA).is_file() or each.intact)


def put_aside(damaged: Checkpoint) -> None:
    """Renames a damaged checkpoint so that it no longer counts as one."""
    os.rename(damaged.path, _free(damaged.path.with_name(f"damaged-{damaged.path.name}")))


def _free(path: Path) -> Path:
    """The path, with a number appended if it exists."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def checksum(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _piece_checksum(path: Path, number: int) -> str:
    """SHA-256 of a piece of a file, hex."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(number * PIECE_BYTES)
        for data in _blocks(file, PIECE_BYTES):
            total.update(data)
    return total.hexdigest()


def described(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files in a folder, by name. Files larger than a piece also get checksums of their pieces,
    so that several ranks can check one file.
    """
    return {name: _about(folder / name) for name in sorted(names)}


def _about(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size <= PIECE_BYTES:
        return {"bytes": size, "sha256": checksum(path)}
    whole, pieces = hashlib.sha256(), list[str]()
    with path.open("rb") as file:
        for _ in range(0, size, PIECE_BYTES):
            piece = hashlib.sha256()
            for data in _blocks(file, PIECE_BYTES):
                whole.update(data)
                piece.update(data)
            pieces.append(piece.hexdigest())
    return {"bytes": size, "sha256": whole.hexdigest(), "pieces": pieces}


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the next `size` bytes of a file in blocks."""
    while size > 0 and (data := file.read(min(_BLOCK, size))):
        size -= len(data)
        yield data
