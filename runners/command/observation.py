"""The observed training of a command: reads the observer's files of all its processes, and computes the speed.

Notation of the speed: a step i ends at e_i (s) and takes t_i = e_i - e_(i-1), less evaluations and saves between two
steps; n_i are its samples over all ranks. The speed is sum(n_i) / sum(t_i) over whole steps, stalls included. Its
interval is that of the mean over blocks of successive steps (batch means), so that stalls that recur widen it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...base.reading import JsonLines
from ..trial import failure
from ..trial.timing import TimingPlan

FOLDER = "REDLINE_OBSERVE"
"""Environment variable with the folder that the observer writes to."""
OBSERVER = Path(__file__).parent / "observer"
"""The folder that comes first on the command's PYTHONPATH."""
PARTS = ("forward", "backward", "optimizer", "data", "evaluation", "saving", "other")
"""Parts of the wall time of a step, in the observer's names."""
BLOCKS = 12
"""Blocks of steps between which the interval of the speed is estimated."""
WIDE = 0.1
"""Relative half-width of that interval above which measuring continues beyond the time of a measurement."""
LONGEST = 5.0
"""Longest measurement, as a multiple of `TimingPlan.seconds`."""
SHORTEST_S = 1.0
"""Shortest measurement, s, so that it includes recurring stalls."""
READ_AHEAD = 2.0
"""Batches by which the passes of the measured steps may differ from the batches that were delivered in them."""
UNSTEPPED_BACKWARDS = 16
"""Backward passes without an optimizer step after which a compiled training counts by its passes: the optimizer's step is
compiled as well, and cannot be seen."""
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One or several successive steps of one process."""

    end: float
    """When the last one ended, s of the monotonic clock."""
    steps: int
    optimizers: str
    samples: int
    tokens: int
    batches: int
    backwards: int
    loss: float | None
    """Sum over the backward passes; None if not known."""
    forward: float
    """Wall time of this part, s; so are the following."""
    backward: float
    optimizer: float
    data: float
    evaluation: float
    saving: float
    other: float
    compiling: float
    """The share of torch.compile in the other parts."""

    def joined(self, later: "Step") -> "Step":
        """Returns both as one step, such as those of the two optimizers of a GAN."""
        sums = {
            name: getattr(self, name) + getattr(later, name)
            for name in ("samples", "tokens", "batches", "backwards", *PARTS, "compiling")
        }
        return Step(end=later.end, steps=later.steps, optimizers=later.optimizers, loss=later.loss, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedException:
    """The exception that ended a process or one of its threads."""

    type: str
    kinds: tuple[str, ...]
    """Names of its classes, and of those of the exceptions that it was raised from."""
    message: str
    where: str
    """`process` or `thread`."""

    @property
    def text(self) -> str:
        """`Type: message` on one line."""
        return failure.shortened(f"{self.type}: {self.message}" if self.message else self.type)

    @property
    def is_oom(self) -> bool:
        """True if memory ran out: by the exception's type, or by its text, which may be that of another process."""
        if {"OutOfMemoryError", "MemoryError"} & set(self.kinds):
            return True
        return any(map(failure.line_says_oom, [self.message, self.text, *self.message.splitlines()]))


