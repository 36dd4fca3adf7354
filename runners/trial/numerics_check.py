"""Checks that a candidate trains the same model, by comparing its probe with the reference's."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...results.probe import Computed, Probe
from ...schedule.comparison import SMALL, Comparison, Departure, Numbers, Tolerance, and_more, compare
from ...training.probe import ProbePart, StepPart

EXACT = 2.0**-24
"""Unit roundoff of the widest format whose gradients are compared by parameter: float32."""


def together(parts: Sequence[ProbePart], firsts: Sequence[StepPart | None] = ()) -> Probe:
    """Combines the ranks' parts of a probe.

    Args:
        parts: of all ranks of a trial, at least one.
        firsts: of their first steps.
    """
    shares, compared_steps = [part.share for part in parts], [step for step in firsts if step is not None]
    changed, size = sum(part.changed for part in parts), sum(part.size for part in parts)
    comparable = compared_steps and not any(part.by_batch for part in parts)
    return replace(
        shares[0],
        quiet=Computed.together([share.quiet for share in shares]),
        step=Computed.together([step.computed for step in compared_steps]) if comparable else None,
        logits=tuple(sum(column) for column in zip(*(share.logits for share in shares if share.logits))),
        noise=math.sqrt(changed / size) if size else 0.0,
        noise_numbers=max(share.noise_numbers for share in shares),
        still=tuple(sorted({name for step in compared_steps for name in step.still})),
        brought=_all(share.brought for share in shares),
        rates=_all(share.rates for share in shares),
        trained=_all(share.trained for share in shares),
        frozen=_all(share.frozen for share in shares),
        loss_roundoff=max(share.loss_roundoff for share in shares),
    )


def _all(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for names in lists for name in names}))


def expert_load(parts: Sequence[ProbePart]) -> float | None:
    """Returns the rows of the fullest expert over the mean of all experts on the probe's samples, averaged over a
    model's mixtures; None for a model without any.
    """
    totals: dict[str, list[int]] = {}
    for part in parts:
        for path, rows in part.rows.items():
            counts = totals.get(path, [0] * len(rows))
            totals[path] = [count + further for count, further in zip(counts, rows, strict=True)]
    loads = [max(rows) * len(rows) / sum(rows) for rows in totals.values() if sum(rows)]
    return sum(loads) / len(loads) if loads else None


def dropped_share(parts: Sequence[tuple[int, int] | None]) -> float | None:
    """Returns the share of rows that experts dropped in training on all ranks; None if they have no capacity.

    Args:
        parts: number of dropped and of routed rows of each rank.
    """
    counts = [part for part in parts if part is not None]
    routed = sum(rows for _, rows in counts)
    return sum(dropped for dropped, _ in counts) / routed if routed else None


def numerics_mismatch(probe: Probe, reference: Probe | None, *, loss: float, last_loss: float) -> str | None:
    """Returns how a candidate's computation differs from the reference's; None if it does not.

    Args:
        probe: of the candidate.
        reference: of the search. Without a comparable one (`why_incomparable`) all values only need to be finite.
        loss: of the first training step.
        last_loss: of the last step.
    """
    losses = {"the first step": loss, "the last step": last_loss, "the probe": probe.quiet.loss}
    for place, value in losses.items():
        if not math.isfinite(value):
            return f"loss is {value} at {place}"
    if not _without_randomness(probe).finite:
        return f"the probe's results are not finite: the gradient's norm is {probe.quiet.gradient}"
    if reference is None or why_incomparable(probe, reference):
        return None
    departures = (comparison.wrong for comparison in comparisons(probe, reference))
    return next((departure.description for departure in departures if departure is not None), None)


def comparisons(probe: Probe, expected: Probe) -> Iterator[Comparison]:
    """Yields the comparisons of a candidate with a comparable reference: of the settings of its modules, on the probe's
    samples, and in the first step.
    """
    yield Comparison(tuple(_settings(probe, expected)))
    rounding = partial(Tolerance.of_summaries, probe, expected, size=expected.logits_size)
    tolerance = rounding(noise_numbers=min(probe.noise_numbers, expected.noise_numbers))
    yield compare(_without_randomness(expected), _without_randomness(probe), tolerance)
    if max(probe.roundoff, expected.roundoff) <= EXACT and len(probe.names) == len(expected.quiet.parameters):
        # Another gradient of one parameter hardly changes the norm of all.
        expected_norms, norms = (_by_parameter(source.quiet, probe.names) for source in (expected, probe))
        yield compare(expected_norms, norms, replace(tolerance, least=SMALL, gradients=tolerance.vectors))
    # Over other samples, only whether weights moved can be compared.
    samples = expected.step.samples if expected.step else 1
    same_samples = probe.step is not None and probe.step.samples == samples
    tolerance = rounding(noise=max(probe.noise, expected.noise), samples=samples)
    yield compare(_step(expected), _step(probe) if same_samples else Numbers(still=probe.still), tolerance)


def _settings(probe: Probe, expected: Probe) -> Iterator[Departure]:
    """Yields departures of the modules' settings: rates of dropout, and the set of trained parameters. Modules that only
    one of the two models has are not compared.
    """
    if not (probe.trained and expected.trained):  # an earlier version of redline did not record them
        return
    differs = partial(Departure, by=math.inf, allowed=0.0)
    rates, expected_rates = _rates(probe), _rates(expected)
    for name, values in expected_rates.items():
        if (actual := rates.get(name, values)) != values:
            description = f"the rate of dropout {name} is {_listed(actual)}, the reference's {_listed(values)}"
            yield differs(kind="dropout", description=description)
    active, expected_active = _active(rates), _active(expected_rates)
    if bool(active) != bool(expected_active):
        description = (
            f"no dropout is active in training, and {and_more(expected_active)} is in the reference"
            if expected_active
            else f"the dropout {and_more(active)} is active in training, and none is in the reference"
        )
        yield differs(kind="dropout", description=description)
    if names := sorted(set(probe.frozen).difference(expected.frozen).intersection(expected.trained)):
        yield differs(kind="gradients", description=f"{and_more(names)} is frozen, and trained in the reference")
    if names := sorted(set(expected.frozen).difference(probe.frozen).intersection(probe.trained)):
        yield differs(kind="gradients", description=f"{and_more(names)} is trained, and frozen in the reference")


def _rates(probe: Probe) -> dict[str, set[float]]:
    """Rates of dropout, by path."""
    rates: dict[str, set[float]] = {}
    for dropout in probe.rates:
        path, _, rate = dropout.rpartition("=")
        rates.setdefault(path, set()).add(float(rate))
    return rates


def _active(rates: Mapping[str, set[float]]) -> list[str]:
    """Paths of the dropouts that have an effect."""
    return [path for path, values in rates.items() if values != {0.0}]


def _listed(rates: set[float]) -> str:
    return " and ".join(f"{rate:g}" for rate in sorted(rates))


def _by_parameter(computed: Computed, names: Sequence[str]) -> Numbers:
    norms = zip(names, computed.parameters, strict=True)
    gradients = {f"the norm of the gradient of {name}": torch.tensor(norm, dtype=torch.float64) for name, norm in norms}
    return Numbers(gradients=gradients, on=" on the probe")


def why_incomparable(probe: Probe, reference: Probe) -> str | None:
    """Returns why a candidate cannot be compared with the reference; None if it can."""
    samples, expected_samples = probe.quiet.samples, reference.quiet.samples
    if samples != expected_samples:
        return f"not compared with the reference, which was probed with {expected_samples} samples, not {samples}"
    if probe.weights and reference.weights and probe.weights != reference.weights:
        return f"not compared with the reference, whose model has {reference.weights:,} weights, not {probe.weights:,}"
    if differing := sorted(set(probe.brought) ^ set(reference.brought)):
        return f"not compared with the reference, which has other weights: {and_more(differing)}"
    return None


def _without_randomness(probe: Probe) -> Numbers:
    """Returns the results on the fixed batch without randomness, and the difference that training's randomness makes."""
    logits = {"the logits": torch.tensor(probe.logits, dtype=torch.float64)} if probe.logits else {}
    return replace(_numbers(probe.quiet, " on the probe"), outputs=logits, noise=probe.noise)


def _step(probe: Probe) -> Numbers:
    """Returns the comparable results of the first training step."""
    return replace(_numbers(probe.step, " in the first step"), still=probe.still)


def _numbers(computed: Computed | None, on: str) -> Numbers:
    if computed is None:
        return Numbers(on=on)
    gradient = "the norm of the gradient"
    places = [f" of repeated block {number}" for number in range(len(computed.blocks))]
    blocks = {f"{gradient}{place}": norm for place, norm in zip(places, computed.blocks)}
    vectors = [f"{gradient} of biases and norms{place}" for place in (*places, " outside of repeated blocks")]
    norms = {**blocks, **dict(zip(vectors, computed.vectors)), gradient: computed.gradient}
    gradients = {name: torch.tensor(norm, dtype=torch.float64) for name, norm in norms.items()}
    return Numbers(loss=computed.loss, gradients=gradients, vectors=vectors, on=on)
