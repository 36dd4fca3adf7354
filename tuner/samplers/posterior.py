"""Posterior of the candidates: their speed and probability of success, from an estimate and the trials so far."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...base.errors import UsageError
from ...results import Measurement, Status, Trial
from ...space import Config, Space
from .candidates import SAMPLE, Candidates, remaining
from .encoding import Encoding, Features, observe
from .gaussian_process import Kernel, Posterior, Scales
from .prior import Answers, Predictions, Prior, ShapePrior
from .surrogate import PriorModel, chance_below, limit_model, throughput_model

LIMIT = 8192
"""Largest space in which every candidate is scored in every round."""
DRAWN = 4096
"""Number of candidates of a larger space that are scored in a round, in addition to the prior's favourites."""
CLIMBS = 24
"""Number of rounds that expand the neighbours of the prior's favourites, in a space larger than that."""
CLIMBERS = 8
"""Number of configurations expanded in a round."""
FAVOURITES = 512
"""Number of favourites among the candidates of every round."""
LEADERS = 5
"""Number of best trials whose neighbours are always candidates."""
LEVEL = 2.0
"""Prior deviation of the common factor of all throughputs: so large that no model is judged by it."""
STATED_LEVEL = 0.3
"""The same for an estimate in the unit of the trials that states its uncertain factors: the part that they do not
explain.
"""
SLOPE = 0.1
"""Prior deviation of the power to which the estimate's throughput is taken."""
TRUST = 0.95
"""Prior probability that the estimate is useful."""
STATED_TRUST = 0.99
"""The same for an estimate that states its uncertain factors, which may differ without making it wrong."""
HOPELESS = 0.02
"""Probability of success of a configuration that the estimate rules out without a number."""
NO_LIMIT = 0.5
"""Probability that memory does not matter, if only a default prior is available: above `SET_ASIDE`."""
SET_ASIDE = 0.4
"""Probability of success below which a candidate is set aside, as long as there are others."""
CAUTION = 2.0
"""Power of the probability of success in the acquisition. At 1 a failure would cost no more than a trial without
gain. Squared, it costs about one trial more, like an OOM on a cluster.
"""

# Natural logarithms throughout. With an estimate the rest to learn is small; without, a knob typically
# changes throughput by a factor of 1.6. The priors of the scales are wide: a factor of e is plausible.
WITH_ESTIMATE = Scales(length=1.0, joint=0.15, additive=0.15, noise=0.07, spread=0.5, noise_spread=0.5)
WITHOUT = Scales(length=1.0, joint=0.5, additive=0.5, noise=0.03)
WITH_SHAPE = Scales(length=1.0, joint=0.3, additive=0.3, noise=0.07, spread=0.5, noise_spread=0.5)
# Memory varies less between runs than speed, and estimates of it are closer.
MEMORY_WITH = Scales(length=1.0, joint=0.1, additive=0.1, noise=0.02)
MEMORY_WITH_SHAPE = Scales(length=1.0, joint=0.2, additive=0.2, noise=0.03)
MEMORY_WITHOUT = Scales(length=1.5, joint=0.3, additive=0.7, noise=0.03)
# Failures for other reasons have no estimate, and a single knob may decide them.
FAILURE = Scales(length=1.0, joint=0.7, additive=0.7, noise=0.1)


