"""study.log read without Optuna: its records replayed, and what they say made into trials.

The records are those of Optuna's JournalStorage (optuna/storages/journal/_storage.py): a line of JSON each, trials and
studies numbered in the order in which they were created. Nothing is written, locked or imported for it.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..base._optuna import trial_id
from ..base.errors import StudyError, UsageError
from ..base.reading import Malformed, parse_json
from ..knobs.lossy import Lossy, lossy_in
from .again import judged
from .measurement import Measurement, Trial
from .schema import count, number, scalar, shown

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

LARGEST_LEDGER = 32 << 20
"""Bytes of a study.log that is read."""
LONGEST_RECORD = 2 << 20
"""Bytes of one line of it."""
MOST_RECORDS = 400_000
MOST_TRIALS = 30_000
"""Trials of a run that is read."""

_CREATE_STUDY, _DELETE_STUDY, _STUDY_ATTRIBUTE = 0, 1, 2
_CREATE_TRIAL, _STATE, _TRIAL_ATTRIBUTE = 4, 6, 8
_KNOWN = range(11)
_FINISHED = (1, 2, 3)  # optuna.trial.TrialState: COMPLETE, PRUNED, FAIL
_KEPT = frozenset({"config", "sampler", "attempts", "predicted_throughput", "predicted_memory_mib", "measurement"})


@dataclass(slots=True)
class Entry:
    """A trial as a storage keeps it."""

    id: int
    """In the storage, over all its studies."""
    number: int
    """In its study, from 0."""
    attributes: dict[str, Any]
    """Its user attributes."""
    finished: bool = False
    """Whether it can change no more."""


@dataclass(slots=True)
class Recorded:
    """A study as a storage keeps it."""

    name: str
    attributes: dict[str, Any] = field(default_factory=dict)
    """Its user attributes."""
    entries: list[Entry] = field(default_factory=list)
    """Its trials, in the order of their numbers."""


def replay(data: bytes, where: str) -> dict[int, Recorded]:
    """The studies of a journal by their ids. An unfinished last line is one that is being written, and no fault.

    Args:
        data: the file's contents.
        where: its name, for messages.

    Raises:
        StudyError: a line is not a record of a study, or there are more or longer ones than `MOST_RECORDS`,
            `LONGEST_RECORD` and `MOST_TRIALS`.
    """
    studies: dict[int, Recorded] = {}
    made: list[Entry | None] = []
    created = 0
    for place, line in enumerate(io.BytesIO(data), start=1):
        if not line.endswith(b"\n"):
            break
        if place > MOST_RECORDS:
            raise StudyError(f"{where} has more than {MOST_RECORDS:,} records")
        try:
            if len(line) > LONGEST_RECORD:
                raise Malformed(f"it is longer than {LONGEST_RECORD >> 20} MiB")
            record = parse_json(line)
            kind = _field(record, "op_code", int)
            if kind not in _KNOWN:
                raise Malformed(f"it has the unknown operation {shown(kind)}")
            if kind == _CREATE_STUDY:
                name = _field(record, "study_name", str)
                if all(each.name != name for each in studies.values()):
                    studies[created] = Recorded(name)
                    created += 1
            elif kind == _DELETE_STUDY:
                studies.pop(_field(record, "study_id", int), None)
            elif kind == _STUDY_ATTRIBUTE:
                study, attributes = studies.get(_field(record, "study_id", int)), _field(record, "user_attr", dict)
                if study is not None:
                    study.attributes.update(attributes)
            elif kind == _CREATE_TRIAL:
                study = studies.get(_field(record, "study_id", int))
                if study is None:
                    continue
                if len(made) >= MOST_TRIALS:
                    raise StudyError(f"{where} has more than {MOST_TRIALS:,} trials")
                entry = Entry(len(made), len(study.entries), {}, record.get("state") in _FINISHED)
                _keep(entry, record.get("user_attrs", {}))
                study.entries.append(entry)
                made.append(entry)
            elif kind in (_STATE, _TRIAL_ATTRIBUTE):
                at = _field(record, "trial_id", int)
                if not 0 <= at < len(made) or made[at].finished:
                    continue
                if kind == _STATE:
                    made[at].finished = _field(record, "state", int) in _FINISHED
                else:
                    _keep(made[at], _field(record, "user_attr", dict))
        except Malformed as error:
            raise StudyError(
                f"line {place} of {where} is not a record of a study ({error}): {line[:60]!r}; "
                "restore the file, delete that line, or start with another --out"
            ) from error
    return studies


def _field(record: Any, name: str, kind: type) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Malformed(f"it has no {name}" if value is None else f"its {name} is {shown(value)}")
    return value


def _keep(entry: Entry, attributes: Any) -> None:
    if isinstance(attributes, dict):
        entry.attributes.update((name, value) for name, value in attributes.items() if name in _KEPT)


def stored(storage: "BaseStorage", study_id: int, name: str) -> Recorded:
    """A study of an Optuna storage."""
    return Recorded(
        name,
        storage.get_study_user_attrs(study_id),
        [
            Entry(trial_id(each), each.number, each.user_attrs, each.state.is_finished())
            for each in storage.get_all_trials(study_id, deepcopy=False)
        ],
    )


@dataclass(slots=True)
class Told:
    """The trials that a study tells of."""

    trials: dict[int, Trial] = field(default_factory=dict)
    """By their numbers, judged by their re-measurements."""
    first: dict[int, Measurement] = field(default_factory=dict)
    """The first measurements of those that were measured again."""
    fallen: dict[int, Measurement] = field(default_factory=dict)
    """The re-measurements that did not end well."""
    problems: list[str] = field(default_factory=list)
    """What was left out, in words."""


def trials_of(study: Recorded, where: str, make_config: Callable[[Mapping[str, Any]], Any], lossy: Lossy) -> Told:
    """The trials of a study; one that makes no sense is left out, as `problems` say. What somebody else enqueued, through
    Optuna's dashboard or its API, is none."""
    told = Told()
    again: dict[int, tuple[float, ...]] = {}
    for key, value in _numbered(study.attributes.get("remeasured")):
        if isinstance(value, list | tuple) and all(number(each) for each in value):
            again[key] = tuple(map(float, value))
        else:
            told.problems.append(f"{where}: the re-measurements of trial {key} are {shown(value)}; left out")
    for key, value in _numbered(study.attributes.get("fallen")):
        try:
            told.fallen[key] = Measurement.from_dict(value)
        except UsageError as error:
            told.problems.append(f"{where}: the re-measurement of trial {key}: {error}; left out")
    for entry in study.entries:
        if "config" not in entry.attributes:
            continue
        try:
            trial = _trial(entry, make_config, lossy)
        except UsageError as error:
            told.problems.append(f"{where}: trial {entry.number}: {error}; left out")
            continue
        values = again.get(trial.number, ())
        if trial.ok and (values or trial.number in told.fallen):
            told.first[trial.number] = trial.measured
            trial = judged(trial, values, told.fallen.get(trial.number))
        told.trials[trial.number] = trial
    return told


