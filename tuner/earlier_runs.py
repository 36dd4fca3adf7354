"""Earlier runs that a search is to learn from: what of them counts here, and how much."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import StudyError, UsageError
from ..results import Trial, View
from ..space import Config, Space
from .history import REFINEMENT
from .samplers.encoding import Encoding
from .task_similarity import TaskSimilarity, same_devices, task_similarity

RATES = {"tokens/s", "samples/s"}
"""Units between which only the level differs, of which nothing is taken."""
LEAST_WEIGHT = 0.05
"""Of a run that is taken at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """A run to learn from."""

    name: str
    """Its folder, for messages."""
    trials: Sequence[Trial]
    """Finished trials."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What it was asked, as run.yaml keeps it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """What of an earlier run counts."""

    run: EarlierRun
    """The run."""
    same_devices: bool
    """Whether it was on devices like those of this search."""
    trials: tuple[Trial, ...]
    """Those that succeeded, with values that this search's knobs have."""
    configs: tuple[Config, ...]
    """Where each of them is in this search's space; only the free knobs are to be relied on."""
    weight: float
    """How alike the run is to this search, 0 to 1."""
    said: str
    """What was taken, how much it counts, what matched and what did not, in a line."""


def read_runs(folders: Sequence[str | Path], own: str | Path | None = None) -> list[EarlierRun]:
    """The finished trials of earlier runs, and what these were asked.

    Args:
        folders: of the runs.
        own: the folder of the run that is to learn from them.

    Raises:
        UsageError: a folder holds no run, does not say what was asked, is there twice, or is this run's own.
    """
    runs: list[EarlierRun] = []
    seen: set[Path] = set()
    for folder in folders:
        place = Path(folder).resolve()
        if own is not None and place == Path(own).resolve():
            raise UsageError(f"warm start: {folder} is this run's own folder; resume goes on with what it holds")
        if place in seen:
            raise UsageError(f"warm start: {folder} is there twice; its trials count once")
        seen.add(place)
        try:
            view = View(folder, Config)
        except StudyError as error:
            raise UsageError(f"warm start: {error}") from error
        if view.document is None:
            raise UsageError(f"warm start: {folder} has no run.yaml, so what it measured is not known")
        # What names single blocks is beyond every space.
        trials = [each for each in view.trials() if not each.pending and each.sampler != REFINEMENT]
        runs.append(EarlierRun(name=str(folder), trials=trials, asked=view.document["asked"]))
    return runs


def take(run: EarlierRun, space: Space, asked: Mapping[str, Any], unit: str = "") -> Transferred:
    """What of a run counts in a search.

    Args:
        run: the earlier run.
        space: of the search.
        asked: what the search is asked, as run.yaml keeps it.
        unit: of the search's throughput; empty where it is not known.

    Raises:
        UsageError: there is nothing sensible to take; the message says why.
    """
    encoding, default = Encoding(space), space.default()
    knobs = set(encoding.names)
    theirs = {knob for trial in run.trials for knob in trial.config}
    shared = sorted(knobs & theirs)
    succeeded = [trial for trial in run.trials if trial.ok and (trial.measured.throughput or 0) > 0]
    trials, configs = [], []
    for trial in succeeded:
        here = Config({**default, **{knob: trial.config[knob] for knob in shared if knob in trial.config}})
        if encoding.encode(here) is not None:
            trials.append(trial)
            configs.append(here)
    like = task_similarity(run.asked, asked)
    why = (
        _unlike(succeeded, shared, sorted(theirs), like)
        or _idle(trials, configs, shared)
        or _of_another_unit({trial.measured.unit for trial in trials}, unit)
    )
    if why:
        raise UsageError(f"warm start from {run.name}: nothing can be taken: {why}")
    parts = [_share(len(trials), len(run.trials), like), f"knobs in both: {', '.join(shared)}"]
    if only_here := sorted(knobs - theirs):
        parts.append(f"only here: {', '.join(only_here)}")
    if only_there := sorted(theirs - knobs - set(default)):
        parts.append(f"only there: {', '.join(only_there)}")
    if foreign := len(succeeded) - len(trials):
        parts.append(f"{foreign} have values that no knob has here")
    said = f"warm start from {run.name}: {'; '.join(parts)}"
    return Transferred(
        run=run,
        same_devices=same_devices(run.asked, asked),
        trials=tuple(trials),
        configs=tuple(configs),
        weight=like.weight,
        said=said,
    )


def _share(count: int, of: int, like: TaskSimilarity) -> str:
    return f"{count} of {of} trials count" + (f", {like}" if like.differences else "")


def _unlike(succeeded: Sequence[Trial], shared: Sequence[str], theirs: Sequence[str], like: TaskSimilarity) -> str:
    if not succeeded:
        return "none of its trials succeeded"
    if not shared:
        return f"its knobs ({', '.join(theirs)}) are none of this search's"
    if like.weight < LEAST_WEIGHT:
        return f"it is too unlike: {', '.join(like.differences)}"
    return ""


def _idle(trials: Sequence[Trial], configs: Sequence[Config], shared: Sequence[str]) -> str:
    if not trials:
        return "all its trials have values that no knob has here"
    if len(set(configs)) < 2:
        return f"no knob that both have ({', '.join(shared)}) varies among its trials that succeeded"
    return ""


def _of_another_unit(there: set[str], here: str) -> str:
    there = there - {""}
    if len(there) > 1 and not there <= RATES:
        return f"its trials have several units ({', '.join(sorted(there))})"
    if here and not there <= {here} and not {here, *there} <= RATES:
        return f"it counts {', '.join(sorted(there))}, this search {here}"
    return ""
