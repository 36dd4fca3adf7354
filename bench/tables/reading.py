"""A folder of tables as runs: each file by the source whose form it has, whatever the folder is called."""

import csv
from collections.abc import Iterable, Iterator
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
    surfaces,
    torchtitan,
    torchtune,
)
from .form import Left, Run, check_source, read_markdown

FORMS: tuple[ModuleType, ...] = (
    surfaces, mosaic_fsdp, megatron_golden, ibm_fms, alpa, oneflow, atorch, torchtitan, torchtune, megatron_bridge,
)  # fmt: skip
"""Forms in which sources publish; of a file the first that it has. `megatron_bridge` is NVIDIA's of several products."""
SUFFIXES = (".csv", ".tsv", ".txt", ".md")
APART = ("kernels",)
"""Folders that hold other things than runs."""


@dataclass
class Source:
    """What a folder holds."""

    name: str
    runs: list[Run] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Rows that are left out, with the reason each."""
    inferred: tuple[str, ...] = ()


def read_tables(folder: Path, only: Iterable[str] = ()) -> list[Source]:
    """Every folder of tables in a folder, a source each; a folder without others inside is a source itself.

    Raises:
        UsageError: there is no source of a name that is asked for.
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
    """The runs of a folder's files. A row that another of them repeats counts once."""
    out = Source(name)
    seen: set[str] = set()
    for path in sorted(each for each in folder.rglob("*") if each.suffix in SUFFIXES and each.is_file()):
        form = form_of(path)
        if form is None:
            out.left.append(f"{path.name}: its form is not known")
            continue
        out.inferred += tuple(each for each in form.INFERRED if each not in out.inferred)
        for found in _rows(form, path, name):
            if isinstance(found, str):
                out.left.append(found)
                continue
            key = repr((found.model, found.hardware.name, found.setup, found.config, found.step_ms, found.memory_mib))
            if key in seen:
                out.left.append(f"{found.where}: another row says the same")
            else:
                seen.add(key)
                out.runs.append(found)
    return out


def _rows(form: ModuleType, path: Path, name: str) -> Iterator[Run | str]:
    """Each row as a run, or why it is left out."""
    try:
        for where, make in form.read(path, name):
            try:
                yield make()
            except (Left, RedlineError) as why:
                yield f"{where}: {why}"
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                yield f"{where}: it cannot be read ({type(error).__name__}: {error})"
    except (RedlineError, KeyError, ValueError, TypeError, OSError) as error:
        yield f"{path.name}: it cannot be read ({type(error).__name__}: {error})"


def form_of(path: Path) -> ModuleType | None:
    """The form that a file has; None where none is known."""
    try:
        header = header_of(path)
    except (OSError, csv.Error, RedlineError):
        return None
    return next((form for form in FORMS if form.matches(path, header)), None)


def header_of(path: Path) -> set[str]:
    """The names of its columns, those of all tables of a page together."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return set(next(csv.reader(file), []))
    if path.suffix == ".tsv":
        return set()
    return {name for table in read_markdown(path) for name in table.header}
