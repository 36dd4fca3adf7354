"""The ledger: all trials of a study, in an Optuna storage."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base._optuna import study_ids, trial_id
from ..base.errors import StudyError, unknown
from ..base.option import option
from ..base.reading import path_of, read_named
from ..base.writing import as_data
from ..knobs.lossy import Lossy, lossy_in
from .measurement import Measurement, Status, Trial
from .records import trials_of
from .storage import LARGEST_LEDGER, contained, is_path, open_storage, open_study, quiet, read_journal, words
from .summary import judged

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage

MOST_RECORDS = 400_000
"""Largest number of records of a journal that is read without being continued: a short one takes about a kilobyte of memory."""


def distribution(values: Sequence[Any]) -> "BaseDistribution":
    """Returns an Optuna distribution that contains all `values`: of integers, of floats (both logarithmic if the ratio of
    successive values is constant), or categorical for everything else.

    Raises:
        ValueError: `values` is empty.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    # Optuna stores numbers as floats, which are inexact beyond 2 ** 53.
    numeric = all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 2**53 for value in values
    )
    if not values or not numeric:
        return CategoricalDistribution(tuple(values))
    ordered = sorted(set(values))
    low, high = ordered[0], ordered[-1]
    log = low > 0 and len(ordered) > 2
    log = log and all(math.isclose(b / a, ordered[1] / low, rel_tol=1e-9) for a, b in pairwise(ordered))
    kind = IntDistribution if all(isinstance(value, int) for value in ordered) else FloatDistribution
    return kind(low, high, log=log)


