"""What a dry run found out: status, speed, memory, timings."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Any

from ..base.errors import UsageError, unknown
from .probe import Probe
from .schema import count, number, shown


class Status(StrEnum):
    """How a trial ended. Every status but `ok` comes with a reason."""

    OK = "ok"
    """Ran to the end; `throughput` is set."""
    OOM = "oom"
    """Device or host memory ran out, however it showed."""
    TIMEOUT = "timeout"
    """Outlived its deadline and was killed."""
    CRASH = "crash"
    """Any other failure; `reason` is the last exception or the signal."""
    WRONG = "wrong"
    """Ran, but computes something else than the reference, or what is not finite."""
    SKIPPED = "skipped"
    """Never run: predicted not to fit, or dominated by a known OOM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank of a trial measured."""

    rank: int
    """Global rank, 0 to world size - 1."""
    status: Status
    """How this rank ended."""
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
    """CUDA: what the rank takes of its device beside the allocator's memory (context, libraries, NCCL), MiB. None on a CPU."""
    clock_mhz: float | None = None
    """CUDA: median clock of the multiprocessors while it was measured, MHz."""
    power_w: float | None = None
    """CUDA: median power that the device drew meanwhile, W."""
    allocation_retries: int = 0
    """CUDA: how often the allocator flushed its cache during the steps; above 0 the trial ran close to OOM."""

    def __post_init__(self) -> None:
        _check_types(self, _names(RankReport))


_STATUSES = frozenset(Status)
_TEXTS = frozenset({"reason", "unit", "log", "told"})
_COUNTS = frozenset({"rank", "allocation_retries", "devices", "samples_per_step"})
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that JSON has no word for."""
_NESTED = frozenset({"ranks", "probe"})
_MOST_RANKS = 1 << 16
_LONGEST_TEXT = 100_000
"""Characters of a text that are kept."""


@cache
def _names(cls: "type[Measurement | RankReport]") -> tuple[str, ...]:
    return tuple(each.name for each in fields(cls))


def _to_json(value: Any) -> Any:
    # numpy and torch scalars know their plain value; json knows neither them nor NaN.
    if isinstance(value, Status):
        return str(value)
    if not isinstance(value, (str, int, float, type(None))) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else str(value)
    return value


def _from_json(cls: type, data: Any) -> dict[str, Any]:
    """The fields of `cls` in `data`, with numbers for the words that JSON has in their place.

    Raises:
        UsageError: it is no mapping, or has no status.
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"a measurement is a mapping, but got {shown(data)}")
    if "status" not in data:
        raise UsageError("the measurement has no status")
    values = {name: data[name] for name in _names(cls) if name in data}
    for name, value in values.items():
        if isinstance(value, str) and value in _WORDS and name not in _TEXTS:
            values[name] = _WORDS[value]
    return values


def _check_types(made: "Measurement | RankReport", names: Iterable[str]) -> None:
    """Has every field of a measurement or a rank's report be of its type, whoever made it: numbers of numpy and torch
    become Python's, and texts are cut where they are endless.

    Raises:
        UsageError: a field is of another type.
    """
    for name in names:
        value = given = getattr(made, name)
        if name == "status":
            # Whoever measures by a function of their own writes "ok", and means Status.OK.
            if not isinstance(value, str) or value not in _STATUSES:
                raise UsageError(unknown("status", shown(value).strip("'"), Status))
            value = Status(value)
        elif name in _TEXTS:
            if not isinstance(value, str):
                raise UsageError(f"{name} must be a text, but got {shown(value)}")
            value = value if len(value) <= _LONGEST_TEXT else value[: _LONGEST_TEXT - 1] + "…"
        elif name not in _NESTED and value is not None:
            value = _number(name, value)
        if value is not given:
            object.__setattr__(made, name, value)


