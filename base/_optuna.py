"""Private Optuna APIs that redline depends on.

Checked with Optuna 5.0. Optuna is imported at first use.
"""

from typing import Any

OVERRIDDEN = {"optuna.samplers.GPSampler": "_optimize_acqf"}
"""Private methods of Optuna's classes that redline's subclasses override."""


def study_ids(storage: Any) -> dict[str, int]:
    """Returns the ids of a storage's studies by study name."""
    return {study.study_name: study._study_id for study in storage.get_all_studies()}


def trial_id(trial: Any) -> int:
    """Returns the storage's id of a trial."""
    return trial._trial_id
