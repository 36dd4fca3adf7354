"""What benchmarks share: command lines, results that are kept, tables in pages, and the machine beside a figure."""

import argparse
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from redline.results.environment import host, versions

RESULTS = Path(__file__).resolve().parent / "results"


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is a docstring as it is written."""
    return argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)


def read_json(path: Path | None) -> dict[str, Any]:
    """Returns the results in a file; empty without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}


def write_json(path: Path | None, results: Any) -> None:
    """Writes results, if a file is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def machine(*packages: str) -> str:
    """Returns a sentence with this machine and the versions of redline's packages and of others."""
    here = host()
    named = {**versions(), **{name: metadata.version(name) for name in packages}}
    return (
        f"{here['system']}, {here['cores']} cores, {here['memory_mib']:,} MiB. "
        + ", ".join(f"{name} {version}" for name, version in named.items())
        + "."
    )


def markdown(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def put(page: Path, name: str, text: str) -> None:
    """Writes a text between `<!-- NAME -->` and `<!-- end of NAME -->` of a Markdown page.

    Raises:
        SystemExit: the page has no such marks.
    """
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begin, rest = page.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise SystemExit(f"{page} has no marks for this table: it must have the lines {marks[0]} and {marks[1]}")
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{after}", encoding="utf-8")
