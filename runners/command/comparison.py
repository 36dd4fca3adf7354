"""Compares a command's observed training with the requested one, and with that of the first run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from ...base.option import either, option
from ...knobs.text import value_text
from ...results import Measurement, Trial
from .observation import ObservedTraining, Speed

FAR = 0.2
"""Largest relative difference from the first run's loss at the same steps, beyond which the training is different."""
SCATTERS = 4.0
"""The same as a multiple of the median change of the first run's loss between steps: noisy losses differ by more."""
LEAST_STEPS = 3
"""Number of common steps with a loss that are needed for the comparison."""
EXACT = 0.02
"""Largest relative difference of observed and requested samples. Loaders that read ahead and short last batches shift
a batch between steps."""
APART = 0.2
"""Relative difference of a printed speed and the observed one above which the printed one cannot count."""
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bf16_pure": "bfloat16"}
"""Formats of matrix products by the values of the knob `precision`."""
UNLIKE = 0.2
"""Relative difference of the rows of steps above which their rates do not compare; rows of texts vary."""
STATE_SAMPLES = "name the knob of the batch micro_batch, or state `samples` in --command-file"
"""What to do if the samples of a step are not known."""
SAME_MEMORY = 0.01
"""Relative difference below which two peaks of memory are the same."""
_SIGNATURE = ("samples_per_step", "backwards", "ranks", "products", "trained", "optimizers", "compiled")
"""Observed facts that show the effect of a knob, besides speed and memory."""


