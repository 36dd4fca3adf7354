"""What of Optuna is not public and is needed all the same: every such name is taken from here.

Checked with Optuna 5.0. Nothing here imports it before it is needed.
"""

from typing import Any

from ._private import resolver

CHECKED = "optuna 5.0"
NAMES: dict[str, tuple[str, str]] = {
    # The lock of its journal's file, and how its parts are named.
    "get_lock_file": ("optuna.storages.journal._file", "get_lock_file"),
    "LOCK_FILE_SUFFIX": ("optuna.storages.journal._file", "LOCK_FILE_SUFFIX"),
    "RENAME_FILE_SUFFIX": ("optuna.storages.journal._file", "RENAME_FILE_SUFFIX"),
}
"""Names here, and where Optuna has them."""
OVERRIDDEN = {"optuna.samplers.TPESampler": "_compute_acquisition_func"}
"""Methods of its classes that classes of redline's put their own in the place of."""

__getattr__ = resolver(NAMES, CHECKED, globals())


def study_ids(storage: Any) -> dict[str, int]:
    """The ids of a storage's studies, by their names."""
    return {study.study_name: study._study_id for study in storage.get_all_studies()}


def trial_id(trial: Any) -> int:
    """The id that a storage knows a trial by."""
    return trial._trial_id
