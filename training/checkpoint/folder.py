"""The checkpoint folder: its layout, manifest, retention and validation.

A checkpoint is written to a temporary folder and renamed when it is complete, so that a process that dies leaves earlier ones
intact. Its `manifest.json` states what it is of, the size and SHA-256 of each of its files, and a SHA-256 of all that.
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
"""How often it is reported, s. What is read sooner is not reported at all."""
Report = Callable[[Mapping[str, Any]], None]
"""Takes lines of a training's log."""


def ignore(line: Mapping[str, Any]) -> None:
    """Reports nothing."""


class Reading:
    """Counts the bytes that a rank has read.

    Args:
        what: is read, in words.
        of: bytes that this rank reads in all.
        report: takes a line of kind `progress` with `what`, `bytes` and `of`, at most every `EVERY_S`.
    """

    def __init__(self, what: str, of: int, report: Report) -> None:
        self._what, self._of, self._report = what, of, report
        self._bytes, self._reported_at = 0, time.monotonic()

    def __call__(self, size: int) -> None:
        """Counts bytes that were read just now."""
        self._bytes += size
        now = time.monotonic()
        if now - self._reported_at >= EVERY_S:
            self._reported_at = now
            self._report({"kind": "progress", "what": self._what, "bytes": self._bytes, "of": self._of})


MANIFEST = "manifest.json"
FROZEN = "frozen"
FORMAT = 1
PIECE_BYTES = 64 << 20
"""Of a file, what has a checksum of its own where the file is larger."""
_BLOCK = 1 << 20
SEAL = "sha256"
"""By which a manifest holds the checksum of itself."""
KEPT, REPLACES = "frozen", "replaces"
"""By which a manifest names what no step changes, by the seal of that, and that names the seals in whose place it is."""
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.step-\d{8,}\.(saving|removing)")
"""What a save or a removal that was killed leaves."""
_ASIDE = re.compile(r"damaged-step-\d{8,}(-\d+)?")
_METADATA = ".metadata"
"""Of a folder of torch.distributed.checkpoint, which every checkpoint is."""