@dataclass
class ObservedProcess:
    """One process of the command, by its observer's file."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    """The latest facts, in the observer's names."""
    rows: list[Step] = field(default_factory=list)
    exception: RaisedException | None = None
    fault: str | None = None
    """Why the observer itself failed; None if it did not."""
    compiling: bool = False
    """True while torch.compile runs in it."""

    def __post_init__(self) -> None:
        self._written = JsonLines(self.path.parent, self.path.name)

    @property
    def rank(self) -> int:
        """Its rank, 0 if it has none."""
        return self.facts.get("rank") or 0

    @property
    def world(self) -> int:
        """Number of ranks, by its environment or torch.distributed."""
        return self.facts.get("world") or 1

    def read(self) -> None:
        """Reads the lines written since the last call."""
        for document in self._written.lines():
            self.facts |= document.get("facts", {})
            fields = self.facts.get("fields", ())
            self.rows += [Step(**dict(zip(fields, row, strict=True))) for row in document.get("steps", ())]
            if (exception := document.get("exception")) is not None:
                self.exception = self.exception or RaisedException(
                    type=exception["type"],
                    kinds=tuple(exception["kinds"]),
                    message=exception["message"],
                    where=exception["in"],
                )
            self.fault = document.get("fault", self.fault)
            self.compiling = document.get("compiling", self.compiling)
        if self._written.damaged:
            self.fault = self.fault or "a line of its file is damaged, as by a full disk"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a training over whole steps."""

    seconds_per_step: float
    """Mean, s."""
    spread: float | None
    """Relative half-width of its 95 % interval; None with fewer than two steps."""
    median_s: float
    """Median step, s."""
    steps: int
    samples_per_step: float | None
    """Over all ranks; None if no loader was seen."""
    backwards_per_step: float
    """Backward passes of the lead in a step."""
    tokens_per_step: float | None
    shares: Mapping[str, float]
    """Shares of the wall time since the first measured step, 0 to 1, by part; evaluations and saves included."""
    compile_s: float
    """Time of torch.compile before and within these steps, s."""
    warmup_s: float
    """From the first step to the first measured one, s."""
    measure_s: float
    complete: bool
    """True if its interval is narrow enough, or the time of a measurement is over."""
    stopped_early: str | None = None
    """Why the measurement was cut short; None if it was not."""

    @property
    def stalled(self) -> float:
        """Share of the time of steps that exceeds the median step, 0 to 1."""
        return max(0.0, 1.0 - self.median_s / self.seconds_per_step)


@dataclass(frozen=True, kw_only=True)
class ObservedTraining:
    """The processes of the command that train together."""

    ranks: Sequence[ObservedProcess]
    """By rank, those on this host."""

    @property
    def lead(self) -> ObservedProcess:
        """The lowest rank, whose steps are timed."""
        return self.ranks[0]

    @property
    def world(self) -> int:
        """Number of ranks, on all hosts."""
        return max(self.lead.world, len(self.ranks))

    @property
    def steps(self) -> list[Step]:
        """The steps of the lead. Alternating optimizers, as of a GAN, are one step: it ends with the rarest of them.

        Backward passes are the steps of a training without an observed optimizer.
        """
        rows = [row for row in self.lead.rows if row.optimizers] or self.lead.rows
        counts = Counter(row.optimizers for row in rows)
        often = [key for key, count in counts.items() if count > 1 and key]
        if len(often) < 2:
            return rows
        rarest = min(often, key=lambda key: counts[key])
        steps, current = list[Step](), None
        for row in rows:
            current = row if current is None else current.joined(row)
            if row.optimizers == rarest:
                steps.append(current)
                current = None
        return steps

    def usual(self, name: str) -> float | None:
        """The most common number of samples of a batch (`batch_sizes`) or of a step (`step_sizes`) of the lead, the larger
        of two that are as common; None if no loader was seen. The last batch of an epoch may be smaller.
        """
        sizes: Mapping[str, int] = self.lead.facts.get(name, {})
        return max(((count, float(size)) for size, count in sizes.items()), default=(0, None))[1]

    @property
    def trained(self) -> Mapping[str, int]:
        """Parameters of the lead's optimizers, by format: its shard, where they are sharded."""
        trained: Mapping[str, int] = self.lead.facts.get("trained", {})
        return trained

    @property
    def products(self) -> str | None:
        """The format of most matrix products of a training step; None if autograd's graph did not show any."""
        counts = self.lead.facts.get("products", {})
        return max(counts, key=lambda name: counts[name]) if counts else None

    @property
    def rows_per_pass(self) -> float | None:
        """Median rows of the product nearest to the loss, of the lead's first backward passes: its samples or tokens, also
        of a training without loaders; None if autograd's graph did not show any, as where the loss is compiled too."""
        rows = [count for count in self.lead.facts.get("product_rows", ()) if count]
        return statistics.median(rows) if rows else None

    @property
    def elements_per_sample(self) -> int | None:
        """Elements of a sample's largest tensor in the lead's first batches: tokens, or pixels times channels; None if no loader
        was seen, or they vary, as texts that are padded to the longest of a batch."""
        elements = set(self.lead.facts.get("elements", ()))
        return elements.pop() if len(elements) == 1 else None

    @property
    def replicas(self) -> float:
        """Number of ranks with different data: by their samplers, otherwise by comparing the values of batches."""
        sampler_replicas = max((rank.facts.get("replicas") or 0 for rank in self.ranks), default=0)
        if sampler_replicas:
            return float(sampler_replicas)
        fingerprints = {tuple(rank.facts.get("fingerprints", ())) for rank in self.ranks if self._draws(rank)}
        return max(1, len(fingerprints)) * self.world / len(self.ranks)

    @property
    def same_data(self) -> bool:
        """True if several ranks read the same batches and their samplers do not count them as replicas."""
        return self.replicas < self.world

    @staticmethod
    def _draws(rank: ObservedProcess) -> bool:
        return any(row.samples for row in rank.rows)

    def peak_mib(self) -> float | None:
        """The largest peak of a rank: reserved memory of its fullest GPU, else resident memory, MiB."""
        peaks = []
        for rank in self.ranks:
            memory = rank.facts.get("memory", {})
            devices = [value["reserved"] for value in memory.values() if isinstance(value, dict)]
            if devices or "resident" in memory:
                peaks.append(max(devices, default=memory.get("resident", 0.0)))
        return max(peaks, default=None)

    def retries(self) -> int:
        """How often the allocators of its GPUs flushed their caches."""
        values = (value for rank in self.ranks for value in rank.facts.get("memory", {}).values())
        return sum(int(value["retries"]) for value in values if isinstance(value, dict))

    def losses(self) -> list[float]:
        """Losses of the steps of the lead, as far as known."""
        return [row.loss for row in self.lead.rows if row.loss is not None]

    def speed(self, plan: TimingPlan, *, best_s: float | None = None, ended: bool = False) -> Speed | None:
        """Returns the speed so far; None if too few steps are known.

        Args:
            plan: durations and precision.
            best_s: time of a step of the best candidate so far, for the same samples, s.
            ended: no further step comes, so that one measured step is enough.
        """
        steps = self._countable()
        times = [0.0, *(later.end - earlier.end for earlier, later in pairwise(steps))]
        begin = _warm(steps, times, plan, self.lead.facts.get("buffered", 0))
        if begin is None:
            if not ended or len(steps) < 2:
                return None
            begin = len(steps) - 1
        return _speed(self, steps, times, begin, plan, best_s, ended)

    def _countable(self) -> list[Step]:
        """The steps; none of them before it is clear that an optimizer that was not observed will not be."""
        steps = self.steps
        if steps and not steps[0].optimizers:
            compiled = self.lead.facts.get("compiled", 0)
            return steps if compiled and sum(step.backwards for step in steps) >= UNSTEPPED_BACKWARDS else []
        return steps