class Ledger:
    """The trials of one study, on disk after every change and in memory for fast reads.

    Each trial is one Optuna trial: the knobs are its parameters, the throughput is the value of an `ok` (state
    COMPLETE); `skipped` is PRUNED, any other status FAIL. Its user attributes are the whole configuration (`config`,
    its id in `config_id`, derived knobs also as `knob.<name>`), `sampler`, `predicted_throughput`,
    `predicted_memory_mib`, `status`, `reason` and `measurement`. The study's user attributes are the metadata and,
    since finished trials of Optuna cannot change, `remeasured`: trial -> throughputs, and `fallen`: trial -> the
    measurement of a failed re-measurement.

    Created by `Ledger.open` and `Ledger.load`. Thread-safe.
    """

    def __init__(
        self,
        storage: "BaseStorage",
        study_id: int,
        *,
        origin: str,
        make_config: Callable[[Mapping[str, Any]], Any],
        writable: bool = False,
        knobs: Mapping[str, Sequence[Any] | None] | None = None,
        lossy: Lossy | None = None,
    ) -> None:
        self._storage = storage if writable else None
        self._study_id = study_id
        self._origin = origin
        self._lossy = lossy or {}
        self._distributions = {name: distribution(values) for name, values in (knobs or {}).items() if values}
        self._lock = threading.RLock()
        stored = storage.get_all_trials(study_id, deepcopy=False)
        trials = trials_of(stored, storage.get_study_user_attrs(study_id), origin, make_config, self._lossy)
        self._trials: dict[int, Trial] = trials.trials
        self._first: dict[int, Measurement] = trials.first
        self._fallen: dict[int, Measurement] = trials.fallen
        self._ids = {frozen.number: trial_id(frozen) for frozen in stored}
        self.problems: tuple[str, ...] = tuple(trials.problems)
        """Parts of the study that were left out as invalid, in words."""
        if not writable:
            return
        if self.problems:
            raise StudyError(
                f"{'; '.join(self.problems[:3])}. A damaged run cannot be continued: restore {origin}, or start "
                f"with another {option('out')}"
            )
        for frozen in stored:
            # The process was killed between outcome and state.
            unfinished = frozen.number in self._trials and not frozen.state.is_finished()
            if unfinished and frozen.user_attrs.get("measurement"):
                outcome = self._first.get(frozen.number) or self._trials[frozen.number].measured
                self._store(self._ids[frozen.number], outcome)

    @classmethod
    def open(
        cls,
        source: "str | Path | BaseStorage | None",
        *,
        name: str,
        metadata: Mapping[str, Any],
        knobs: Mapping[str, Sequence[Any] | None] | None = None,
        make_config: Callable[[Mapping[str, Any]], Any] = dict,
        exist_ok: bool = True,
        lossy: Lossy | None = None,
    ) -> "Ledger":
        """Opens the ledger of the study `name`, created if it does not exist.

        An unfinished last record of a journal file is removed first, so the caller must have the lock of its folder.

        Args:
            source: path of a journal file, URL of an Optuna storage, such a storage, or None for memory only.
            name: the study's name.
            metadata: user attributes of the study; a study with different ones is refused.
            knobs: the values of each knob; None for a derived knob.
            make_config: makes a configuration from the stored mapping.
            exist_ok: True if the study may exist already.
            lossy: the lossy values of the knobs.

        Raises:
            StudyError: the storage cannot be opened or written, or contains a study of that name with other metadata,
                or one at all unless `exist_ok`.
            MissingDependency: the storage needs a package that is not installed.
        """
        origin = words(source)
        with quiet(), contained(origin):
            storage = open_storage(source, writable=True)
            study_id = open_study(storage, origin, name, as_data(metadata), exist_ok)
            return cls(
                storage, study_id, origin=origin, make_config=make_config, writable=True, knobs=knobs, lossy=lossy
            )

    @classmethod
    def load(
        cls,
        source: "str | Path | BaseStorage",
        *,
        name: str | None = None,
        make_config: Callable[[Mapping[str, Any]], Any] = dict,
        lossy: Lossy | None = None,
    ) -> "Ledger":
        """Reads the ledger of an existing study, also while another process writes it. Nothing is written.

        Args:
            source: as for `open`.
            name: the study's name; None if there is only one.
            make_config: as for `open`.
            lossy: as for `open`.

        Raises:
            StudyError: the storage or study does not exist, or it is damaged.
            MissingDependency: the storage needs a package that is not installed.
        """
        origin = words(source)
        if is_path(source):
            try:
                data = read_named(path_of(source), at_most=LARGEST_LEDGER)
            except FileNotFoundError:
                raise StudyError(f"there is no ledger at {origin}") from None
            except OSError as error:
                raise StudyError(f"cannot read {origin}: {error.strerror or error}") from error
            return cls.parse(data, origin=origin, name=name, make_config=make_config, lossy=lossy)
        with quiet(), contained(origin):
            storage = open_storage(source, writable=False)
            ledger = cls(storage, _study_id(name, storage, origin), origin=origin, make_config=make_config, lossy=lossy)
            if storage is not source:
                storage.remove_session()
        return ledger

    @classmethod
    def parse(
        cls,
        data: bytes,
        *,
        origin: str,
        name: str | None = None,
        make_config: Callable[[Mapping[str, Any]], Any] = dict,
        lossy: Lossy | None = None,
    ) -> "Ledger":
        """Reads the ledger in the contents of a study.log.

        Args:
            data: the file's contents.
            origin: its name, for messages.
            name: as for `load`.
            make_config: as for `open`.
            lossy: as for `open`.

        Raises:
            StudyError: it is damaged, has more than `MOST_RECORDS` records, or the study does not exist.
        """
        if data.count(b"\n") > MOST_RECORDS:
            raise StudyError(f"{origin} has more than {MOST_RECORDS:,} records")
        storage = read_journal(data, origin)
        return cls(storage, _study_id(name, storage, origin), origin=origin, make_config=make_config, lossy=lossy)

    def start(
        self,
        config: Any,
        *,
        sampler: str,
        predicted_throughput: float | None = None,
        predicted_memory_mib: float | None = None,
    ) -> Trial:
        """Stores a new pending trial of `config` and returns it.

        Raises:
            StudyError: it cannot be stored, or a knob has an unknown value.
        """
        import optuna

        values = as_data(config.to_dict() if hasattr(config, "to_dict") else dict(config))
        attributes: dict[str, Any] = {"config": values, "sampler": sampler}
        if hasattr(config, "id"):
            attributes["config_id"] = config.id
        predictions: dict[str, Any] = {
            "predicted_throughput": predicted_throughput,
            "predicted_memory_mib": predicted_memory_mib,
        }
        predictions = {name: None if value is None else float(value) for name, value in predictions.items()}
        attributes |= {name: value for name, value in predictions.items() if value is not None}
        attributes |= {f"knob.{knob}": value for knob, value in values.items() if knob not in self._distributions}
        parameters = {knob: value for knob, value in values.items() if knob in self._distributions}
        try:
            template = optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=parameters,
                distributions={knob: self._distributions[knob] for knob in parameters},
                user_attrs=attributes,
            )
        except ValueError as error:
            raise StudyError(f"configuration {values} does not belong to this study: {error}") from error
        with self._lock, contained(self._origin):
            storage = self._writable()
            trial_id = storage.create_new_trial(self._study_id, template)
            trial = Trial(
                number=storage.get_trial_number_from_id(trial_id),
                config=config,
                sampler=sampler,
                lossy=lossy_in(config, self._lossy),
                **predictions,
            )
            self._ids[trial.number] = trial_id
            self._trials[trial.number] = trial
        return trial

    def attempt(self, number: int, attempts: int) -> Trial:
        """Stores the number of attempts of the pending trial `number` and returns it.

        Raises:
            StudyError: the pending trial does not exist, or it cannot be stored.
        """
        with self._lock, contained(self._origin):
            storage = self._writable()
            trial = self._lookup(number)
            storage.set_trial_user_attr(self._ids[number], "attempts", attempts)
            self._trials[number] = replace(trial, attempts=attempts)
            return self._trials[number]

    def finish(self, number: int, measurement: Measurement) -> Trial:
        """Stores the outcome of the pending trial `number` and returns it.

        Raises:
            StudyError: the pending trial does not exist; an `ok` lacks a finite throughput; or the storage could not be
                written. In the last case `trials()` has the outcome nevertheless.
        """
        if measurement.ok and (measurement.throughput is None or not math.isfinite(measurement.throughput)):
            raise StudyError(
                f"trial {number} is ok with throughput {measurement.throughput}; it must be a finite number"
            )
        with self._lock:
            self._writable()
            trial = self._lookup(number)
            if not trial.pending:
                raise StudyError(f"trial {number} has already finished ({trial.measured.status})")
            # In memory first, so that `trials` has the outcome even if the storage fails.
            done = self._trials[number] = replace(trial, measurement=measurement)
            try:
                with contained(self._origin):
                    self._store(self._ids[number], measurement)
            except StudyError as error:
                raise StudyError(f"the outcome of trial {number} could not be stored: {error}") from error
        return done

    def remeasure(self, number: int, throughputs: Sequence[float], failure: Measurement | None = None) -> Trial:
        """Stores all re-measurements of trial `number`, replacing earlier ones, and returns the trial. Its first
        measurement must be `ok`.

        Args:
            number: of the trial.
            throughputs: of the successful re-measurements.
            failure: the failed re-measurement, if any, which then becomes the trial's measurement.

        Raises:
            StudyError: there is no such `ok` trial, or the storage could not be written (see `finish`).
        """
        with self._lock:
            self._writable()
            trial = self._lookup(number)
            initial = self._first.get(number, trial.measurement)
            if initial is None or not initial.ok:
                raise StudyError(f"trial {number} did not succeed, so it cannot be measured again")
            values = tuple(float(value) for value in throughputs)
            if not all(math.isfinite(value) for value in values):
                raise StudyError(f"re-measured throughputs must be finite numbers, but got {values}")
            if failure is not None:
                self._fallen[number] = failure
            else:
                self._fallen.pop(number, None)
            self._first[number] = initial
            done = self._trials[number] = judged(trial, values, failure, initial=initial)
            attributes = {
                "remeasured": {str(n): trial.remeasured for n, trial in self._trials.items() if trial.remeasured},
                "fallen": {str(n): measurement.to_dict() for n, measurement in self._fallen.items()},
            }
            try:
                with contained(self._origin):
                    for name, value in attributes.items():
                        self._writable().set_study_user_attr(self._study_id, name, value)
            except StudyError as error:
                raise StudyError(f"the re-measurement of trial {number} could not be stored: {error}") from error
        return done

    def trials(self) -> list[Trial]:
        """Returns all trials by number; pending ones have no measurement."""
        with self._lock:
            return list(self._trials.values())  # ordered: numbers only grow, and replacing keeps the position

    def pending(self) -> list[Trial]:
        """Returns the trials that have not ended, by number: after an interrupted run, those to run again."""
        return [trial for trial in self.trials() if trial.pending]

    def close(self) -> None:
        """Releases the connection. May be called twice."""
        if self._storage is not None:
            self._storage.remove_session()

    def _store(self, trial_id: int, measurement: Measurement) -> None:
        from optuna.trial import TrialState

        state, values = TrialState.FAIL, None
        if measurement.ok:
            state, values = TrialState.COMPLETE, [float(measurement.reached)]
        elif measurement.status is Status.SKIPPED:
            state = TrialState.PRUNED
        # The outcome is written first: the trial is finished with it even if the rest is lost.
        storage = self._writable()
        storage.set_trial_user_attr(trial_id, "measurement", measurement.to_dict())
        storage.set_trial_user_attr(trial_id, "status", str(measurement.status))
        if measurement.reason:
            storage.set_trial_user_attr(trial_id, "reason", measurement.reason)
        storage.set_trial_state_values(trial_id, state, values)

    def _lookup(self, number: int) -> Trial:
        if number not in self._trials:
            raise StudyError(f"there is no trial {number} among the {len(self._trials)} of {self._origin}")
        return self._trials[number]

    def _writable(self) -> "BaseStorage":
        """Returns the storage.

        Raises:
            StudyError: it was opened for reading only.
        """
        if self._storage is None:
            raise StudyError(f"{self._origin} was opened for reading only")
        return self._storage


def _study_id(name: str | None, storage: "BaseStorage", origin: str) -> int:
    """Returns the id of the requested study.

    Raises:
        StudyError: the study does not exist, or none is named and there are several.
    """
    ids = study_ids(storage)
    if name is None and len(ids) == 1:
        return next(iter(ids.values()))
    if name is None:
        listing = f"{len(ids)} studies; name one of them: {', '.join(ids)}" if ids else "no study"
        raise StudyError(f"{origin} contains {listing}")
    if name not in ids:
        raise StudyError(f"{origin}: {unknown('study', name, ids)}")
    return ids[name]
