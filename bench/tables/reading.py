"""Reads a folder of tables as runs: each file by the source with its form, independent of the folder's name."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from redline.base.errors import RedlineError

from . import (
    alpa,
    atorch,
    ibm_fms,
    megatron_bridge,
    megatron_golden,
    mosaic_fsdp,
    oneflow,
    stated,
    surfaces,
    torchtitan,
    torchtune,
)
from .form import Left, Run, check_source, read_csv, read_markdown

FORMS: tuple[ModuleType, ...] = (
    surfaces, mosaic_fsdp, megatron_golden, ibm_fms, alpa, oneflow, atorch, torchtitan, torchtune, megatron_bridge, stated,
)  # fmt: skip
"""Forms of sources; a file is read by the first that matches. `megatron_bridge` covers several products of NVIDIA."""
SUFFIXES = (".csv", ".tsv", ".txt", ".md")
APART = ("kernels",)
"""Folders without runs."""


@dataclass
class Source:
    """The contents of a folder."""

    name: str
    runs: list[Run] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Rows that are left out, each with the reason."""
    inferred: tuple[str, ...] = ()


def read_tables(folder: Path, only: Iterable[str] = ()) -> list[Source]:
    """Returns the sources in a folder, one for each subfolder; a folder without subfolders is a source itself.

    Raises:
        UsageError: no source has the requested name.
    """
    inside = (
        sorted(each for each in folder.iterdir() if each.is_dir() and each.name not in APART) if folder.is_dir() else []
    )
    holding = {each.name: each for each in inside} or {folder.name: folder}
    wanted = list(only)
    for name in wanted or ([] if folder.is_dir() else [str(folder)]):
        check_source(name, sorted(holding) if folder.is_dir() else [])
    return [read_source(path, name) for name, path in holding.items() if not wanted or name in wanted]


def read_source(folder: Path, name: str) -> Source:
    """Returns the runs in the files of a folder. Repeated rows count once."""
    out = Source(name)
    seen: set[str] = set()
    for path in sorted(each for each in folder.rglob("*") if each.suffix in SUFFIXES and each.is_file()):
        form = form_of(path)
        if form is None:
            lines: list[int] = []
            with suppress(OSError, csv.Error):
                lines = [line for line, _ in read_csv(path)] if path.suffix == ".csv" else []
            out.left += [f"{path.name}:{line}: its form is unknown" for line in lines] or [
                f"{path.name}: its form is unknown"
            ]
            continue
        out.inferred += tuple(each for each in form.INFERRED if each not in out.inferred)
        for found in _rows(form, path, name):
            if isinstance(found, str):
                out.left.append(found)
                continue
            key = repr((found.model, found.hardware.name, found.setup, found.config, found.step_ms, found.memory_mib))
            if key in seen:
                out.left.append(f"{found.where}: it repeats another row")
            else:
                seen.add(key)
                out.runs.append(found)
    return out


def _rows(form: ModuleType, path: Path, name: str) -> Iterator[Run | str]:
    """Yields each row as a run, or the reason why it is left out."""
    try:
        for where, make in form.read(path, name):
            try:
                yield make()
            except (Left, RedlineError) as reason:
                yield f"{where}: {reason}"
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                yield f"{where}: it cannot be read ({type(error).__name__}: {error})"
    except (RedlineError, KeyError, ValueError, TypeError, OSError) as error:
        yield f"{path.name}: it cannot be read ({type(error).__name__}: {error})"


def form_of(path: Path) -> ModuleType | None:
    """Returns the form of a file; None if it is unknown."""
    try:
        header = header_of(path)
    except (OSError, csv.Error, RedlineError):
        return None
    return next((form for form in FORMS if form.matches(path, header)), None)


def header_of(path: Path) -> set[str]:
    """Returns the names of the columns; for a page those of all its tables."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return set(next(csv.reader(file), []))
    if path.suffix == ".tsv":
        return set()
    return {name for table in read_markdown(path) for name in table.header}