class SurrogatePrior:
    """Knowledge of a space before any trial, which does not change during a search.

    Args:
        space: the valid configurations.
        seed: seed of every random choice.
        prior: an estimate: `prior(config) -> Estimate | throughput`, optionally with `.table(configs)`.
        warn: receives warnings about the prior, once each.
        headroom: share of memory to keep free, 0 to 0.5.
        relative: True if only ratios of the prior's values are meaningful.

    Raises:
        UsageError: the headroom is out of range.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        prior: Any = None,
        warn: Callable[[str], None] | None = None,
        headroom: float = 0.0,
        relative: bool = False,
    ) -> None:
        if not 0 <= headroom <= 0.5:
            raise UsageError(f"headroom must be a share from 0 to 0.5, but got {headroom!r}")
        self.space, self.seed = space, seed
        self.encoding = Encoding(space)
        self.features = Features(self.encoding)
        self.answers = None if prior is None else Answers(Prior(prior, warn=warn), self.encoding)
        self.shape_prior = prior if isinstance(prior, ShapePrior) else None
        """The prior, if it does not know the scale."""
        self.relative = relative or self.shape_prior is not None
        """True if only ratios of the prior's values are meaningful."""
        self.unit: str | None = None if self.relative else getattr(prior, "unit", None)
        """Unit of the prior's throughput; None if unknown."""
        self.headroom = headroom
        self._favourites: list[Config] | None = None

    @property
    def small(self) -> bool:
        """True if every valid configuration is scored in every round."""
        return self.encoding.listed is not None and len(self.encoding.listed) <= LIMIT

    def favourites(self) -> list[Config]:
        """The prior's best configurations of a space too large to be scored in every round.

        If the prior does not predict the whole space at once, they are found by climbing from a sample.
        """
        if self.answers is None or self.small:
            return []
        if self._favourites is None and (predictions := self.answers.of_all()) is not None:
            self._favourites = self.space.take(_by_preference(predictions)[:FAVOURITES].tolist())
        if self._favourites is None:
            configs = list(dict.fromkeys(self.space.sample(SAMPLE, self.seed)))
            expanded: set[Config] = set()
            for _ in range(CLIMBS):
                configs = self._by_prior(configs)[:FAVOURITES]
                fresh = [config for config in configs[:CLIMBERS] if config not in expanded]
                if not fresh:
                    break
                expanded.update(fresh)
                rows = [row for code in self.encoding.codes(fresh) for row in self.encoding.neighbours(code)]
                configs = list(dict.fromkeys([*configs, *self.encoding.valid(rows)]))
            self._favourites = self._by_prior(configs)[:FAVOURITES]
        return self._favourites

    def _by_prior(self, configs: list[Config]) -> list[Config]:
        """Sorts the configurations by the prior, best first."""
        assert self.answers is not None
        return [configs[i] for i in _by_preference(self.answers.of(configs))]


def _by_preference(predictions: Predictions) -> np.ndarray:
    """Sorts the rows of predictions, best first."""
    worth = np.where(np.isfinite(predictions.log_throughput), predictions.log_throughput - predictions.risk, -np.inf)
    chance = np.where(np.isfinite(predictions.fits), predictions.fits, 1.0)
    return np.argsort(-(worth + CAUTION * np.log(np.maximum(chance, 1e-6))), kind="stable")


