"""Result of a dry run (status, throughput, memory, times), and the trial it belongs to."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..base.errors import UsageError, unknown
from .probe import Probe
from .schema import count, number, shortened


class Status(StrEnum):
    """How a trial ended. Every status but `ok` comes with a reason."""

    OK = "ok"
    """Ran to the end; `throughput` is set."""
    OOM = "oom"
    """Device or host memory ran out, in any form."""
    TIMEOUT = "timeout"
    """Exceeded its time limit and was killed."""
    CRASH = "crash"
    """Any other failure; `reason` is the last exception or the signal."""
    WRONG = "wrong"
    """Ran, but its results differ from the reference or are not finite."""
    SKIPPED = "skipped"
    """Never run: a known or an emulated OOM implies that it does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """Measurements of one rank of a trial."""

    rank: int
    """Global rank, 0 to world size - 1."""
    status: Status
    reason: str = ""
    """Why, when not `ok`."""
    step_ms: float | None = None
    """Median time of one optimizer step, ms."""
    peak_memory_mib: float | None = None
    """Peak memory: CUDA reserved bytes, or the growth of the process's resident set on a CPU, MiB."""
    peak_allocated_mib: float | None = None
    """CUDA: peak of the bytes in live tensors, MiB. None on a CPU."""
    build_memory_mib: float | None = None
    """Peak memory until model and optimizer were built, which `peak_memory_mib` includes, MiB."""
    outside_mib: float | None = None
    """CUDA: device memory of the rank outside the allocator (context, libraries, NCCL), MiB. None on a CPU."""
    allocation_retries: int = 0
    """CUDA: number of times the allocator flushed its cache during the steps; above 0 the trial ran close to OOM."""

    def __post_init__(self) -> None:
        _settle(self)


_STATUSES = frozenset(Status)
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that JSON cannot represent."""
_MOST_ELEMENTS = 1 << 16  # of a list in an untrusted ledger
_LONGEST_TEXT = 100_000
"""Characters of a text that are kept."""
Convert = Callable[[str, Any], Any]
"""Converts the value of a field, given its name and the value. Raises UsageError if the value has another type."""


@cache
def _converters(cls: Any) -> dict[str, Convert]:
    """Returns a function for each stored field of a dataclass."""
    kinds = get_type_hints(cls)
    return {field.name: _converter(kinds[field.name]) for field in fields(cls) if field.metadata.get("stored", True)}


def _converter(kind: Any) -> Convert:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        convert = _converter(arguments[0])
        return lambda name, value: None if value is None else convert(name, value)
    if origin is tuple:
        convert = _converter(arguments[0])
        return lambda name, value: tuple(convert(name, element) for element in _checked_list(name, value))
    if is_dataclass(kind):
        cls: Any = kind
        return lambda name, value: value if isinstance(value, cls) else _read(cls, name, value)
    return {str: _text, int: _count, float: _number, Status: _status}.get(kind, _mapping)


def _read(cls: Any, name: str, data: Any) -> Any:
    """Returns an instance of a dataclass, from the mapping that `_plain` makes. Unknown keys are ignored."""
    data = _mapping(name, data)
    values = {key: convert(key, data[key]) for key, convert in _converters(cls).items() if key in data}
    missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in values]
    if missing:
        raise UsageError(f"{name} has no {', '.join(missing)}")
    return cls(**values)


def _settle(instance: Any) -> None:
    """Converts the fields of a new instance, which may come from a user's function."""
    cls: Any = type(instance)
    for name, convert in _converters(cls).items():
        value = getattr(instance, name)
        if (converted := convert(name, value)) is not value:
            object.__setattr__(instance, name, converted)


def _plain(value: Any) -> Any:
    """Returns a value as JSON-ready data."""
    if is_dataclass(value):
        cls: Any = type(value)
        return {name: _plain(getattr(value, name)) for name in _converters(cls)}
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    return dict(value) if isinstance(value, Mapping) else to_json(value)