def _number(name: str, value: Any) -> float | int:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if name in _COUNTS:
        if not count(value):
            raise UsageError(f"{name} must be a whole number, but got {shown(value)}")
    elif not number(value) and not (isinstance(value, float) and not math.isfinite(value)):
        raise UsageError(f"{name} must be a number, but got {shown(value)}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Outcome of one dry run. Quantities that were not reached are None."""

    status: Status
    """How the trial ended."""
    reason: str = ""
    """Why, in one line; empty for a plain `ok`."""
    throughput: float | None = None
    """What the search maximises, in `unit`; higher is better."""
    unit: str = ""
    """Unit of `throughput`: `tokens/s`, `samples/s`, or empty for a callable's own number."""
    told: str = ""
    """What else a command was asked to tell and told, such as `p99_ms = 120`."""
    samples_per_second: float | None = None
    """Sequences (or images) per second over all devices."""
    tokens_per_second: float | None = None
    """Tokens per second over all devices."""
    step_ms: float | None = None
    """Median time of one optimizer step on the slowest rank, ms."""
    step_ms_spread: float | None = None
    """Half-width of the 95 % confidence interval of `step_ms`, ms."""
    peak_memory_mib: float | None = None
    """Largest peak memory of a rank, MiB; for an `oom`, what it held plus what it asked for, where known."""
    memory_limit_mib: float | None = None
    """Memory a rank could use, MiB."""
    tflops_per_device: float | None = None
    """Model FLOPs (recomputation not counted) per second and device, 1e12."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1: `tflops_per_device` over the device's peak at this precision."""
    devices: int | None = None
    """Devices the trial ran on."""
    foreign_cores: float | None = None
    """Cores of the trial's host (the busiest one) that others kept busy while it was measured, on average."""
    machine_speed: float | None = None
    """How fast the default configuration ran at that time over how fast it ran at first, where other work had made a
    difference (see `tuner.conditions`)."""
    expert_load: float | None = None
    """Rows of the expert that gets most over the mean, averaged over the model's mixtures, on the probe's samples; None
    without experts."""
    loss: float | None = None
    """Loss of the first step."""
    probe: Probe | None = None
    """What it computed on one fixed batch, for the comparison with the reference."""
    samples_per_step: int | None = None
    """Samples of one optimizer step over all devices."""
    started: float | None = None
    """Unix time at which the trial started, s."""
    seconds_total: float | None = None
    """From request to result, s."""
    seconds_overhead: float | None = None
    """`seconds_total` less build, warm-up and measurement: what trying costs, s."""
    seconds_build: float | None = None
    """Model, schedule, weights, optimizer and compilation, s."""
    seconds_compile: float | None = None
    """The part of `seconds_build` that went into steps in which some rank compiled, s."""
    seconds_warmup: float | None = None
    """Steps before the step time was steady, s."""
    seconds_measure: float | None = None
    """The measured steps, s."""
    log: str = ""
    """Path of the file with everything the ranks printed, relative to the run's folder."""
    ranks: tuple[RankReport, ...] = ()
    """One report a rank that got to report."""

    def __post_init__(self) -> None:
        _check_types(self, _names(Measurement))
        if not isinstance(self.probe, Probe | None):
            raise UsageError(f"probe must be a redline.results.probe.Probe, but got {shown(self.probe)}")
        if not isinstance(self.ranks, tuple) or not all(isinstance(each, RankReport) for each in self.ranks):
            raise UsageError(f"ranks must be a tuple of RankReport, but got {shown(self.ranks)}")

    @property
    def ok(self) -> bool:
        """Whether the trial counts as a success."""
        return self.status is Status.OK

    @property
    def reached(self) -> float:
        """The throughput of a success.

        Raises:
            RuntimeError: there is none.
        """
        if self.throughput is None:
            raise RuntimeError(f"a trial that ended as {self.status} has no throughput")
        return self.throughput

    @property
    def span(self) -> tuple[float, float] | None:
        """When the trial began and ended, Unix time, s; None where that is not known."""
        if self.started is None or self.seconds_total is None:
            return None
        return self.started, self.started + self.seconds_total

    @property
    def spread(self) -> float | None:
        """Relative half-width of the 95 % interval of throughput and step time; None where nothing tells."""
        return self.step_ms_spread / self.step_ms if self.step_ms and self.step_ms_spread is not None else None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping, without fields that are None or empty.

        Numbers are plain Python ones; those JSON has no word for are the texts `nan`, `inf`, `-inf`.
        """
        out: dict[str, Any] = {}
        for name in _names(Measurement):
            value = getattr(self, name)
            if name == "ranks":
                value = [{each: _to_json(getattr(rank, each)) for each in _names(RankReport)} for rank in value]
            elif name == "probe":
                value = None if value is None else value.to_dict()
            else:
                value = _to_json(value)
            if value is not None and value != "" and value != []:
                out[name] = value
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Measurement":
        """The inverse of `to_dict`; unknown keys are ignored so that newer ledgers can be read.

        Raises:
            UsageError: a field is of another type, or the status is missing or unknown.
        """
        values = _from_json(cls, data)
        if values.get("probe") is not None:
            values["probe"] = Probe.from_dict(values["probe"])
        ranks = values.get("ranks") or ()
        if not isinstance(ranks, list | tuple) or len(ranks) > _MOST_RANKS:
            raise UsageError(f"ranks must be a list of reports, but got {shown(ranks)}")
        values["ranks"] = tuple(RankReport(**_rank(each)) for each in ranks)
        return cls(**values)


def _rank(data: Any) -> dict[str, Any]:
    values = _from_json(RankReport, data)
    if values.get("rank") is None:
        raise UsageError("a rank's report does not say which rank it is")
    values["allocation_retries"] = values.get("allocation_retries") or 0
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A configuration that was chosen, why, what was predicted, and what came of it."""

    number: int
    """Position in the study, from 0."""
    config: Any
    """The `Config` that is tried."""
    sampler: str = ""
    """Who proposed it: a sampler's name, `default`, or `user`."""
    attempts: int = 1
    """How often it was begun, by processes that ended with it and by the one that has it now."""
    predicted_throughput: float | None = None
    """Estimated throughput before the run, in the measurement's unit."""
    predicted_memory_mib: float | None = None
    """Estimated peak memory before the run, MiB."""
    measurement: Measurement | None = None
    """The outcome; None while the trial is pending. Where it was measured again, what came of that
    (`again.measured_again`): there is one number for how fast a configuration is."""
    remeasured: tuple[float, ...] = ()
    """Throughputs of the interleaved re-measurements at the end of the search."""
    first: float | None = None
    """Throughput of the first measurement, where `measurement` is what came of measuring again."""
    lossy: tuple[str, ...] = ()
    """The knobs whose values trade accuracy for speed: where there are any, it is another training."""

    @property
    def pending(self) -> bool:
        """Whether the trial has not ended yet."""
        return self.measurement is None

    @property
    def measured(self) -> Measurement:
        """The outcome of a trial that has ended.

        Raises:
            RuntimeError: it is pending.
        """
        if self.measurement is None:
            raise RuntimeError(f"trial {self.number} has not ended yet")
        return self.measurement

    @property
    def throughput(self) -> float:
        """What a trial that is `ok` reached, in the measurement's unit.

        Raises:
            RuntimeError: it is pending, or it did not run to its end.
        """
        return self.measured.reached

    @property
    def ok(self) -> bool:
        """Whether the trial ended as a success."""
        return self.measurement is not None and self.measurement.ok
