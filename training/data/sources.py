"""Which files the data is in, and what kind each is."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...base.errors import WorkloadError, unknown
from ...base.reading import path_of

Kind = Literal["text", "jsonl", "parquet", "datasets", "tokens", "indexed"]

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".bin": "tokens",
    ".idx": "indexed",
}
"""Kinds by a file's ending; a `.bin` with an `.idx` beside it is `indexed`."""
GZIP = ".gz"
"""What stands behind the ending of a text or of JSON lines that gzip has compressed."""
KINDS |= {f"{ending}{GZIP}": kind for ending, kind in KINDS.items() if kind in ("text", "jsonl")}
OF_TOKENS = ("tokens", "indexed")
_ABOUT_DATA = ("readme", "license", "dataset_info", "dataset_infos", "state")
"""Names, without ending, of files that lie beside data and are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file with data, or what counts as one."""

    path: Path
    """The file; of `indexed` the `.bin`; of `datasets` the folder."""
    kind: Kind
    """What it holds."""

    def stamps(self) -> list[tuple[str, int, int]]:
        """Path, size in bytes and time of the last change in ns of each of its files: they differ where data does.

        Contents are not read for this: that takes as long as reading the data at every start. What tokens came of
        them has a digest of its own.
        """
        files = [self.path]
        if self.kind == "indexed":
            files.append(self.path.with_suffix(".idx"))
        elif self.kind == "datasets":
            files = sorted(each for each in self.path.iterdir() if each.is_file())
        try:
            about = [(os.path.abspath(each), each.stat()) for each in files]
        except OSError as error:
            raise WorkloadError(f"cannot read the data in {self.path}: {error.strerror}") from None
        return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in about]


def find_sources(paths: Iterable[str]) -> list[Source]:
    """The sources that files and folders hold, those of a folder by name.

    Raises:
        WorkloadError: one is not there, is of no known kind, or tokens and texts are mixed.
    """
    found = [source for path in paths for source in _sources_at(path_of(path))]
    tokens = [each for each in found if each.kind in OF_TOKENS]
    if tokens and len(tokens) < len(found):
        other = next(each for each in found if each.kind not in OF_TOKENS)
        raise WorkloadError(
            f"{tokens[0].path} holds tokens and {other.path} text; give data of one of the two, or make tokens of both"
        )
    return found


def _sources_at(path: Path) -> Iterator[Source]:
    if path.is_dir():
        yield from _in_folder(path)
    elif path.is_file():
        kind = KINDS.get(_ending(path))
        if kind is None:
            said = unknown("ending of a data file", _ending(path) or "none", KINDS)
            raise WorkloadError(f"{path}: {said}")
        yield _file(path, kind)
    elif path.with_name(path.name + ".idx").is_file():
        yield _file(path.with_name(path.name + ".bin"), "indexed")
    else:
        raise WorkloadError(f"the data file or folder {path} does not exist")


def _file(path: Path, kind: Kind) -> Source:
    if kind == "tokens" and path.with_suffix(".idx").is_file():
        kind = "indexed"
    if kind == "indexed":
        for part in (path.with_suffix(".bin"), path.with_suffix(".idx")):
            if not part.is_file():
                raise WorkloadError(f"{path}: tokens with an index need a .bin and an .idx, but {part} does not exist")
        path = path.with_suffix(".bin")
    return Source(path=path, kind=kind)


def _in_folder(folder: Path) -> Iterator[Source]:
    """What a folder holds: `datasets`, or files of one kind; of such with splits in their names, those of training."""
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train").is_dir():
            names = sorted(each.name for each in folder.iterdir() if each.is_dir())
            raise WorkloadError(f"{folder} has no split 'train'; give the folder of one of {', '.join(names)}")
        folder = folder / "train"
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        yield Source(path=folder, kind="datasets")
        return
    files = [each for each in sorted(folder.rglob("*")) if each.is_file() and _is_data(each.relative_to(folder))]
    found = list(dict.fromkeys(_file(each, KINDS[_ending(each)]) for each in files))
    if not found:
        raise WorkloadError(f"the folder {folder} holds no data: no file ends in {', '.join(KINDS)}")
    kinds = sorted({each.kind for each in found})
    if len(kinds) > 1:
        raise WorkloadError(f"the folder {folder} holds data of several kinds ({', '.join(kinds)}); name the files")
    yield from [each for each in found if each.path.name.startswith("train")] or found


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    ending = _ending(path)
    return not hidden and ending in KINDS and path.name.lower().removesuffix(ending) not in _ABOUT_DATA


def _ending(path: Path) -> str:
    """The ending of a file's name, with what is before `.gz`."""
    packed = path.suffix.lower() == GZIP
    return "".join(path.suffixes[-2:] if packed else path.suffixes[-1:]).lower()
