"""Result of a dry run (status, throughput, memory, times), and the trial it belongs to."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any

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
    clock_mhz: float | None = None
    """CUDA: median clock of the multiprocessors during the measurement, MHz."""
    power_w: float | None = None
    """CUDA: median power draw of the device during the measurement, W."""
    allocation_retries: int = 0
    """CUDA: number of times the allocator flushed its cache during the steps; above 0 the trial ran close to OOM."""

    def __post_init__(self) -> None:
        _check_types(self, _names(RankReport))


_STATUSES = frozenset(Status)
_TEXTS = frozenset({"reason", "unconfirmed", "unit", "log", "told", "emulated_ranks"})
_COUNTS = frozenset({"rank", "allocation_retries", "devices", "samples_per_step"})
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that JSON cannot represent."""
_NESTED = frozenset({"ranks", "probe", "observed"})
_MOST_RANKS = 1 << 16  # reports of ranks that are read from an untrusted ledger
_LONGEST_TEXT = 100_000
"""Characters of a text that are kept."""


@cache
def _names(cls: "type[Measurement | RankReport]") -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def plain_scalar(value: Any) -> Any:
    """Converts a scalar of numpy or torch, and a member of a StrEnum, to Python's."""
    if not isinstance(value, (str, int, float, type(None))) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str):
        return str(value)
    return float(value) if isinstance(value, float) else value


def to_json(value: Any) -> Any:
    """Converts a scalar as `plain_scalar` does, and a number that JSON cannot represent to text."""
    value = plain_scalar(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(cls: type, data: Any) -> dict[str, Any]:
    """Returns the fields of `cls` in `data`, with `nan`, `inf` and `-inf` converted to numbers.

    Raises:
        UsageError: the data is not a mapping, or has no status.
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"a measurement is a mapping, but got {shortened(data)}")
    if "status" not in data:
        raise UsageError("the measurement has no status")
    values = {name: data[name] for name in _names(cls) if name in data}
    for name, value in values.items():
        if isinstance(value, str) and value in _WORDS and name not in _TEXTS:
            values[name] = _WORDS[value]
    return values


def _check_types(instance: "Measurement | RankReport", names: Iterable[str]) -> None:
    """Checks the type of every field, converts numpy and torch numbers to Python's, and cuts long texts.

    Raises:
        UsageError: a field is of another type.
    """
    for name in names:
        value = original = getattr(instance, name)
        if name == "status":
            # A user's own function may return "ok" for Status.OK.
            if not isinstance(value, str) or value not in _STATUSES:
                raise UsageError(unknown("status", shortened(value).strip("'"), Status))
            value = Status(value)
        elif name in _TEXTS:
            if not isinstance(value, str):
                raise UsageError(f"{name} must be a text, but got {shortened(value)}")
            value = value if len(value) <= _LONGEST_TEXT else value[: _LONGEST_TEXT - 1] + "…"
        elif name not in _NESTED and value is not None:
            value = _number(name, value)
        if value is not original:
            object.__setattr__(instance, name, value)


def _number(name: str, value: Any) -> float | int:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if name in _COUNTS:
        if not count(value):
            raise UsageError(f"{name} must be a whole number, but got {shortened(value)}")
    elif not number(value) and not (isinstance(value, float) and not math.isfinite(value)):
        raise UsageError(f"{name} must be a number, but got {shortened(value)}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Outcome of one dry run. Quantities that were not reached are None."""

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
        _check_types(self, _names(Measurement))
        if not isinstance(self.probe, Probe | None):
            raise UsageError(f"probe must be a redline.results.probe.Probe, but got {shortened(self.probe)}")
        if not isinstance(self.ranks, tuple) or not all(isinstance(report, RankReport) for report in self.ranks):
            raise UsageError(f"ranks must be a tuple of RankReport, but got {shortened(self.ranks)}")

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
        data: dict[str, Any] = {}
        for name in _names(Measurement):
            value = getattr(self, name)
            if name == "ranks":
                value = [{key: to_json(getattr(rank, key)) for key in _names(RankReport)} for rank in value]
            elif name == "probe":
                value = None if value is None else value.to_dict()
            elif name == "observed":
                value = None if value is None else dict(value)
            else:
                value = to_json(value)
            if value is not None and value != "" and value != []:
                data[name] = value
        return data

    def figures(self) -> dict[str, Any]:
        """Returns `to_dict` for people and other programs: without the probe, a hundred numbers that only detect `wrong`."""
        return {name: value for name, value in self.to_dict().items() if name != "probe"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Measurement":
        """Inverse of `to_dict`; unknown keys are ignored so that newer ledgers can be read.

        Raises:
            UsageError: a field is of another type, or the status is missing or unknown.
        """
        values = _from_json(cls, data)
        if values.get("probe") is not None:
            values["probe"] = Probe.from_dict(values["probe"])
        if not isinstance(observed := values.get("observed"), Mapping | None):
            raise UsageError(f"observed must be a mapping, but got {shortened(observed)}")
        ranks = values.get("ranks") or ()
        if not isinstance(ranks, list | tuple) or len(ranks) > _MOST_RANKS:
            raise UsageError(f"ranks must be a list of reports, but got {shortened(ranks)}")
        values["ranks"] = tuple(RankReport(**_rank(report)) for report in ranks)
        return cls(**values)


def _rank(data: Any) -> dict[str, Any]:
    values = _from_json(RankReport, data)
    if values.get("rank") is None:
        raise UsageError("a rank's report has no rank")
    values["allocation_retries"] = values.get("allocation_retries") or 0
    return values


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