def _numbered(given: Any) -> list[tuple[int, Any]]:
    found = given.items() if isinstance(given, Mapping) else ()
    return [(int(key), value) for key, value in found if str(key).isdecimal() and len(str(key)) < 18]


def _trial(entry: Entry, make_config: Callable[[Mapping[str, Any]], Any], lossy: Lossy) -> Trial:
    """The trial of an entry.

    Raises:
        UsageError: its attributes are of other types than a trial's.
    """
    values = entry.attributes["config"]
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"its configuration is {shown(values)}")
    for name, value in values.items():
        if not scalar(value):
            raise UsageError(f"the knob {shown(name)} is {shown(value)}")
    predicted = {name: entry.attributes.get(name) for name in ("predicted_throughput", "predicted_memory_mib")}
    for name, value in predicted.items():
        if value is not None and not number(value):
            raise UsageError(f"its {name} is {shown(value)}")
    sampler = entry.attributes.get("sampler", "")
    if not isinstance(sampler, str):
        raise UsageError(f"its sampler is {shown(sampler)}")
    attempts = entry.attributes.get("attempts", 1)
    if not count(attempts):
        raise UsageError(f"its number of attempts is {shown(attempts)}")
    outcome = entry.attributes.get("measurement")
    measurement = Measurement.from_dict(outcome) if outcome else None
    if measurement is not None and measurement.ok and not number(measurement.throughput):
        raise UsageError("it is ok, but without a throughput")
    config = make_config(values)
    return Trial(
        number=entry.number,
        config=config,
        sampler=sampler,
        attempts=attempts,
        measurement=measurement,
        lossy=lossy_in(config, lossy),
        predicted_throughput=predicted["predicted_throughput"],
        predicted_memory_mib=predicted["predicted_memory_mib"],
    )