def observed_facts(
    training: ObservedTraining, speed: Speed, samples_per_step: float | None, split: int = 1
) -> dict[str, Any]:
    """Returns the observed facts of a training, for the measurement and the ledger.

    Args:
        training: the processes.
        speed: its speed.
        samples_per_step: over all ranks, also if they were not observed.
        split: number of ranks that share each sample, by the knobs.
    """
    replicas, rows = training.replicas, training.rows_per_pass
    passes = speed.backwards_per_step * replicas
    usual_step, usual_batch = training.usual("step_sizes"), training.usual("batch_sizes")
    return {
        "samples_per_step": samples_per_step,
        "usual_step": None if usual_step is None else usual_step * replicas,
        "usual_batch": usual_batch,
        "samples_seen": speed.samples_per_step is not None,
        "tokens_per_step": speed.tokens_per_step,
        "rows_per_step": None if rows is None else rows * speed.backwards_per_step * max(1, training.world // split),
        "elements_per_sample": training.elements_per_sample,
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
class RequestedTraining:
    """The training that a trial was to run; None for values that were not requested."""

    samples_per_step: float | None = None
    """By the global batch, `samples`, or the micro-batch with its accumulation."""
    micro_batch: float | None = None
    precision: str | None = None
    ranks: int | None = None


@dataclass
class TrainingComparison:
    """Compares the trainings of a search with the requested ones, and with the first successful one."""

    unit: str = ""
    """Unit of the first run's throughput."""
    samples: float | None = None
    """Samples per step of the first run."""
    first: Measurement | None = None
    """Measurement of the first run."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Losses of the first run, by step."""
    micro_ratio: float | None = None
    """Observed over requested micro-batch of the first run. A command may count it in a unit of its own."""

    def deviation(
        self,
        measured: Measurement,
        samples: float | None,
        losses: Mapping[int, float],
        requested: RequestedTraining = RequestedTraining(),
    ) -> str | None:
        """Returns why a successful run does not count; None if it does. Records the first run."""
        if measured.observed is not None and (difference := self._unrequested(measured.observed, requested)):
            return difference
        # Only a run that trained as requested can be the one that others are compared with.
        if not self.unit:
            self.unit, self.samples, self.losses = measured.unit, samples, dict(losses)
            self.first = measured
        if measured.unit != self.unit:
            return f"it reported {measured.unit}, but {self.unit} before: choose one with {option('metric')}"
        if difference := self._uncounted(measured):
            return difference
        # With another number of samples per step the same step has another loss.
        return _loss_deviation(losses, self.losses) if samples == self.samples else None

    def _unrequested(self, observed: Mapping[str, Any], requested: RequestedTraining) -> str | None:
        """Returns how an observed training differs from the requested one; None if it does not."""
        samples, ranks = observed["samples_per_step"], observed["ranks"]
        # The mean, or the usual step: the last one of an epoch may be smaller.
        accepted = [samples, observed.get("usual_step")]
        if observed["same_data"] and samples is not None:  # replicas with the same data, such as a synthetic one
            accepted.append(samples / observed["replicas"] * ranks)
        if (
            requested.samples_per_step is not None
            and observed["samples_seen"]
            and not _near(accepted, requested.samples_per_step)
        ):
            return (
                f"it trains with {samples:,.6g} samples a step, not {requested.samples_per_step:,.6g}"
                + self._reduced(observed, requested)
            )
        if requested.micro_batch is not None and observed["micro_batch"]:
            ratio = observed["micro_batch"] / requested.micro_batch
            if self.micro_ratio is None:
                self.micro_ratio = ratio
            # A batch may have several passes, and the last one of an epoch may be smaller.
            if not _near([1.0, self.micro_ratio], ratio) and not _near(
                [observed.get("usual_batch")], requested.micro_batch
            ):
                return (
                    f"it trains with {observed['micro_batch']:,.6g} samples a pass, not {requested.micro_batch:,.6g}"
                    + self._reduced(observed, requested)
                )
        if requested.precision in FORMATS and observed["products"] not in (None, FORMATS[requested.precision]):
            return (
                f"its matrix products ran in {observed['products']}, not in {FORMATS[requested.precision]} as "
                f"precision={requested.precision} asks"
            )
        if requested.ranks is not None and ranks != requested.ranks:
            return f"it trained on {ranks} rank{'s'[: ranks > 1]}, but {option('devices')} asks for {requested.ranks}"
        return None

    def _uncounted(self, measured: Measurement) -> str | None:
        """Returns how the rows of the steps contradict samples that no loader counted; None if they do not."""
        if self.first is None or self.first.observed is None or measured.observed is None:
            return None
        first_facts, facts = self.first.observed, measured.observed
        rows, first_rows = facts["rows_per_step"], first_facts["rows_per_step"]
        if not rows or not first_rows or facts["samples_seen"]:
            return None
        samples, first_samples = facts["samples_per_step"], first_facts["samples_per_step"]
        difference = abs(rows - first_rows) / first_rows
        if samples is None and difference > UNLIKE:
            return (
                f"its steps have {rows:,.6g} rows, those of the first run {first_rows:,.6g}, so that steps/s do not compare "
                f"them: {STATE_SAMPLES}"
            )
        apart = samples and first_samples and abs(samples - first_samples) > UNLIKE * first_samples
        # The rows alone may be those of a loss in parts of a fixed size.
        if apart and difference <= EXACT and _same_memory(self.first, measured):
            return (
                f"its steps have {rows:,.6g} rows as in the first run, and not {samples:,.6g} samples instead of "
                f"{first_samples:,.6g}: the command does not use the value"
            )
        return None

    @staticmethod
    def _reduced(observed: Mapping[str, Any], requested: RequestedTraining) -> str:
        micro = observed["micro_batch"]
        reduced = micro and requested.micro_batch and micro < requested.micro_batch
        return ": the trainer reduced its batch" if reduced else ""


def _near(accepted: Iterable[float | None], value: float) -> bool:
    return any(candidate is not None and abs(candidate - value) <= EXACT * abs(value) for candidate in accepted)


def _loss_deviation(losses: Mapping[int, float], first_losses: Mapping[int, float]) -> str | None:
    steps = sorted(losses.keys() & first_losses.keys())
    if len(steps) < LEAST_STEPS:
        return None
    expected = [first_losses[step] for step in steps]
    offset = median(losses[step] - first_losses[step] for step in steps)
    scatter = median(abs(later - earlier) for earlier, later in pairwise(expected))
    # Medians: single outliers of a loss do not count, a lasting difference does.
    if abs(offset) <= max(FAR * median(map(abs, expected)), SCATTERS * scatter):
        return None
    step = steps[-1]
    return f"its loss is {losses[step]:.4g} at step {step}, but that of the first run was {first_losses[step]:.4g}"


def printed_deviation(metric: str, value: float, speed: Speed, samples_per_step: float | None) -> str | None:
    """Returns how a printed speed differs from the observed one; None if it does not, or cannot be compared.

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
        return None
    return (
        f"it prints {metric} = {value:,.6g}, but {observed:,.6g} was observed over {speed.steps} steps: without "
        f"{option('metric')}, the observed speed counts"
    )


def without_effect(trials: Sequence[Trial]) -> list[str]:
    """Returns a sentence for each knob whose values made no observed difference between successful trials.

    A knob is compared between trials that differ in it alone: by what they train, by their memory, and by their speed
    within its interval. A precision needs no such pair: its formats are observed.
    """
    observed_trials = [trial for trial in trials if trial.ok and trial.measured.observed is not None]
    names = {name for trial in observed_trials for name in trial.config}
    varied = {name for name in names if len({_value(trial, name) for trial in observed_trials}) > 1}
    sentences = []
    for name in sorted(varied):
        pairs = [pair for pair in combinations(observed_trials, 2) if _differ_in(*pair) == {name}]
        products = {_observed(trial)["products"] for trial in observed_trials}
        amp = name in ("amp", "bf16", "fp16", "precision", "mixed_precision", "autocast")
        if amp and len(products) == 1 and products != {None}:
            sentences.append(f"{name} had no effect: all trials ran in {products.pop()}")
        elif pairs and all(_alike(*pair) for pair in pairs):
            values = ", ".join(sorted({value_text(_value(trial, name)) for pair in pairs for trial in pair}))
            sentences.append(f"{name} had no effect: nothing observed differs between {values}")
    return sentences


def of_other_samples(trials: Sequence[Trial]) -> str | None:
    """Returns a sentence if a knob decides on the size of the samples, such as a length or a resolution: the fastest trial
    in samples/s is then one of the smallest samples. None if none does.

    All trials with one value of such a knob have samples of one size, and those with another value of another.
    """
    known = [
        trial
        for trial in trials
        if trial.ok
        and trial.measured.unit in ("samples/s", "steps/s")
        and (trial.measured.observed or {}).get("elements_per_sample")
    ]
    sizes = {_observed(trial)["elements_per_sample"] for trial in known}
    if not known or min(sizes) >= (1 - UNLIKE) * max(sizes):
        return None
    deciding = []
    for name in sorted({name for trial in known for name in trial.config}):
        by_value = {(_value(trial, name), _observed(trial)["elements_per_sample"]) for trial in known}
        if len(by_value) == len({value for value, _ in by_value}) > 1:
            deciding.append(name)
    return (
        f"samples have from {min(sizes):,} to {max(sizes):,} elements{f' by {either(deciding)}' if deciding else ''}, so that "
        "samples/s compare different trainings: unless what differs is padding, search with one size of them at a time"
    )


def _observed(trial: Trial) -> Mapping[str, Any]:
    observed = trial.measured.observed
    assert observed is not None
    return observed


def _value(trial: Trial, name: str) -> Any:
    return trial.config.get(name)


def _differ_in(trial: Trial, peer: Trial) -> set[str]:
    names = set(trial.config) | set(peer.config)
    return {name for name in names if _value(trial, name) != _value(peer, name)}


def _alike(trial: Trial, peer: Trial) -> bool:
    first_facts, second_facts = _observed(trial), _observed(peer)
    if any(first_facts[name] != second_facts[name] for name in _SIGNATURE):
        return False
    if not _same_memory(trial.measured, peer.measured):
        return False
    spread = max(trial.measured.spread or 0.0, EXACT) + max(peer.measured.spread or 0.0, EXACT)
    return abs(trial.throughput - peer.throughput) <= spread * max(trial.throughput, peer.throughput)


def _same_memory(measured: Measurement, other: Measurement) -> bool:
    peaks = [peak for peak in (measured.peak_memory_mib, other.peak_memory_mib) if peak is not None]
    return len(peaks) == 2 and abs(peaks[0] - peaks[1]) <= SAME_MEMORY * max(peaks)