@dataclass(frozen=True)
class Checkpoint:
    """One of them."""

    path: Path
    """Its folder."""

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return int(_NAME.fullmatch(self.path.name)[1])  # type: ignore[index]  # found by that name

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """What it says of itself.

        Raises:
            StudyError: it has no manifest that can be read, or a later version wrote it.
        """
        try:
            document = json.loads((self.path / MANIFEST).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise StudyError(
                f"'{self.path}' is no whole checkpoint: its {MANIFEST} cannot be read ({error})"
            ) from error
        if not isinstance(document, dict) or document.get("format") != FORMAT or not _files_of(document):
            raise StudyError(
                f"'{self.path}' is no checkpoint of this version of redline, which reads format {FORMAT}: "
                f"its {MANIFEST} says otherwise"
            )
        if document != _sealed(document) or document.get("step") != self.step:
            raise StudyError(f"'{self.path}' is damaged: its {MANIFEST} is not as it was when saved")
        return document

    @property
    def sound(self) -> bool:
        """Whether its manifest is as it was when saved. No other checkpoint is ever removed."""
        try:
            return bool(self.manifest)
        except StudyError:
            return False

    @property
    def frozen(self) -> "Checkpoint | None":
        """What no step changes of the same training; None where all is here."""
        return next(iter(CheckpointFolder(self.path.parent).frozen.all()), None)

    def check_frozen(self, rank: int = 0, ranks: int = 1, report: Report = ignore) -> None:
        """Reads what no step changes and compares it with its checksums, as `check` does.

        Args:
            rank, ranks, report: as for that.

        Raises:
            StudyError: it is damaged, gone, or another than this checkpoint was saved with.
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
        """By which checkpoints name it: its own, and those of what it is in the place of."""
        return (self.manifest[SEAL], *self.manifest.get(REPLACES, ()))

    def files(self) -> tuple[str, ...]:
        """Names of what it consists of, beside the manifest."""
        return tuple(sorted(self.manifest["files"]))

    def check(self, rank: int = 0, ranks: int = 1, report: Report = ignore) -> None:
        """Reads a share of the files and compares it with their checksums; all ranks together read all of it once.

        Args:
            rank, ranks: whose share, of about as many bytes as the others'.
            report: told how far it is.

        Raises:
            StudyError: a file is missing, cut off or altered.
        """
        share = self.shares(ranks)[rank]
        sizes = [self._size(name, number) for name, number in share]
        reading = Reading(f"checking {self.path.name}", sum(sizes), report)
        for (name, number), read in zip(share, sizes):
            said = self.manifest["files"][name]
            path = self.path / name
            try:
                size = path.stat().st_size
                if size != said["bytes"]:
                    raise StudyError(f"'{path}' is damaged: it has {size} bytes, and had {said['bytes']} when saved")
                if number is None:
                    alike = checksum(path) == said["sha256"]
                else:
                    alike = _piece_checksum(path, number) == said["pieces"][number]
                if not alike:
                    raise StudyError(f"'{path}' is damaged: its checksum is not the one it was saved with")
            except OSError as error:
                raise StudyError(f"'{path}' cannot be read: {error.strerror or error}") from error
            reading(read)

    def _size(self, name: str, number: int | None) -> int:
        """Bytes of a file, or of a piece of it."""
        size = int(self.manifest["files"][name]["bytes"])
        return size if number is None else min(PIECE_BYTES, size - number * PIECE_BYTES)

    def shares(self, ranks: int) -> list[list[tuple[str, int | None]]]:
        """What each of some ranks reads to check all files: of large ones pieces by number, of others all (None)."""
        units: list[tuple[str, int | None, int]] = []
        for name in self.files():
            said = self.manifest["files"][name]
            pieces = said.get("pieces")
            numbers: Sequence[int | None] = [None] if pieces is None else range(len(pieces))
            units += [(name, number, self._size(name, number)) for number in numbers]
        loads, out = [0] * ranks, [list[tuple[str, int | None]]() for _ in range(ranks)]
        for name, number, size in sorted(units, key=lambda unit: -unit[2]):  # stable, so that all ranks share out alike
            rank = min(range(ranks), key=loads.__getitem__)
            loads[rank] += size
            out[rank].append((name, number))
        return out


def _sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the checksum of what else it says."""
    rest = {name: value for name, value in document.items() if name != SEAL}
    return {**rest, SEAL: hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def _files_of(document: Mapping[str, Any]) -> bool:
    """Whether a manifest's list of files is one, of names within the folder."""
    files = document.get("files")
    return isinstance(files, dict) and all(
        os.path.basename(name) == name
        and isinstance(said, dict)
        and isinstance(said.get("bytes"), int)
        and isinstance(said.get("sha256"), str)
        and _pieces_of(said)
        for name, said in files.items()
    )


def _pieces_of(said: Mapping[str, Any]) -> bool:
    """Whether what a manifest says of a file has checksums of all its pieces, or of none."""
    pieces = said.get("pieces")
    return pieces is None or (isinstance(pieces, list) and len(pieces) == -(-said["bytes"] // PIECE_BYTES))


class CheckpointFolder:
    """The checkpoints in a folder, which need not be there yet.

    Args:
        path: the folder.
        keep: how many are kept.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path, self.keep = path, keep

    def all(self) -> list[Checkpoint]:
        """The checkpoints, the latest first, damaged ones too. A folder that is named like one and was not written as one
        is somebody else's."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = [Checkpoint(each) for each in self.path.iterdir() if _NAME.fullmatch(each.name)]
            return sorted(filter(_written_as_one, found), key=lambda each: -each.step)
        return []

    @property
    def step(self) -> int:
        """Steps that the latest has behind it; 0 where there is none."""
        return next((each.step for each in self.all()), 0)

    def obstacle(self) -> str:
        """Why no checkpoints may be saved here: files of something else. Empty where the folder is absent, empty, or holds
        checkpoints already."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if foreign := [] if self.all() else self._foreign():
                more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
                return (
                    f"'{self.path}' holds {', '.join(foreign[:3])}{more} and no checkpoint: checkpoints are saved in a folder "
                    "of their own; give one that is new or empty"
                )
        return ""

    def _foreign(self) -> list[str]:
        """Names of what no training has saved here."""
        ours = {each.path.name for each in self.all()}
        return sorted(
            each.name
            for each in self.path.iterdir()
            if each.name not in ours
            and not _LEFT.fullmatch(each.name)
            and not _ASIDE.fullmatch(each.name)
            and not (each.name == FROZEN and each.is_dir() and not self.frozen._foreign())
        )

    @property
    def frozen(self) -> "CheckpointFolder":
        """Where what no step changes is kept, once for all of them."""
        return CheckpointFolder(self.path / FROZEN, keep=1)

    def whole(self, step: int) -> Checkpoint:
        """The checkpoint of a step, which need not be there yet."""
        return Checkpoint(self.path / f"step-{step:08d}")

    def beside(self, step: int) -> Path:
        """Where the checkpoint of a step is written until it is whole."""
        return self.path / f".step-{step:08d}.saving"

    def finish(self, step: int, files: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> Checkpoint:
        """Makes what lies beside a checkpoint, and removes those that are too many.

        Args:
            step: whose.
            files: of each its size and checksum.
            facts: what the manifest is to say.

        Raises:
            OSError: it cannot be written.
        """
        beside, made = self.beside(step), self.whole(step)
        # Compared as it is read again: what is no plain JSON would be another thing then.
        kept = next((each for each in self.frozen.all() if each.sound), None)
        named = {} if kept is None else {KEPT: kept.seals[0]}
        document = json.loads(json.dumps({"format": FORMAT, "step": step, **facts, **named, "files": dict(files)}))
        write_atomic(beside / MANIFEST, json.dumps(_sealed(document), indent=1).encode())
        sync_folder(beside)
        if made.path.exists():  # of a training that went back behind it
            self._remove(made)
        os.rename(beside, made.path)
        sync_folder(self.path)
        older = [each for each in self.all() if each.step < step and each.sound]
        for each in older[self.keep - 1 :]:
            self._remove(each)
        return made

    def discard(self, step: int) -> None:
        """Removes what lies beside, of a save that failed."""
        shutil.rmtree(self.beside(step), ignore_errors=True)

    def prepare(self, found: Checkpoint | None = None) -> None:
        """Makes the folder, and removes what saves that were killed have left there; nothing else.

        Args:
            found: what the training goes on from. Later ones, which are damaged, get another name: they are not the latest
                any more, nor counted among those that are kept.

        Raises:
            OSError: it cannot be made.
            StudyError: it holds something else.
        """
        if obstacle := self.obstacle():
            raise StudyError(obstacle)
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.frozen.path):
            for each in folder.iterdir() if folder.is_dir() else ():
                if _LEFT.fullmatch(each.name):
                    shutil.rmtree(each, ignore_errors=True)
        if not self.all():  # of another training, which never came to a checkpoint
            for kept in self.frozen.all():
                self._remove(kept)
            with contextlib.suppress(OSError):  # there is none, or somebody else's
                self.frozen.path.rmdir()
        for later in self.all():
            if found is not None and later.step > found.step:
                put_aside(later)

    def _remove(self, old: Checkpoint) -> None:
        """Removes a checkpoint: what its manifest names, and the folder where nothing else is in it."""
        if not old.sound:
            return
        names = {MANIFEST, *old.files()}
        with contextlib.suppress(OSError):
            if {each.name for each in old.path.iterdir()} <= names:
                # Renamed first: a process that is killed meanwhile must not leave half of one under its name.
                gone = old.path.with_name(f".{old.path.name}.removing")
                os.rename(old.path, gone)
                shutil.rmtree(gone, ignore_errors=True)
                return
            for name in sorted(names, key=lambda name: name != MANIFEST):  # without that it is no checkpoint any more
                (old.path / name).unlink(missing_ok=True)


def _written_as_one(each: Checkpoint) -> bool:
    """Whether a folder was saved as a checkpoint, be it damaged now."""
    path = each.path
    if path.name != f"step-{each.step:08d}" or path.is_symlink() or not path.is_dir():
        return False
    return (path / MANIFEST).is_file() and ((path / _METADATA).is_file() or each.sound)


def put_aside(damaged: Checkpoint) -> None:
    """Gives a damaged checkpoint another name, under which it is no checkpoint any more."""
    os.rename(damaged.path, _free(damaged.path.with_name(f"damaged-{damaged.path.name}")))


def _free(path: Path) -> Path:
    """The path, or with a number behind it where something is there."""
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
    """Size and checksum of files in a folder, by name; of those that are larger than a piece the checksums of their pieces too,
    so that several ranks can check one file."""
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
    """So many bytes of a file from where it is, a block at a time."""
    while size > 0 and (data := file.read(min(_BLOCK, size))):
        size -= len(data)
        yield data
