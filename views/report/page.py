"""The page of a run: its contents as plain data, and the HTML of a report, a single file that loads nothing else."""

import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...base.errors import StudyError, UsageError
from ...base.reading import path_of
from ...base.writing import write_atomic
from ...frameworks import export_targets, render
from ...knobs.lossy import lossy_of
from ...results import summary
from ...results.columns import header, value
from ...results.listing import knob_names
from ...results.measurement import Trial
from . import analysis, words
from .analysis import effects, failures
from .source import Source

LOWEST, HIGHEST = -(2**53), 2**53
"""Range of the whole numbers that JavaScript represents exactly."""


def document(source: Source) -> dict[str, Any]:
    """Returns the contents of the report or dashboard page of a run, JSON-ready."""
    trials = source.trials
    space = words.space(source.request, trials)
    free = {knob["name"]: knob.get("values") for knob in space["knobs"] if not knob.get("derived")}
    contents = {
        "name": source.name,
        "state": source.state,
        "made": time.time(),
        "simulated": source.simulated,
        "emulated": source.emulated,
        "folder": source.folder.resolve().name,
        "devices": words.devices(source.request),
        "began": words.began(source.request),
        "problems": source.problems,
        "asked": words.request_rows(source.request),
        "environment": words.environment(source.request, source.best),
        "reproduce": (source.best or {}).get("reproduce"),
        "space": space,
        "lossy": lossy_of(source.request),
        "headline": analysis.headline(trials),
        "frontier": analysis.frontier(trials),
        "predictions": analysis.predictions(trials),
        "effects": effects(trials, free),
        "failures": failures(trials, source.folder),
        "exports": exports(source),
        "again": {
            str(trial.number): {"first": trial.first, "again": list(trial.remeasured)}
            for trial in trials
            if trial.first is not None
        },
        "rows": _rows(source),
    }
    plain: dict[str, Any] = as_json(contents)
    return plain


def _rows(source: Source) -> dict[str, list[Any]]:
    """Returns the columns of trials.csv, without those whose cells are all empty."""
    always = ("trial", "status", "reason", "throughput")
    columns = {name: [value(trial, name) for trial in source.trials] for name in header(knob_names(source.trials))}
    return {
        name: cells
        for name, cells in columns.items()
        if name in always or any(cell is not None and cell != "" for cell in cells)
    }


def as_json(value: Any) -> Any:
    """Returns `value` with numbers that JSON or JavaScript cannot represent written as text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if LOWEST <= value <= HIGHEST else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): as_json(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(element) for element in value]
    return str(value)


def exports(source: Source, trial: Trial | None = None) -> list[dict[str, Any]]:
    """Returns a trial's configuration in each export format, as `target`, `about`, `text` and `notes`.

    `notes` are remarks, if the format has no comments for them in the text. A format that cannot represent the
    configuration has the reason under `error` in place of the text.

    Args:
        source: the run.
        trial: the trial; None for the winner. The list is empty without a winner.
    """
    trial = trial or summary.best(source.trials)
    if trial is None:
        return []
    entries: list[dict[str, Any]] = []
    for name, target in export_targets().items():
        entry: dict[str, Any] = {"target": name, "about": target.about}
        try:
            rendered = render(name, trial, source.request)
        except UsageError as error:
            entry["error"] = str(error)
        else:
            entry["text"] = rendered.text
            entry["notes"] = [] if rendered.comments_inside else list(rendered.notes)
        entries.append(entry)
    return entries


DRAWING = (
    "dom", "format", "draw/pen", "draw/scale", "draw/marks", "draw/words", "draw/frame", "draw/hover",
)  # fmt: skip
"""The drawing layer and its dependencies; the report and the dashboard draw with it only."""

SCRIPTS = (
    *DRAWING, "status", "copy", "rows", "details", "headline", "charts/trials", "charts/progress",
    "charts/memory", "charts/parallel", "charts/effects", "charts/predicted",
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


def write_report(run: str | Path, output: str | Path | None = None, *, storage: str | None = None) -> Path:
    """Writes the report of a run and returns its path.

    Args:
        run: the folder of the run, finished or still running, or a best.yaml or plan.
        output: the file to write; None for `report.html` in the folder of the run, or for a file its name with `.html`.
        storage: storage of the trials if they are not in the folder, as for `View`.

    Raises:
        StudyError: there is no run, it cannot be read, or the report cannot be written.
    """
    source = Source.read(run, storage=storage)
    if output is None:
        output = source.folder / (Path(source.file).stem + ".html" if source.file else NAME)
    output = path_of(output)
    if output.is_dir():
        output = output / NAME
    content = page(document(source))
    try:
        write_atomic(output, content.encode(), durable=False)
    except OSError as error:
        raise StudyError(f"cannot write '{output}': {error.strerror or error}; give another file with -o") from error
    return output
