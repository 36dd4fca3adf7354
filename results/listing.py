"""The trials of a run that are shown, and their order."""

from collections.abc import Iterable, Sequence

from ..base.errors import UsageError, unknown
from . import summary
from .columns import PENDING, value
from .measurement import Status, Trial


def knob_names(trials: Iterable[Trial]) -> list[str]:
    """Returns the knobs of all trials, in order of appearance."""
    return list(dict.fromkeys(name for trial in trials for name in trial.config))


def select(trials: Sequence[Trial], *, top: int | None = None, statuses: Sequence[str] = ()) -> tuple[list[Trial], int]:
    """Returns the chosen trials, the fastest first, then failures and pending ones, and the number that `top` cut off.

    Args:
        trials: all trials.
        top: largest number of trials; None for all.
        statuses: statuses to include (also `pending`); empty for all.

    Raises:
        UsageError: a status is unknown, or `top` is below 1.
    """
    if top is not None and top < 1:
        raise UsageError(f"top must be at least 1, but got {top}")
    for status in statuses:
        if status not in (*Status, PENDING):
            raise UsageError(unknown("status", status, [*Status, PENDING]))
    selected = [trial for trial in trials if not statuses or value(trial, "status") in statuses]
    failed = [trial for trial in selected if not trial.pending and not trial.ok]
    ordered = [*summary.leaders(selected), *failed, *(trial for trial in selected if trial.pending)]
    return ordered[:top], len(ordered) - len(ordered[:top])