def _status(name: str, value: Any) -> Status:
    if not isinstance(value, str) or value not in _STATUSES:
        raise UsageError(unknown("status", shortened(value).strip("'"), Status))
    return Status(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text, but got {shortened(value)}")
    return value if len(value) <= _LONGEST_TEXT else value[: _LONGEST_TEXT - 1] + "…"


def _count(name: str, value: Any) -> int:
    value = plain_scalar(value)
    if not count(value):
        raise UsageError(f"{name} must be a whole number, but got {shortened(value)}")
    return value


def _number(name: str, value: Any) -> float:
    value = plain_scalar(value)
    if isinstance(value, str):
        value = _WORDS.get(value, value)
    if not isinstance(value, float) and not number(value):
        raise UsageError(f"{name} must be a number, but got {shortened(value)}")
    return value


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping, but got {shortened(value)}")
    return value


def _checked_list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) > _MOST_ELEMENTS:
        raise UsageError(f"{name} must be a list, but got {shortened(value)}")
    return value


def plain_scalar(value: Any) -> Any:
    """Converts a scalar of numpy or torch, and a member of a StrEnum, to Python's."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str):
        return str(value)
    return float(value) if isinstance(value, float) else value


def to_json(value: Any) -> Any:
    """Converts a scalar as `plain_scalar` does, and a number that JSON cannot represent to text."""
    value = plain_scalar(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Outcome of one dry run. Quantities that were not reached are None.

    Raises:
        UsageError: a field has another type.
    """

    status: Status
    reason: str = ""
    """Reason of the status, in one line; empty for a plain `ok`."""
    unconfirmed: str = ""
    """How the trial failed when it was measured again, if its first measurement counts nevertheless."""
    throughput: float | None = None
    """The value that the search maximises, in `unit`; higher is better."""
    unit: str = ""
    """Unit of `throughput`: `tokens/s`, `samples/s`, or empty for a callable's own number."""
    told: str = ""
    """Further metrics that a command was asked to report, such as `p99_ms = 120`."""
    samples_per_second: float | None = None
    """Sequences (or images) per second over all devices."""
    tokens_per_second: float | None = None
    """Tokens per second over all devices."""
    step_ms: float | None = None
    """Median time of one optimizer step on the slowest rank, ms."""
    step_ms_spread: float | None = None
    """Half-width of the 95 % confidence interval of `step_ms`, ms."""
    throughput_spread: float | None = None
    """Half-width of the 95 % confidence interval of `throughput`, in its unit, if there is no step time."""
    peak_memory_mib: float | None = None
    """Largest peak memory of a rank, MiB; for an `oom`, allocated plus requested memory, if known."""
    memory_limit_mib: float | None = None
    """Memory available to a rank, MiB."""
    tflops_per_device: float | None = None
    """Model FLOPs (recomputation not counted) per second and device, 1e12."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1: `tflops_per_device` over the device's peak at this precision."""
    devices: int | None = None
    """Devices the trial ran on."""
    expert_load: float | None = None
    """Rows of the busiest expert over the mean, averaged over the model's mixtures, on the probe's samples; None without
    experts."""
    expert_dropped: float | None = None
    """Share of rows that experts dropped in training because of their capacity, 0 to 1; None without one."""
    loss: float | None = None
    """Loss of the first step."""
    probe: Probe | None = None
    """Results on one fixed batch, for the comparison with the reference."""
    samples_per_step: int | None = None
    """Samples of one optimizer step over all devices."""
    started: float | None = None
    """Unix time at which the trial started, s."""
    seconds_total: float | None = None
    """From request to result, s."""
    seconds_overhead: float | None = None
    """`seconds_total` less build, warm-up and measurement, s."""
    seconds_build: float | None = None
    """Model, schedule, weights, optimizer and compilation, s."""
    seconds_compile: float | None = None
    """The part of `seconds_build` spent in steps in which some rank compiled, s."""
    seconds_warmup: float | None = None
    """Steps before the step time became steady, s."""
    seconds_measure: float | None = None
    """The measured steps, s."""
    emulated_ranks: str = ""
    """Ranks that ran alone on one device in place of all, as `0,1`; empty for a trial of all ranks."""
    seconds_modelled: float | None = None
    """The part of an emulated step that was not measured: waits for communication and other stages, s."""
    observed: Mapping[str, Any] | None = field(default=None, hash=False)
    """Facts observed in a command's training (`observed_facts` of `runners/command/comparison.py`); None otherwise."""
    log: str = ""
    """Path of the log of all ranks' output, relative to the run's folder."""
    ranks: tuple[RankReport, ...] = ()
    """One report per rank that reported."""

    def __post_init__(self) -> None:
        _settle(self)

    @property
    def ok(self) -> bool:
        """True if the trial succeeded."""
        return self.status is Status.OK

    @property
    def did_not_fit(self) -> bool:
        """True if memory ran out."""
        return self.status is Status.OOM

    @property
    def reached(self) -> float:
        """Throughput of a successful trial.

        Raises:
            RuntimeError: the trial has none.
        """
        if self.throughput is None:
            raise RuntimeError(f"a trial that ended as {self.status} has no throughput")
        return self.throughput

    @property
    def span(self) -> tuple[float, float] | None:
        """Start and end of the trial, Unix time, s; None if unknown."""
        if self.started is None or self.seconds_total is None:
            return None
        return self.started, self.started + self.seconds_total

    @property
    def spread(self) -> float | None:
        """Relative half-width of the 95 % interval of throughput and step time; None if unknown."""
        for value, half in ((self.step_ms, self.step_ms_spread), (self.throughput, self.throughput_spread)):
            if value and half is not None:
                return half / abs(value)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready mapping, without fields that are None or empty.

        Numbers are Python numbers; those that JSON cannot represent are the texts `nan`, `inf`, `-inf`.
        """
        return {name: value for name, value in _plain(self).items() if value not in (None, "", [])}

    def figures(self) -> dict[str, Any]:
        """Returns `to_dict` for people and other programs: without the probe, a hundred numbers that only detect `wrong`."""
        return {name: value for name, value in self.to_dict().items() if name != "probe"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Measurement":
        """Inverse of `to_dict`; unknown keys are ignored so that newer ledgers can be read.

        Raises:
            UsageError: a field is of another type, or the status is missing or unknown.
        """
        measurement: Measurement = _read(cls, "the measurement", data)
        return measurement


DEFAULT, USER, FALLBACK, REFINEMENT, PLANNED = "default", "user", "fallback", "layerwise", "estimate"
"""Values of `Trial.sampler` that do not name a sampler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A configuration, the sampler that proposed it, its prediction, and its measurement."""

    number: int
    """Position in the study, from 0."""
    config: Any
    """The tried `Config`."""
    sampler: str = ""
    """Name of the sampler that proposed it; otherwise its origin: `DEFAULT` for the default configuration, `USER` for one
    that the user gave, `FALLBACK` for the one tried after the default failed, `REFINEMENT` for the refined winner,
    `PLANNED` for one that was predicted and not run.
    """
    attempts: int = 1
    """Number of times it was started: by processes that ended during it and by the present one."""
    predicted_throughput: float | None = None
    """Estimated throughput before the run, in the measurement's unit."""
    predicted_memory_mib: float | None = None
    """Estimated peak memory before the run, MiB."""
    measurement: Measurement | None = None
    """The outcome; None while the trial is pending. After re-measurements, the combined result
    (`again.measured_again`), so that each configuration has a single throughput.
    """
    remeasured: tuple[float, ...] = ()
    """Throughputs of the re-measurements at the end of the search."""
    first: float | None = None
    """Throughput of the first measurement, if `measurement` is the result of re-measurements."""
    lossy: tuple[str, ...] = ()
    """Knobs whose values trade accuracy for speed."""

    @property
    def pending(self) -> bool:
        """True if the trial has not ended."""
        return self.measurement is None

    @property
    def skipped(self) -> bool:
        """True if the trial was not run, because it was known to fail."""
        return self.measurement is not None and self.measurement.status is Status.SKIPPED

    @property
    def measured(self) -> Measurement:
        """Outcome of a finished trial.

        Raises:
            RuntimeError: the trial is pending.
        """
        if self.measurement is None:
            raise RuntimeError(f"trial {self.number} has not ended yet")
        return self.measurement

    @property
    def throughput(self) -> float:
        """Throughput of an `ok` trial, in the measurement's unit.

        Raises:
            RuntimeError: the trial is pending or failed.
        """
        return self.measured.reached

    @property
    def ok(self) -> bool:
        """True if the trial succeeded."""
        return self.measurement is not None and self.measurement.ok
