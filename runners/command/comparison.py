"""Whether a command trained what was asked: its observed training against the knobs, and against the first run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from ...knobs.text import value_text
from ...results import Measurement, Trial
from .observation import ObservedTraining, Speed

FAR = 0.2
"""Largest relative difference from the first run's loss at the same steps; beyond it the training is considered
different.
"""
SCATTERS = 4.0
"""The same as a multiple of the typical change of the first run's loss between steps."""
LEAST_STEPS = 3
"""Number of common steps with a loss that are needed for the comparison."""
EXACT = 0.02
"""Largest relative difference of observed and requested samples. Loaders that read ahead and short last batches shift
a batch between steps."""
APART = 0.2
"""Relative difference of a printed speed and the observed one above which the printed one cannot count."""
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bf16_pure": "bfloat16"}
"""Formats of matrix products by the values of the knob `precision`."""
SAME_MEMORY = 0.01
"""Relative difference below which two peaks of memory are the same."""
_SIGNATURE = ("samples_per_step", "backwards", "ranks", "products", "trained", "optimizers", "compiled")
"""Observed facts that show the effect of a knob, besides speed and memory."""


def observed_facts(training: ObservedTraining, speed: Speed, samples_per_step: float | None) -> dict[str, Any]:
    """Returns what was observed of a training, for the measurement and the ledger.

    Args:
        training: the processes.
        speed: its speed.
        samples_per_step: over all ranks, also if they were not observed.
    """
    replicas = training.replicas
    passes = speed.backwards_per_step * replicas
    usual_step, usual_batch = training.usual("step_sizes"), training.usual("batch_sizes")
    return {
        "samples_per_step": samples_per_step,
        "usual_step": None if usual_step is None else usual_step * replicas,
        "usual_batch": usual_batch,
        "samples_seen": speed.samples_per_step is not None,
        "tokens_per_step": speed.tokens_per_step,
        "micro_batch": speed.samples_per_step / passes if speed.samples_per_step is not None and passes else None,
        "backwards": round(speed.backwards_per_step, 3),
        "steps": speed.steps,
        "median_step_ms": speed.median_s * 1e3,
        "stalled": round(speed.stalled, 3),
        "shares": {part: round(share, 4) for part, share in speed.shares.items() if share >= 0.0005},
        "ranks": training.world,
        "replicas": replicas,
        "same_data": training.same_data,
        "products": training.products,
        "autocast": list(training.lead.facts.get("autocast", [])),
        "trained": dict(training.trained),
        "optimizers": list(training.lead.facts.get("optimizers", [])),
        "compiled": bool(training.lead.facts.get("compiled", 0)),
        "retries": training.retries(),
        "torch": training.lead.facts.get("torch", ""),
    }


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a trial's training was asked to be; None for what was not asked."""

    samples_per_step: float | None = None
    """By the global batch, `samples`, or the micro-batch and its accumulation together."""
    micro_batch: float | None = None
    precision: str | None = None
    ranks: int | None = None


@dataclass
class TrainingComparison:
    """Compares the trainings of a search with what was asked, and with the first successful one."""

    unit: str = ""
    """Unit of the first run's throughput."""
    samples: float | None = None
    """Samples per step of the first run."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Losses of the first run, by step."""
    micro_ratio: float | None = None
    """Observed over requested micro-batch of the first run: a command may have its own unit for it."""

    def why_not(
        self, measured: Measurement, samples: float | None, losses: Mapping[int, float], asked: Asked = Asked()
    ) -> str:
        """Returns the reason why a successful run does not count; empty if it does. The first run is recorded."""
        if measured.observed is not None and (difference := self._not_asked(measured.observed, asked)):
            return difference
        if not self.unit:
            self.unit, self.samples, self.losses = measured.unit, samples, dict(losses)
        if measured.unit != self.unit:
            return f"it reported {measured.unit}, but {self.unit} before: choose one with --metric"
        return _deviates(losses, self.losses) if samples == self.samples else ""

    def _not_asked(self, observed: Mapping[str, Any], asked: Asked) -> str:
        """Returns how an observed training differs from the one that was asked; empty if it does not."""
        samples, ranks = observed["samples_per_step"], observed["ranks"]
        # The mean, or the usual step: the last one of an epoch may be smaller.
        accepted = [samples, observed.get("usual_step")]
        if observed["same_data"] and samples is not None:  # replicas with the same data, such as a synthetic one
            accepted.append(samples / observed["replicas"] * ranks)
        if (
            asked.samples_per_step is not None
            and observed["samples_seen"]
            and not _near(accepted, asked.samples_per_step)
        ):
            return f"it trains with {samples:,.6g} samples a step, not {asked.samples_per_step:,.6g}" + self._reduced(
                observed, asked
            )
        if asked.micro_batch is not None and observed["micro_batch"]:
            ratio = observed["micro_batch"] / asked.micro_batch
            if self.micro_ratio is None:
                self.micro_ratio = ratio
            # A batch may have several passes, and the last one of an epoch may be smaller.
            if not _near([1.0, self.micro_ratio], ratio) and not _near(
                [observed.get("usual_batch")], asked.micro_batch
            ):
                return (
                    f"it trains with {observed['micro_batch']:,.6g} samples a pass, not {asked.micro_batch:,.6g}"
                    + self._reduced(observed, asked)
                )
        if asked.precision in FORMATS and observed["products"] not in (None, FORMATS[asked.precision]):
            return (
                f"its matrix products ran in {observed['products']}, not in {FORMATS[asked.precision]} as "
                f"precision={asked.precision} asks"
            )
        if asked.ranks is not None and ranks != asked.ranks:
            return f"it trained on {ranks} rank{'s'[: ranks > 1]}, but --devices asks for {asked.ranks}"
        return ""

    @staticmethod
    def _reduced(observed: Mapping[str, Any], asked: Asked) -> str:
        micro = observed["micro_batch"]
        return ": the trainer reduced its batch" if micro and asked.micro_batch and micro < asked.micro_batch else ""