class SearchPosterior:
    """Posterior of the candidates after some trials.

    Log throughput is the rescaled estimate plus a Gaussian process. A rival model is the process alone; the two are
    weighted by how well they explain the trials (`surrogate.Mixture`). Log peak memory is modelled in the same way,
    where an OOM only means "more than the limit". Other failures have their own process. See docs/search.md.

    Args:
        surrogate_prior: prior of the space.
        trials: ordered by number; those without a measurement are pending.
    """

    def __init__(self, surrogate_prior: SurrogatePrior, trials: Sequence[Trial]) -> None:
        self.surrogate_prior = surrogate_prior
        self.encoding, self.features = surrogate_prior.encoding, surrogate_prior.features
        # Pending trials do not change what is drawn or fitted.
        finished = [trial for trial in trials if not trial.pending]
        self.rng = np.random.default_rng([surrogate_prior.seed, len(finished)])
        self.known = [t for t in finished if self.encoding.encode(t.config) is not None]
        self.seen = observe(self.encoding, self.known)
        pending = {trial.config for trial in trials if trial.pending}
        best = np.argsort(-self.seen.objective)[: min(LEADERS, int(self.seen.ok.sum()))]
        untried = remaining(self.encoding, finished, self.rng, sample=SAMPLE, around=self.seen.codes[best])
        self.candidates = self._thin(untried, best).joined(surrogate_prior.favourites())
        # Pending trials stay among the candidates, so that they can be conditioned on, but are not open.
        self.open = np.ones(len(self.candidates), dtype=bool)
        self.pending: list[int] = []
        if pending:
            self.pending = self.candidates.find(pending)
            self.open[self.pending] = False
        self.taken: list[int] = []
        """Candidates that count as measured."""
        if self.open.any():
            self._believe()

    def _thin(self, untried: Candidates, best: np.ndarray) -> Candidates:
        if len(untried) <= LIMIT:
            return untried
        near = [self.encoding.distances(untried.codes, self.seen.codes[i]) for i in best]
        rows = [np.argsort(distances, kind="stable")[: DRAWN // (2 * len(best))] for distances in near]
        rows.append(self.rng.choice(len(untried), size=DRAWN // 2, replace=False))
        return untried.take(np.unique(np.concatenate(rows)))

    def observe(self, index: int) -> None:
        """Conditions on the candidate's posterior mean."""
        self.taken.append(index)
        if self.speed is not None:
            self.speed.observe(index)

    def considered(self) -> np.ndarray:
        """Rows of the open candidates that are not set aside."""
        rows = np.flatnonzero(self.open)
        return rows[self.works[rows] >= min(SET_ASIDE, float(self.works[rows].max()))]

    def _believe(self) -> None:
        self.need: np.ndarray | None = None
        candidate_points = self.features.of(self.candidates.codes)
        points = self.features.of(self.seen.codes)
        everything = np.concatenate([points, candidate_points])
        predictions = None
        if (answers := self.surrogate_prior.answers) is not None:
            ahead = answers.of_candidates(self.candidates)
            predictions = answers.of([trial.config for trial in self.known]).joined(ahead)
        self.cost = self._costs(points, candidate_points)
        self.works = self._memory(points, candidate_points, everything, predictions) * self._others(
            points, candidate_points
        )
        """Probability of success of each candidate, shape (m,)."""
        self.best, self.speed = None, None
        rows = np.flatnonzero(self.seen.ok)
        values = self.seen.objective[rows]
        estimated = predictions is not None and np.isfinite(predictions.log_throughput).any()
        logs = all((t.measured.throughput or 0) > 0 for t in self.known if t.ok)
        if not len(rows) and not estimated:
            return
        scale = 1.0 if logs or not len(values) else max(float(values.std()), 1e-12)
        centre = float(values.mean()) if len(values) else 0.0
        values = (values - centre) / scale
        self.scale = scale
        units = {trial.measured.unit for trial in self.known if trial.ok}
        n, count = len(rows), len(candidate_points)
        ones = np.ones((n + count, 1))
        order = np.concatenate([rows, len(self.known) + np.arange(count)])
        models = []
        if logs and predictions is not None and np.isfinite(predictions.log_throughput[order]).any():
            shape_prior = self.surrogate_prior.shape_prior
            models.append(
                _estimated(
                    predictions.rows(order),
                    WITH_SHAPE if shape_prior else WITH_ESTIMATE,
                    share=shape_prior.weight if shape_prior else 1.0,
                    measured=n,
                    level=centre if units == {self.surrogate_prior.unit} else None,
                )
            )
        trust = sum(model.weight for model in models)
        none = np.zeros(n + count)
        models.append(PriorModel(mean=none, basis=LEVEL * ones, scales=WITHOUT, weight=1.0 - trust))
        if not n:
            models = models[:1]
        self.speed = throughput_model(models, points[rows], values, candidate_points)
        self.best = float(values.max()) if n else None

    def _memory(
        self, points: np.ndarray, candidate_points: np.ndarray, everything: np.ndarray, predictions: Predictions | None
    ) -> np.ndarray:
        """Probability that each candidate fits, shape (m,)."""
        measured = [_need(trial.measured) for trial in self.known]
        limit = self._limit(predictions)
        bound = 0.0 if limit is None else np.log(limit)
        values, signs, rows = [], [], []
        for row, (peak, over) in enumerate(measured):
            if over:
                values.append(max(np.log(peak), bound) if peak and limit else bound)
                signs.append(1.0)
            elif over is None:
                continue  # another failure does not determine memory
            elif peak and limit:
                values.append(np.log(peak))
                signs.append(0.0)
            else:
                values.append(bound)
                signs.append(-1.0)
            rows.append(row)
        shape_prior = self.surrogate_prior.shape_prior
        estimates = predictions if (limit is not None or shape_prior) and _any_memory(predictions) else None
        unconstrained = not any(sign >= 0 for sign in signs)
        if unconstrained and estimates is None:
            return np.ones(len(candidate_points))
        rows_all = np.array([*rows, *range(len(self.known), len(everything))], dtype=int)
        all_points = everything[rows_all]
        models = []
        middle_of = candidate_points.mean(axis=0)
        sign = self.features.memory_sign
        towards = (all_points - middle_of) * sign
        trust = 0.0 if estimates is None else shape_prior.weight if shape_prior else 0.9
        models.append(
            PriorModel(
                mean=bound - 0.7 + 0.7 * towards.sum(axis=1),
                basis=np.column_stack([np.ones(len(all_points)), 0.5 * towards[:, sign != 0]]),
                scales=MEMORY_WITHOUT,
                weight=1.0 - trust,
            )
        )
        if estimates is not None:
            # A measured peak is that of the reporting device; the fullest device decides whether it fits.
            exact = np.array([*(sign == 0 for sign in signs), *[False] * len(candidate_points)])
            estimate = np.where(exact, estimates.log_memory[rows_all], estimates.log_need[rows_all])
            middle = float(np.nanmean(estimate))
            estimate = np.where(np.isfinite(estimate), estimate, middle)
            basis = np.column_stack(
                [np.full(len(all_points), 0.15), 0.2 * (estimate - middle), estimates.memory_effects[rows_all]]
            )
            if shape_prior:  # as above: the common level is near the limit
                estimate = bound - 0.7 + estimate - middle
            scales = MEMORY_WITH_SHAPE if shape_prior else MEMORY_WITH
            models.append(PriorModel(mean=estimate, basis=basis, scales=scales, weight=trust))
        mixture = limit_model(
            models, points[rows], np.array(values, dtype=float), np.array(signs, dtype=float), candidate_points
        )
        if limit is not None:
            # A default prior does not know the scale: bounds alone only raise it, and its values would be too large.
            self.need = mixture.parts()[0][1] if shape_prior else mixture.mean
        chance = chance_below(mixture, bound + np.log(1.0 - self.surrogate_prior.headroom))
        if shape_prior and unconstrained:
            chance = NO_LIMIT + (1.0 - NO_LIMIT) * chance
        if predictions is not None:
            # Ruled out without a number, for example by more pipeline stages than blocks.
            hopeless = (predictions.fits == 0) & ~np.isfinite(predictions.log_need)
            chance = np.where(hopeless[-len(candidate_points) :], np.minimum(chance, HOPELESS), chance)
        return chance

    def _limit(self, predictions: Predictions | None) -> float | None:
        """Memory of a device, MiB; None if unknown."""
        limits = [t.measured.memory_limit_mib for t in self.known if t.measured.memory_limit_mib]
        if limits:
            return float(np.median(limits))
        peaks = [t.measured.peak_memory_mib for t in self.known if t.ok and t.measured.peak_memory_mib]
        if predictions is not None and _any_memory(predictions):
            # The need at which the estimate changes from fitting to not fitting.
            fits, needs = predictions.fits, predictions.log_need
            is_known = np.isfinite(needs)
            under, over = needs[is_known & (fits >= 0.5)], needs[is_known & (fits < 0.5)]
            if len(under) and len(over):
                return float(np.exp(0.5 * (under.max() + over.min())))
        return 1.1 * max(peaks) if peaks else None

    def _others(self, points: np.ndarray, candidate_points: np.ndarray) -> np.ndarray:
        """Probability not to fail for another reason than memory, shape (m,)."""
        failed = [_other_failure(t.measured) for t in self.known]
        rows = np.flatnonzero([failure is not None for failure in failed])
        bad = np.array([bool(failed[row]) for row in rows])
        if not bad.any():
            return np.ones(len(candidate_points))
        # Tendency to fail: 0 is even odds, and before any trial one in ten fails.
        basis = np.zeros((len(rows) + len(candidate_points), 0))
        model = PriorModel(mean=np.full(len(basis), -0.7), basis=basis, scales=FAILURE)
        mixture = limit_model([model], points[rows], np.zeros(len(rows)), np.where(bad, 1.0, -1.0), candidate_points)
        return chance_below(mixture, 0.0)

    def _costs(self, points: np.ndarray, candidate_points: np.ndarray) -> np.ndarray:
        """Expected time of a trial of each candidate relative to the mean, shape (m,)."""
        seconds = {row: t.measured.seconds_total or 0.0 for row, t in enumerate(self.known) if t.ok}
        rows = [row for row, duration in seconds.items() if duration > 0]
        if len(rows) < 4:
            return np.ones(len(candidate_points))
        logs = np.log([seconds[row] for row in rows])
        if logs.std() < 0.1:  # all cost the same
            return np.ones(len(candidate_points))
        rows = rows[-200:]
        logs = logs[-200:]
        kernel = Kernel(Scales(length=1.0, joint=0.2, additive=0.7), points.shape[1])
        none, noise = np.zeros((len(rows), 0)), np.full(len(rows), 0.2**2)
        posterior = Posterior(
            kernel,
            points[rows],
            logs - logs.mean(),
            noise,
            none,
            candidate_points,
            np.zeros((len(candidate_points), 0)),
        )
        return np.exp(posterior.mean)


def _estimated(
    predictions: Predictions, scales: Scales, *, share: float, measured: int, level: float | None
) -> PriorModel:
    """Model of log throughput based on an estimate.

    Args:
        predictions: at every point.
        scales: scales of the Gaussian process for the rest.
        share: share of the trust in estimates that it has.
        measured: number of points that were measured, which come first.
        level: log throughput that is 0 in the values to explain; None if the estimate may be in another unit. The mean is
            then 0 over the measured points, like the values, and the level is not evidence against the estimate.
    """
    estimate = predictions.log_throughput
    middle = np.nanmean(estimate)
    # Configurations without an estimate get a low one, so that they are not tried first.
    estimate = np.where(np.isfinite(estimate), estimate, np.nanquantile(estimate, 0.25))
    effects = predictions.effects
    has_effects = effects.shape[1] > 0
    if level is None or not has_effects:
        level = float(estimate[:measured].mean()) if measured else middle
        level_std = LEVEL
    else:
        level_std = STATED_LEVEL
    independent = None
    if np.isfinite(predictions.log_std).all():
        # The smallest remaining variance is common to all candidates: the error of the whole estimate.
        unexplained = np.maximum(predictions.log_std**2 - (effects**2).sum(axis=1), 0.0)
        independent = unexplained - unexplained.min()
    # Weights: a common factor, a power of the estimate, and its uncertain factors.
    basis = [np.full(len(estimate), level_std), SLOPE * (estimate - middle), effects]
    # Risks make a candidate less attractive; most trials are not slowed by one.
    mean = estimate - level
    mean[measured:] -= predictions.risk[measured:]
    return PriorModel(
        mean=mean,
        basis=np.column_stack(basis),
        scales=scales,
        independent=independent,
        weight=share * (STATED_TRUST if has_effects else TRUST),
    )


def _need(measurement: Measurement) -> tuple[float | None, bool | None]:
    """Peak memory, and True if it was too much; None if unknown."""
    if measurement.did_not_fit:
        return measurement.peak_memory_mib, True
    return measurement.peak_memory_mib, False if measurement.ok else None


def _any_memory(predictions: Predictions | None) -> bool:
    return predictions is not None and bool(np.isfinite(predictions.log_memory).any())


def _other_failure(measurement: Measurement) -> bool | None:
    """True if a trial failed for another reason than memory; None if unknown."""
    if measurement.status in (Status.OOM, Status.SKIPPED):
        return None
    return not measurement.ok or measurement.throughput is None or not np.isfinite(measurement.throughput)
