"""Failed trials, grouped by their reason."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.reading import tail_inside
from ...results.columns import fold
from ...results.measurement import Status, Trial

LINES = 12
"""Lines of a log that are shown at most."""

GROUPS = 40
"""Groups that are shown with a log; of further ones only the number of trials is shown."""

_TAIL_BYTES = 16 * 1024
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
    for each in trials:
        if each.ok:
            continue
        reason = fold(each.measured.reason)
        groups.setdefault((each.measured.status, _VARYING.sub("#", reason)), []).append(each)
    order = sorted(groups, key=lambda key: (key[0] is Status.SKIPPED, -len(groups[key]), groups[key][0].number))
    out = []
    for place, key in enumerate(order):
        members = groups[key]
        reasons = {fold(each.measured.reason) for each in members}
        described = {
            "status": str(key[0]),
            "reason": fold(members[-1].measured.reason),
            "alike": len(reasons) > 1,
            "trials": [each.number for each in members],
        }
        if key[0] is not Status.SKIPPED and folder is not None and place < GROUPS:
            described |= _log(members, folder)
        out.append(described)
    return out


def _log(members: Sequence[Trial], folder: Path) -> dict[str, Any]:
    named = [each for each in members if each.measured.log]
    if not named:
        return {"log_why": "the table names no log"}
    last = named[-1]
    known = {"log_trial": last.number, "log_path": last.measured.log}
    try:
        text, _ = tail_inside(folder.resolve(), last.measured.log, at_most=_TAIL_BYTES)
    except OSError as error:
        return known | {"log_why": f"its log cannot be shown: {error.strerror or error}"}
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    # The last output of other ranks only shows how they noticed the failure.
    rank = _RANK.match(last.measured.reason)
    lines = [line for line in lines if rank and line.startswith(f"[rank {rank[1]}]")] or lines
    if not lines:
        return known | {"log_why": "it printed nothing"}
    return known | {"log": "\n".join(line[:400] for line in lines[-LINES:])}