def _near(accepted: Iterable[float | None], value: float) -> bool:
    return any(other is not None and abs(other - value) <= EXACT * abs(value) for other in accepted)


def _deviates(losses: Mapping[int, float], first: Mapping[int, float]) -> str:
    steps = sorted(losses.keys() & first.keys())
    if len(steps) < LEAST_STEPS:
        return ""
    expected = [first[step] for step in steps]
    off = median(losses[step] - first[step] for step in steps)
    scatter = median(abs(after - before) for before, after in pairwise(expected))
    if abs(off) <= max(FAR * median(map(abs, expected)), SCATTERS * scatter):
        return ""
    at = steps[-1]
    return f"its loss is {losses[at]:.4g} at step {at}, but that of the first run was {first[at]:.4g}"


def printed_differs(metric: str, value: float, speed: Speed, samples_per_step: float | None) -> str:
    """Returns how a printed speed differs from the observed one; empty if it does not, or cannot be compared.

    Args:
        metric: its name, one of `objective.PREFERRED`.
        value: its value.
        speed: the observed speed.
        samples_per_step: over all ranks; None if unknown.
    """
    step_s = speed.seconds_per_step
    observed = {
        "step_ms": step_s * 1e3,
        "step_s": step_s,
        "steps_per_second": 1.0 / step_s,
        "samples_per_second": None if samples_per_step is None else samples_per_step / step_s,
        "tokens_per_second": None if speed.tokens_per_step is None else speed.tokens_per_step / step_s,
    }.get(metric)
    if observed is None or abs(value - observed) <= APART * observed:
        return ""
    return (
        f"it prints {metric} = {value:,.6g}, but {observed:,.6g} was observed over {speed.steps} steps: without --metric, the "
        "observed speed counts"
    )


def without_effect(trials: Sequence[Trial]) -> list[str]:
    """Returns a sentence for each knob whose values changed nothing that was observed in successful trials.

    A knob is compared between trials that differ in it alone: by what they train, by their memory, and by their speed
    within its interval. A precision needs no such pair: its formats are observed.
    """
    seen = [trial for trial in trials if trial.ok and trial.measured.observed is not None]
    varied = {name for trial in seen for name in trial.config if len({_value(other, name) for other in seen}) > 1}
    sentences = []
    for name in sorted(varied):
        pairs = [(one, other) for one, other in combinations(seen, 2) if _differ_in(one, other) == {name}]
        products = {_observed(trial)["products"] for trial in seen}
        amp = name in ("amp", "bf16", "fp16", "precision", "mixed_precision", "autocast")
        if amp and len(products) == 1 and products != {None}:
            sentences.append(f"{name} had no effect: all trials ran in {products.pop()}")
        elif pairs and all(_alike(one, other) for one, other in pairs):
            values = ", ".join(sorted({value_text(_value(trial, name)) for pair in pairs for trial in pair}))
            sentences.append(f"{name} had no effect: nothing observed differs between {values}")
    return sentences


def _observed(trial: Trial) -> Mapping[str, Any]:
    observed = trial.measured.observed
    assert observed is not None
    return observed


def _value(trial: Trial, name: str) -> Any:
    return trial.config.get(name)


def _differ_in(one: Trial, other: Trial) -> set[str]:
    names = set(one.config) | set(other.config)
    return {name for name in names if _value(one, name) != _value(other, name)}


def _alike(one: Trial, other: Trial) -> bool:
    first, second = _observed(one), _observed(other)
    if any(first[name] != second[name] for name in _SIGNATURE):
        return False
    peaks = one.measured.peak_memory_mib, other.measured.peak_memory_mib
    if None in peaks or abs(peaks[0] - peaks[1]) > SAME_MEMORY * max(peaks):  # type: ignore[operator, type-var]
        return False
    spread = max(one.measured.spread or 0.0, EXACT) + max(other.measured.spread or 0.0, EXACT)
    return abs(one.throughput - other.throughput) <= spread * max(one.throughput, other.throughput)
