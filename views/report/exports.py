"""Configurations in the formats people can copy."""

from typing import Any

from ...base.errors import UsageError
from ...frameworks import export_targets, render
from ...results import summary
from ...results.measurement import Trial
from .source import Source


def exports(source: Source, trial: Trial | None = None) -> list[dict[str, Any]]:
    """A trial's configuration in each format there is, as `target`, `about` and `text`; what a text has no place
    to state is in `notes`.

    A format that cannot hold it has the reason in place of the text, under `error`.

    Args:
        source: the run.
        trial: whose; None for the winner, and nothing where there is none.
    """
    trial = trial or summary.best(source.trials)
    if trial is None:
        return []
    out: list[dict[str, Any]] = []
    for name, target in export_targets().items():
        entry: dict[str, Any] = {"target": name, "about": target.about}
        try:
            made = render(name, trial, source.request)
        except UsageError as error:
            entry["error"] = str(error)
        else:
            entry["text"] = made.text
            entry["notes"] = [] if made.comments_inside else list(made.notes)
        out.append(entry)
    return out
