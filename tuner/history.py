"""The trial that others must reproduce, and the trials of earlier runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import StudyError, UsageError
from ..results import Trial, View
from ..results.measurement import REFINEMENT
from ..runners import Reference
from ..space import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """A run to learn from."""

    name: str
    """Its folder, for messages."""
    trials: Sequence[Trial]
    """Its finished trials."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Its request, as in run.yaml."""


def read_runs(folders: Sequence[str | Path], own: str | Path | None = None) -> list[EarlierRun]:
    """Reads the finished trials of earlier runs, and their requests.

    Args:
        folders: folders of the runs.
        own: folder of the run that learns from them.

    Raises:
        UsageError: a folder contains no run, or no request, or is given twice, or is this run's own.
    """
    runs: list[EarlierRun] = []
    places: set[Path] = set()
    for folder in folders:
        place = Path(folder).resolve()
        if own is not None and place == Path(own).resolve():
            raise UsageError(f"warm start: {folder} is this run's own folder; resume continues it")
        if place in places:
            raise UsageError(f"warm start: {folder} is given twice; its trials count once")
        places.add(place)
        try:
            view = View(folder, Config)
        except StudyError as error:
            raise UsageError(f"warm start: {error}") from error
        if view.document is None:
            raise UsageError(f"warm start: {folder} has no run.yaml, so the request of its run is unknown")
        # A refined configuration names single blocks and is outside every space.
        trials = [trial for trial in view.trials() if not trial.pending and trial.sampler != REFINEMENT]
        runs.append(EarlierRun(name=str(folder), trials=trials, asked=view.document["asked"]))
    return runs


def reference(trials: Sequence[Trial], number: int) -> Reference | None:
    """Reference that trial `number` must reproduce: the first trial in the finest number format; None for that trial.

    Trial 0 is the default configuration, which applies no rewrites, so it is the reference until a trial in a finer format has
    run: on a GPU the default computes in bf16.
    """
    probed = [(trial, trial.measured.probe) for trial in trials if trial.ok and trial.measured.probe is not None]
    if not probed:
        return None
    trial, probe = min(probed, key=lambda pair: (pair[1].roundoff, pair[0].number))
    return None if trial.number == number else Reference(probe=probe, config_id=trial.config.id)
