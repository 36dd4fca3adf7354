"""The trial that others must reproduce, and the fastest configurations of earlier runs."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from ..base.errors import StudyError, UsageError
from ..results import Trial, View
from ..results.measurement import REFINEMENT
from ..results.probe import Probe
from ..space import Config

LEADERS = 3
"""Number of configurations of earlier runs that are tried first."""


def leaders_of(folders: Sequence[str | Path], own: str | Path | None = None) -> tuple[Config, ...]:
    """Returns `LEADERS` configurations of earlier runs: the fastest of each, then the second of each, and so on.

    Args:
        folders: folders of the runs.
        own: folder of the run that begins with them.

    Raises:
        UsageError: a folder contains no run, or one without a successful trial, or is this run's own.
    """
    ranked: list[list[Config]] = []
    for folder in folders:
        if own is not None and Path(folder).resolve() == Path(own).resolve():
            raise UsageError(f"warm start: {folder} is this run's own folder; resume continues it")
        try:
            trials = View(folder, Config).trials()
        except StudyError as error:
            raise UsageError(f"warm start: {error}") from error
        # A refined configuration names single blocks and is outside every space.
        succeeded = [trial for trial in trials if trial.ok and trial.sampler != REFINEMENT]
        if not succeeded:
            raise UsageError(f"warm start: no trial of {folder} succeeded")
        ranked.append([trial.config for trial in sorted(succeeded, key=lambda trial: -trial.throughput)])
    in_turns = dict.fromkeys(config for rank in zip_longest(*ranked) for config in rank if config is not None)
    return tuple(in_turns)[:LEADERS]


def reference(trials: Sequence[Trial], number: int) -> Probe | None:
    """Returns the probe that trial `number` must reproduce, of the first trial in the finest number format; None for that trial.

    Trial 0 is the default configuration, which applies no rewrites, so it is the reference until a trial in a finer format has
    run: on a GPU the default computes in bf16.
    """
    probed = [(trial, trial.measured.probe) for trial in trials if trial.ok and trial.measured.probe is not None]
    if not probed:
        return None
    trial, probe = min(probed, key=lambda pair: (pair[1].roundoff, pair[0].number))
    return None if trial.number == number else probe
