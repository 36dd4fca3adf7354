"""The contents of the page of a run as plain data."""

import math
import time
from typing import Any

from ...base.errors import UsageError
from ...frameworks import export_targets, render
from ...knobs.lossy import lossy_of
from ...results import summary
from ...results.measurement import Trial
from . import analysis, words
from .analysis import failures
from .effects import effects
from .run_files import RunFiles

LOWEST, HIGHEST = -(2**53), 2**53
"""Range of the whole numbers that JavaScript represents exactly."""


def document(source: RunFiles, *, with_rows: bool = True) -> dict[str, Any]:
    """Returns the contents of the report or dashboard page of a run, JSON-ready.

    Args:
        source: the run.
        with_rows: True adds the table itself under `rows`.
    """
    trials = source.trials
    space = words.space(source.request, source.columns)
    free = {knob["name"]: knob.get("values") for knob in space["knobs"] if not knob.get("derived")}
    contents: dict[str, Any] = {
        "name": source.name,
        "table": source.table,
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
        "timeline": analysis.lanes(trials),
        "seconds_again": (source.best or {}).get("seconds_again"),
        "effects": effects(trials, free),
        "failures": failures(trials, source.folder),
        "exports": exports(source),
        "again": {
            str(trial.number): {"first": trial.first, "again": list(trial.remeasured)}
            for trial in trials
            if trial.first is not None
        },
    }
    if with_rows:
        contents["rows"] = rows(source)
    return as_json(contents)


def rows(source: RunFiles) -> dict[str, list[Any]]:
    """Returns the table by columns, without those whose cells are all empty."""
    always = ("trial", "status", "reason", "throughput")
    return {
        name: cells
        for name, cells in source.columns.items()
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


def exports(source: RunFiles, trial: Trial | None = None) -> list[dict[str, Any]]:
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
