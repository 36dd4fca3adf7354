"""A run as its pages show it."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...results import View
from ...results.measurement import Measurement, Trial
from ...results.names import STOPPED


@dataclass(kw_only=True, slots=True)
class Source:
    """A run, or a best.yaml or plan by itself. Nothing is locked or written."""

    folder: Path
    """The folder of the run; logs are read from nowhere else."""
    file: str = ""
    """File name of a best.yaml or plan by itself."""
    trials: list[Trial] = field(default_factory=list)
    """The trials that have ended."""
    request: dict[str, Any] | None = None
    """The contents of run.yaml; None without one."""
    best: dict[str, Any] | None = None
    """The contents of best.yaml; None without one, or if it is about other trials."""
    state: str = STOPPED
    """See `results.names`."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of missing or damaged files."""

    def __post_init__(self) -> None:
        self.trials = [_finite(trial) for trial in self.trials]

    @property
    def name(self) -> str:
        """The tuned model, or the name of the folder or file."""
        requested = (self.request or {}).get("asked", {})
        for key in ("model", "name"):
            if isinstance(requested.get(key), str) and requested[key]:
                return requested[key]
        return Path(self.file).stem or self.folder.resolve().name

    @property
    def simulated(self) -> bool:
        """True if all numbers are predictions."""
        return bool((self.request or {}).get("asked", {}).get("simulated"))

    @property
    def emulated(self) -> bool:
        """True if some ranks of each trial ran on one device, and communication was priced."""
        return bool((self.request or {}).get("asked", {}).get("emulated"))

    @classmethod
    def read(cls, path: str | Path, *, storage: str | None = None) -> "Source":
        """Returns the run in a folder, or a best.yaml or plan by itself.

        Args:
            path: of the folder or file.
            storage: storage of the trials if they are not in the folder, as for `View`.

        Raises:
            StudyError: there is no run, or it cannot be read.
        """
        view = View(path, storage=storage)
        alone = view.path.is_file()
        return cls(
            folder=view.path.parent if alone else view.path,
            file=view.path.name if alone else "",
            trials=[trial for trial in view.trials() if not trial.pending],
            request=view.document,
            best=view.best,
            state=view.state,
            problems=view.problems,
        )


def _finite(trial: Trial) -> Trial:
    """Returns the trial without numbers that are not finite, such as the loss of a wrong trial: figures cannot show them."""
    invalid: dict[str, Any] = {
        field.name: None for field in fields(Measurement) if _is_infinite(trial.measured, field.name)
    }
    predicted: dict[str, Any] = {
        name: None for name in ("predicted_throughput", "predicted_memory_mib") if _is_infinite(trial, name)
    }
    if not invalid and not predicted:
        return trial
    return replace(trial, measurement=replace(trial.measured, **invalid), **predicted)


def _is_infinite(owner: Any, name: str) -> bool:
    value = getattr(owner, name)
    return isinstance(value, float) and not math.isfinite(value)