def _warm(steps: Sequence[Step], times: Sequence[float], plan: TimingPlan, buffered: int) -> int | None:
    """Returns the position of the first measured step; None if it is not known yet.

    The first step and steps that compile are left out, and those whose batches the loader's workers had prepared before
    the training began. After that, steps are left out until two in a row agree.
    """
    if len(steps) < 2:
        return None
    # Only among the first steps: a training whose shapes vary may compile again and again.
    compiling = [number for number, step in enumerate(steps[: plan.compile_max_steps + 1]) if step.compiling > 0]
    begin = max([0, *compiling]) + 1
    batches = sum(step.batches for step in steps[:begin])
    begun = steps[0].end
    while begin < len(steps) and batches < buffered and steps[begin].end - begun < plan.warmup_seconds:
        batches += steps[begin].batches
        begin += 1
    warm_s = 0.0
    for number in range(begin, len(steps)):
        warm_s += times[number]
        if number - begin + 1 >= plan.warmup_max_steps or warm_s >= plan.warmup_seconds:
            return number + 1 if number + 1 < len(steps) else None
        if number > begin:
            net_s, previous_s = _net(steps[number], times[number]), _net(steps[number - 1], times[number - 1])
            if abs(net_s - previous_s) <= plan.steady_within * net_s:
                return number
    return None


def _net(step: Step, seconds: float) -> float:
    """Time of one step without evaluation and saving, s."""
    return max(seconds - step.evaluation - step.saving, 1e-9) / step.steps


