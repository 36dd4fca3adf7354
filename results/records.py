"""Converts the trials of an Optuna storage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..base.errors import UsageError
from ..knobs.lossy import Lossy, lossy_in
from .measurement import Measurement, Trial
from .schema import count, number, scalar, shortened, text
from .summary import judged

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


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
    stored: "Sequence[FrozenTrial]",
    attributes: Mapping[str, Any],
    origin: str,
    make_config: Callable[[Mapping[str, Any]], Any],
    lossy: Lossy,
) -> StudyTrials:
    """Returns the trials of a study. Invalid trials are left out and listed in `problems`. Trials that others
    enqueued, through Optuna's dashboard or API, are ignored.

    Args:
        stored: the trials in Optuna's storage.
        attributes: user attributes of the study.
        origin: name of the storage, for messages.
        make_config: makes a configuration from the stored mapping.
        lossy: the lossy values of the knobs.
    """
    study_trials = StudyTrials()
    remeasured: dict[int, tuple[float, ...]] = {}
    for key, value in _numbered(attributes.get("remeasured")):
        if isinstance(value, list | tuple) and all(number(throughput) for throughput in value):
            remeasured[key] = tuple(map(float, value))
        else:
            study_trials.problems.append(
                f"{origin}: the re-measurements of trial {key} are {shortened(value)}; left out"
            )
    for key, value in _numbered(attributes.get("fallen")):
        try:
            study_trials.fallen[key] = Measurement.from_dict(value)
        except UsageError as error:
            study_trials.problems.append(f"{origin}: the re-measurement of trial {key}: {error}; left out")
    for frozen in stored:
        if "config" not in frozen.user_attrs:
            continue
        try:
            trial = _trial(frozen, make_config, lossy)
        except UsageError as error:
            study_trials.problems.append(f"{origin}: trial {frozen.number}: {error}; left out")
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


def _trial(frozen: "FrozenTrial", make_config: Callable[[Mapping[str, Any]], Any], lossy: Lossy) -> Trial:
    """Converts a trial of Optuna.

    Raises:
        UsageError: an attribute has an invalid type.
    """
    values = frozen.user_attrs["config"]
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"its configuration is {shortened(values)}")
    attributes: dict[str, Any] = {
        "sampler": "",
        "attempts": 1,
        "predicted_throughput": None,
        "predicted_memory_mib": None,
    }
    attributes |= {name: frozen.user_attrs[name] for name in attributes if name in frozen.user_attrs}
    valid: dict[str, Callable[[Any], bool]] = {"sampler": text, "attempts": count}
    for name, value in attributes.items():
        if not valid.get(name, lambda value: value is None or number(value))(value):
            raise UsageError(f"its {name} is {shortened(value)}")
    for name, value in values.items():
        if not scalar(value):
            raise UsageError(f"the knob {shortened(name)} is {shortened(value)}")
    outcome = frozen.user_attrs.get("measurement")
    measurement = Measurement.from_dict(outcome) if outcome else None
    if measurement is not None and measurement.ok and not number(measurement.throughput):
        raise UsageError("it is ok, but without a throughput")
    config = make_config(values)
    return Trial(
        number=frozen.number, config=config, measurement=measurement, lossy=lossy_in(config, lossy), **attributes
    )
