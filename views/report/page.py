"""The HTML of a report: a single file that loads nothing else."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...base.errors import StudyError
from ...base.reading import path_of
from ...base.writing import write_atomic
from .document import document
from .run_files import RunFiles

DRAWING = (
    "dom", "format", "draw/pen", "draw/scale", "draw/marks", "draw/words", "draw/frame", "draw/hover",
)  # fmt: skip
"""The drawing layer and its dependencies; the report and the dashboard draw with it only."""

SCRIPTS = (
    *DRAWING, "status", "copy", "rows", "details", "headline", "charts/trials", "charts/progress",
    "charts/memory", "charts/parallel", "charts/effects", "charts/predicted", "charts/timeline",
    "failures", "filter", "table", "space", "environment", "run",
)  # fmt: skip
"""The scripts that show a run, in the order of their dependencies; the dashboard uses the same."""


def page(document: Mapping[str, Any]) -> str:
    """Returns the report of a run as HTML.

    Nothing in `document` is interpreted as HTML or script: it is embedded as JSON without `<`, the page shows it as
    text only, and a content security policy forbids all scripts and styles but those of the page.
    """
    style, script = asset("style.css"), bundle((*SCRIPTS, "report"))
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    )
    fragments = {
        "policy": html.escape(policy),
        "title": html.escape(f"{document['name']}: redline report"),
        "style": style,
        "data": embed(document),
        "script": script,
    }
    filled = asset("report.html")
    for name, fragment in fragments.items():
        head, mark, tail = filled.partition(f"<!--{name}-->")
        if not mark:
            raise AssertionError(f"report.html has no place for {name}")
        filled = head + fragment + tail
    return filled


def embed(data: Any) -> str:
    """Returns `data` as JSON that is safe inside an HTML script element."""
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    return encoded.encode("utf-8", "replace").decode()


@cache
def asset(name: str) -> str:
    """Returns a file of this package as text."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def bundle(names: tuple[str, ...], *further: str) -> str:
    """Returns scripts of the report and then `more` as one script in a scope of its own; each sees those before it."""
    texts = [*(asset(f"js/{name}.js") for name in names), *further]
    return '(() => {\n"use strict";\n' + "\n".join(texts) + "\n})();\n"


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


NAME = "report.html"
"""File name of the report in the folder of a run."""


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Writes the report of a run and returns its path.

    Args:
        run: the folder of the run, finished or still running, or a table of trials (CSV).
        output: the file to write; None for `report.html` in the folder of the run, or, for a table of another
            name, that name with `.html`.

    Raises:
        StudyError: there is no run, a required file is missing, or the report cannot be written.
    """
    source = RunFiles.read(run)
    if output is None:
        alone = Path(run).is_file() and source.table != "trials.csv"
        output = source.folder / (Path(source.table).stem + ".html" if alone else NAME)
    output = path_of(output)
    if output.is_dir():
        output = output / NAME
    content = page(document(source))
    try:
        write_atomic(output, content.encode(), durable=False)
    except OSError as error:
        raise StudyError(f"cannot write '{output}': {error.strerror or error}; give another file with -o") from error
    return output