def _speed(
    training: ObservedTraining,
    steps: Sequence[Step],
    times: Sequence[float],
    begin: int,
    plan: TimingPlan,
    best_s: float | None,
    ended: bool,
) -> Speed | None:
    rows = [(step, seconds) for step, seconds in zip(steps[begin:], times[begin:]) if step.compiling == 0]
    rows = rows or list(zip(steps[begin:], times[begin:]))
    if not rows:
        return None
    # What happens in most steps, such as the rollouts of reinforcement learning, is part of the training.
    recurs = sum(step.evaluation > 0 for step, _ in rows) > len(rows) / 2
    net = [seconds - step.saving - (0.0 if recurs else step.evaluation) for step, seconds in rows]
    count = sum(step.steps for step, _ in rows)
    spread = _spread([seconds / step.steps for (step, _), seconds in zip(rows, net)])
    wall = sum(seconds for _, seconds in rows)
    mean = sum(net) / count
    slow = None
    if best_s is not None and len(rows) >= plan.min_steps:
        fastest = min(seconds / step.steps for (step, _), seconds in zip(rows, net))
        if fastest > plan.slow_factor * best_s:
            slow = f"stopped early: {fastest / best_s:.1f} times the step time of the best so far"
    enough = len(rows) >= plan.min_steps and wall >= min(SHORTEST_S, plan.seconds)
    narrow = spread is not None and len(rows) >= 6 and spread <= plan.precision
    over = wall >= plan.seconds * (LONGEST if spread is None or spread > WIDE else 1.0)
    replicas = training.replicas
    samples, tokens = _consumed(rows, "samples"), _consumed(rows, "tokens")
    return Speed(
        seconds_per_step=mean,
        spread=spread,
        median_s=statistics.median(
            value for (step, _), seconds in zip(rows, net) for value in [seconds / step.steps] * step.steps
        ),
        steps=count,
        samples_per_step=samples / count * replicas if samples else None,
        backwards_per_step=sum(step.backwards for step, _ in rows) / count,
        tokens_per_step=tokens / count * replicas if tokens else None,
        shares={name: sum(getattr(step, name) for step, _ in rows) / wall for name in PARTS},
        compile_s=sum(step.compiling for step in steps),
        warmup_s=steps[begin - 1].end - steps[0].end,
        measure_s=wall,
        complete=bool(slow) or ended or (enough and (narrow or over)),
        stopped_early=slow,
    )


def _consumed(rows: Sequence[tuple[Step, float]], quantity: str) -> float:
    """Returns the samples or tokens of the passes of these steps.

    A loader that reads ahead has delivered a batch in an earlier step than the one that uses it. Where all but one or two
    passes have a batch each, or a fixed number of them, the passes are counted.
    """
    batches, passes = sum(step.batches for step, _ in rows), sum(step.backwards for step, _ in rows)
    amount = float(sum(getattr(step, quantity) for step, _ in rows))
    if not batches or not passes:
        return amount
    ratio = batches / passes
    regular = float(round(ratio)) if ratio >= 1 else 1 / round(1 / ratio)
    return amount / batches * regular * passes if abs(ratio - regular) * passes <= READ_AHEAD else amount


def _spread(times: Sequence[float]) -> float | None:
    """Returns the relative half-width of the 95 % interval of a mean, by the means of blocks of successive values."""
    # Blocks rather than single steps: successive steps are not independent if, say, every tenth one waits for data.
    blocks = min(BLOCKS, len(times))
    if blocks < 2:
        return None
    size = len(times) / blocks
    means = [
        statistics.fmean(times[round(number * size) : max(round((number + 1) * size), round(number * size) + 1)])
        for number in range(blocks)
    ]
    half = _STUDENT[blocks - 2] * statistics.stdev(means) / math.sqrt(blocks)
    return half / statistics.fmean(means)


class Observation:
    """All observed processes of a command. `update` reads the lines that they have written since the last call.

    Args:
        folder: that of `FOLDER`; need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[Path, ObservedProcess] = {}

    def update(self) -> None:
        """Reads the lines written since the last call."""
        for path in sorted(self.folder.glob("*.jsonl")):
            self.processes.setdefault(path, ObservedProcess(path)).read()

    @property
    def training(self) -> ObservedTraining | None:
        """The latest training with steps; None if there is none. Of processes with the same rank the latest counts, as
        launchers start them again.
        """
        training = [process for process in self.processes.values() if process.rows]
        if not training:
            return None
        latest = max(training, key=lambda process: process.rows[-1].end)
        peers = [process for process in training if process.world == latest.world]
        if latest.world == 1:
            peers = [latest]
        by_rank: dict[int, ObservedProcess] = {}
        for process in sorted(peers, key=lambda process: process.facts.get("began", 0.0)):
            by_rank[process.rank] = process
        return ObservedTraining(ranks=[by_rank[rank] for rank in sorted(by_rank)])

    @property
    def exceptions(self) -> list[RaisedException]:
        """Exceptions that ended processes or threads, in the order in which their files are read."""
        return [process.exception for process in self.processes.values() if process.exception is not None]

    @property
    def compiling(self) -> bool:
        """True while torch.compile runs in one of them."""
        return any(process.compiling for process in self.processes.values())

    @property
    def fault(self) -> str | None:
        """Why an observer failed; None if none did."""
        return next((process.fault for process in self.processes.values() if process.fault), None)
