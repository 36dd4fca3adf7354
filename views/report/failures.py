"""Failed trials, grouped by their reason."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.reading import tail_inside
from ...results.columns import fold
from ...results.measurement import Status, Trial

LINES = 12
"""Largest number of lines of a log that are shown."""

GROUPS = 40
"""Largest number of groups that are shown with a log; further groups only have the number of trials."""

_TAIL_BYTES = 16 * 1024  # holds a traceback and what led to it
_RANK = re.compile(r"rank (\d+):")
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")


def failures(trials: Sequence[Trial], folder: Path | None) -> list[dict[str, Any]]:
    """Returns groups of the trials that are not `ok`, largest first within a status, `skipped` last.

    Reasons that differ only in numbers belong to one group. An entry has `status`, `reason` (that of its last trial),
    `alike` (true if others differ) and `trials`. The last lines of a log come from its last trial with one (lines of
    the rank that its reason names, if any): `log`, `log_trial`, `log_path`, or `log_why` if it has none.

    Args:
        trials: finished trials.
        folder: the folder of the run, from which logs are read; None for no logs.
    """
    groups: dict[tuple[Status, str], list[Trial]] = {}
    for trial in trials:
        if trial.ok:
            continue
        reason = fold(trial.measured.reason)
        groups.setdefault((trial.measured.status, _VARYING.sub("#", reason)), []).append(trial)
    order = sorted(groups, key=lambda key: (key[0] is Status.SKIPPED, -len(groups[key]), groups[key][0].number))
    described_groups = []
    for place, key in enumerate(order):
        members = groups[key]
        reasons = {fold(trial.measured.reason) for trial in members}
        described = {
            "status": str(key[0]),
            "reason": fold(members[-1].measured.reason),
            "alike": len(reasons) > 1,
            "trials": [trial.number for trial in members],
        }
        if key[0] is not Status.SKIPPED and folder is not None and place < GROUPS:
            described |= _log(members, folder)
        described_groups.append(described)
    return described_groups


def _log(members: Sequence[Trial], folder: Path) -> dict[str, Any]:
    logged = [trial for trial in members if trial.measured.log]
    if not logged:
        return {"log_why": "the table names no log"}
    latest = logged[-1]
    log_entry = {"log_trial": latest.number, "log_path": latest.measured.log}
    try:
        tail, _ = tail_inside(folder.resolve(), latest.measured.log, at_most=_TAIL_BYTES)
    except OSError as error:
        return log_entry | {"log_why": f"its log cannot be shown: {error.strerror or error}"}
    lines = [line.rstrip() for line in tail.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    # The last output of other ranks only shows how they noticed the failure.
    rank = _RANK.match(latest.measured.reason)
    lines = [line for line in lines if rank and line.startswith(f"[rank {rank[1]}]")] or lines
    if not lines:
        return log_entry | {"log_why": "it printed nothing"}
    return log_entry | {"log": "\n".join(line[:400] for line in lines[-LINES:])}
