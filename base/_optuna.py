"""Private Optuna APIs that redline depends on.

Checked with Optuna 5.0. Optuna is imported at first use.
"""

from typing import Any

from ._private import resolver

CHECKED = "optuna 5.0"
NAMES: dict[str, tuple[str, str]] = {
    # The lock of the journal file, and the suffixes of its files.
    "get_lock_file": ("optuna.storages.journal._file", "get_lock_file"),
    "LOCK_FILE_SUFFIX": ("optuna.storages.journal._file", "LOCK_FILE_SUFFIX"),
    "RENAME_FILE_SUFFIX": ("optuna.storages.journal._file", "RENAME_FILE_SUFFIX"),
}
"""Name in this module -> (module, name) in Optuna."""
OVERRIDDEN = {"optuna.samplers.TPESampler": "_compute_acquisition_func"}
"""Private methods of Optuna's classes that redline's subclasses override."""

__getattr__ = resolver(NAMES, CHECKED, globals())


def study_ids(storage: Any) -> dict[str, int]:
    """Returns the ids of a storage's studies by study name."""
    return {study.study_name: study._study_id for study in storage.get_all_studies()}


def trial_id(trial: Any) -> int:
    """Returns the storage's id of a trial."""
    return trial._trial_id
