"""The configurations of a run in the export formats."""

from typing import Any

from ...base.errors import UsageError
from ...frameworks import export_targets, render
from ...results import summary
from ...results.measurement import Trial
from .run_files import RunFiles


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
