"""Reads study.log without Optuna: replays its records and converts them to trials.

The records are those of Optuna's JournalStorage (optuna/storages/journal/_storage.py): one line of JSON each; trials
and studies are numbered in order of creation. Nothing is written, locked or imported.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..base._optuna import trial_id
from ..base.errors import StudyError, UsageError
from ..base.option import option
from ..base.reading import Malformed, parse_json
from ..knobs.lossy import Lossy, lossy_in
from .measurement import Measurement, Trial
from .schema import count, number, scalar, shortened, text
from .summary import judged

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

LARGEST_LEDGER = 32 << 20
"""Largest study.log that is read, bytes."""
LONGEST_RECORD = 2 << 20
"""Longest line of it, bytes."""
MOST_RECORDS = 400_000  # more than ten for each of `MOST_TRIALS`
MOST_TRIALS = 30_000
"""Largest number of trials of a run that is read."""

_CREATE_STUDY, _DELETE_STUDY, _STUDY_ATTRIBUTE = 0, 1, 2
_CREATE_TRIAL, _STATE, _TRIAL_ATTRIBUTE = 4, 6, 8
_KNOWN = range(11)  # operations of Optuna's journal up to 5.0
_FINISHED = (1, 2, 3)  # optuna.trial.TrialState: COMPLETE, PRUNED, FAIL
_KEPT = frozenset({"config", "sampler", "attempts", "predicted_throughput", "predicted_memory_mib", "measurement"})


@dataclass(slots=True)
class StoredTrial:
    """A trial in a storage."""

    id: int
    """Unique in the storage, over all its studies."""
    number: int
    """Unique in its study, from 0."""
    attributes: dict[str, Any]
    finished: bool = False
    """True if it cannot change any more."""


@dataclass(slots=True)
class StoredStudy:
    """A study in a storage."""

    name: str
    attributes: dict[str, Any] = field(default_factory=dict)
    entries: list[StoredTrial] = field(default_factory=list)


def replay(data: bytes, origin: str) -> dict[int, StoredStudy]:
    """Returns the studies in the contents of a journal, by id. An unfinished last line is ignored, since another process
    may be writing it.

    Args:
        data: the journal's contents.
        origin: its name, for messages.

    Raises:
        StudyError: a line is not a record of a study, or there are more or longer ones than `MOST_RECORDS`,
            `LONGEST_RECORD` and `MOST_TRIALS`.
    """
    studies: dict[int, StoredStudy] = {}
    by_id: list[StoredTrial | None] = []
    created = 0
    for place, line in enumerate(io.BytesIO(data), start=1):
        if not line.endswith(b"\n"):
            break
        if place > MOST_RECORDS:
            raise StudyError(f"{origin} has more than {MOST_RECORDS:,} records")
        try:
            if len(line) > LONGEST_RECORD:
                raise Malformed(f"it is longer than {LONGEST_RECORD >> 20} MiB")
            record = parse_json(line)
            kind = _field(record, "op_code", int)
            if kind not in _KNOWN:
                raise Malformed(f"it has the unknown operation {shortened(kind)}")
            if kind == _CREATE_STUDY:
                name = _field(record, "study_name", str)
                # Optuna refuses a second study of the same name, without a number for it.
                if all(study.name != name for study in studies.values()):
                    studies[created] = StoredStudy(name)
                    created += 1
            elif kind == _DELETE_STUDY:
                studies.pop(_field(record, "study_id", int), None)
            elif kind == _STUDY_ATTRIBUTE:
                study, attributes = studies.get(_field(record, "study_id", int)), _field(record, "user_attr", dict)
                if study is not None:
                    study.attributes.update(attributes)
            elif kind == _CREATE_TRIAL:
                study = studies.get(_field(record, "study_id", int))
                if study is None:  # a deleted one; Optuna gives its new trials no number
                    continue
                if len(by_id) >= MOST_TRIALS:
                    raise StudyError(f"{origin} has more than {MOST_TRIALS:,} trials")
                entry = StoredTrial(len(by_id), len(study.entries), {}, record.get("state") in _FINISHED)
                _keep(entry, record.get("user_attrs", {}))
                study.entries.append(entry)
                by_id.append(entry)
            elif kind in (_STATE, _TRIAL_ATTRIBUTE):
                trial_index = _field(record, "trial_id", int)
                if not 0 <= trial_index < len(by_id) or by_id[trial_index].finished:
                    continue
                if kind == _STATE:
                    by_id[trial_index].finished = _field(record, "state", int) in _FINISHED
                else:
                    _keep(by_id[trial_index], _field(record, "user_attr", dict))
        except Malformed as error:
            raise StudyError(
                f"line {place} of {origin} is not a record of a study ({error}): {line[:60]!r}; "
                f"restore the file, delete that line, or start with another {option('out')}"
            ) from error
    return studies


def _field(record: Any, name: str, kind: type) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Malformed(f"it has no {name}" if value is None else f"its {name} is {shortened(value)}")
    return value


def _keep(entry: StoredTrial, attributes: Any) -> None:
    if isinstance(attributes, dict):
        entry.attributes.update((name, value) for name, value in attributes.items() if name in _KEPT)


def stored(storage: "BaseStorage", study_id: int, name: str) -> StoredStudy:
    """Reads a study of an Optuna storage."""
    return StoredStudy(
        name,
        storage.get_study_user_attrs(study_id),
        [
            StoredTrial(trial_id(trial), trial.number, trial.user_attrs, trial.state.is_finished())
            for trial in storage.get_all_trials(study_id, deepcopy=False)
        ],
    )


@dataclass(slots=True)
class StudyTrials:
    """The trials of a study."""

    trials: dict[int, Trial] = field(default_factory=dict)
    """By number, with their re-measurements applied."""
    first: dict[int, Measurement] = field(default_factory=dict)
    """The first measurements of trials that were measured again."""
    fallen: dict[int, Measurement] = field(default_factory=dict)
    """Failed re-measurements."""
    problems: list[str] = field(default_factory=list)
    """Parts that were left out, in words."""


def trials_of(
    study: StoredStudy, origin: str, make_config: Callable[[Mapping[str, Any]], Any], lossy: Lossy
) -> StudyTrials:
    """Returns the trials of a study. Invalid trials are left out and listed in `problems`. Trials that others
    enqueued, through Optuna's dashboard or API, are ignored.
    """
    study_trials = StudyTrials()
    remeasured: dict[int, tuple[float, ...]] = {}
    for key, value in _numbered(study.attributes.get("remeasured")):
        if isinstance(value, list | tuple) and all(number(throughput) for throughput in value):
            remeasured[key] = tuple(map(float, value))
        else:
            study_trials.problems.append(
                f"{origin}: the re-measurements of trial {key} are {shortened(value)}; left out"
            )
    for key, value in _numbered(study.attributes.get("fallen")):
        try:
            study_trials.fallen[key] = Measurement.from_dict(value)
        except UsageError as error:
            study_trials.problems.append(f"{origin}: the re-measurement of trial {key}: {error}; left out")
    for entry in study.entries:
        if "config" not in entry.attributes:
            continue
        try:
            trial = _trial(entry, make_config, lossy)
        except UsageError as error:
            study_trials.problems.append(f"{origin}: trial {entry.number}: {error}; left out")
            continue
        values = remeasured.get(trial.number, ())
        if trial.ok and (values or trial.number in study_trials.fallen):
            study_trials.first[trial.number] = trial.measured
            trial = judged(trial, values, study_trials.fallen.get(trial.number))
        study_trials.trials[trial.number] = trial
    return study_trials


def _numbered(attribute: Any) -> list[tuple[int, Any]]:
    entries = attribute.items() if isinstance(attribute, Mapping) else ()
    # Numbers of up to 17 digits fit int64.
    return [(int(key), value) for key, value in entries if str(key).isdecimal() and len(str(key)) < 18]


def _trial(entry: StoredTrial, make_config: Callable[[Mapping[str, Any]], Any], lossy: Lossy) -> Trial:
    """Converts an entry to a trial.

    Raises:
        UsageError: an attribute has an invalid type.
    """
    values = entry.attributes["config"]
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"its configuration is {shortened(values)}")
    attributes: dict[str, Any] = {
        "sampler": "",
        "attempts": 1,
        "predicted_throughput": None,
        "predicted_memory_mib": None,
    }
    attributes |= {name: entry.attributes[name] for name in attributes if name in entry.attributes}
    valid: dict[str, Callable[[Any], bool]] = {"sampler": text, "attempts": count}
    for name, value in attributes.items():
        if not valid.get(name, lambda value: value is None or number(value))(value):
            raise UsageError(f"its {name} is {shortened(value)}")
    for name, value in values.items():
        if not scalar(value):
            raise UsageError(f"the knob {shortened(name)} is {shortened(value)}")
    outcome = entry.attributes.get("measurement")
    measurement = Measurement.from_dict(outcome) if outcome else None
    if measurement is not None and measurement.ok and not number(measurement.throughput):
        raise UsageError("it is ok, but without a throughput")
    config = make_config(values)
    return Trial(
        number=entry.number, config=config, measurement=measurement, lossy=lossy_in(config, lossy), **attributes
    )
