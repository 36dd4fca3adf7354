"""Optuna's samplers: TPE and Gaussian process, over the trials so far as an Optuna study."""

from dataclasses import replace
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler as OptunaGPSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from ...results.storage import quiet
from ...space import Config
from .candidates import Candidates, ModelSampler, subsample
from .containment import one_thread
from .encoding import ABSENT, Encoding, Observations


def distributions(encoding: Encoding) -> dict[str, BaseDistribution]:
    """Returns a distribution per free knob, over its codes: ordered knobs as integers, all others as categories.

    An absent conditional knob gets a code below its lowest value, so that every trial has every parameter: Optuna's
    models ignore trials that lack one.
    """
    by_name: dict[str, BaseDistribution] = {}
    for column, name in enumerate(encoding.names):
        low, high = (ABSENT if encoding.optional[column] else 0), int(encoding.sizes[column]) - 1
        if encoding.ordered[column]:
            by_name[name] = IntDistribution(low, high)
        else:
            by_name[name] = CategoricalDistribution(range(low, high + 1))
    return by_name


def build_study(sampler: BaseSampler, encoding: Encoding, seen: Observations) -> Study:
    """Returns an in-memory study that maximises the objective and contains every trial seen.

    Failures are completed trials of poor value that violate a constraint. The study is built again for each proposal,
    which takes milliseconds: a sampler without state proposes the same in a resumed run.
    """
    with quiet():
        study = optuna.create_study(sampler=sampler, direction="maximize")
        space = distributions(encoding)
        study.add_trials([_trial(space, seen, row) for row in range(len(seen.codes))])
    return study


def _trial(space: dict[str, BaseDistribution], seen: Observations, row: int) -> FrozenTrial:
    params = dict(zip(space, seen.codes[row].tolist()))
    if seen.pending[row]:
        return create_trial(state=TrialState.RUNNING, params=params, distributions=space)
    # A sampler expects constraints in every trial or in none, and modelling them takes time.
    constraints = {"works": float(seen.violation[row])} if seen.failed.any() else None
    value = seen.poor if seen.failed[row] else float(seen.objective[row])
    return create_trial(params=params, distributions=space, value=value, constraints=constraints)


def ask(study: Study, encoding: Encoding) -> np.ndarray:
    """Code that the study's sampler proposes, shape (knobs,); it need not be valid or new."""
    with quiet():
        params = study.ask(distributions(encoding)).params
    return np.array([params[name] for name in encoding.names], dtype=np.int32)


class TPESampler(ModelSampler):
    """Draws from regions dense with good trials and sparse in bad, failed and pending ones.

    Multivariate TPE with the constant liar (https://arxiv.org/abs/2304.11127); failures violate a constraint and count
    as bad. Chooses the valid and new configuration that is nearest to the point that TPE proposes.
    """

    name = "tpe"

    def choose(self, candidates: Candidates, seen: Observations, rng: np.random.Generator) -> Config:
        seed = int(rng.integers(2**31))
        tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)
        study = build_study(tpe, self._encoding, _without_surplus_failures(seen))
        return candidates.closest(ask(study, self._encoding), rng)


def _without_surplus_failures(seen: Observations) -> Observations:
    """Returns the trials with failures beyond twice the successes marked as pending.

    TPE counts a tenth of all finished trials as good. If most of them failed (a space may be full of configurations
    that are known not to fit) the good ones would include every success, fast or slow, and failures too. Pending
    trials always count as bad.
    """
    surplus = np.flatnonzero(seen.failed)[2 * int(seen.ok.sum()) :]
    violation = seen.violation.copy()
    violation[surplus] = np.nan
    return replace(seen, violation=violation)


LIMIT = 4096
"""Largest number of candidates that are scored."""
CHUNK = 256
"""Number of candidates that are scored at once: memory grows with this times trials times knobs."""


class GPSampler(ModelSampler):
    """Chooses the candidate with the largest expected improvement times probability of success.

    Optuna's Gaussian process with a Matern 5/2 kernel and log constrained expected improvement
    (https://arxiv.org/abs/2310.20708). A second process models how far trials are from failing, and pending trials are
    integrated over. Optuna maximises the acquisition function over a box; here it is evaluated on the valid
    configurations themselves, which is both exact and faster.
    """

    name = "gp"

    def choose(self, candidates: Candidates, seen: Observations, rng: np.random.Generator) -> Config:
        scored = subsample(candidates, LIMIT, seen, rng)
        gp = _ConfinedGP(scored, seed=int(rng.integers(2**31)))
        with one_thread():
            code = ask(build_study(gp, self._encoding, seen), self._encoding)
        return candidates.closest(code, rng)


class _ConfinedGP(OptunaGPSampler):
    """A GPSampler whose acquisition function is maximised over given candidates."""

    def __init__(self, candidates: Candidates, *, seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1, warn_independent_sampling=False)
        self._candidates = candidates
        self._names: tuple[str, ...] = ()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self._names = tuple(search_space)
        return super().sample_relative(study, trial, search_space)

    # Optuna allows overriding this method, but later versions may not call it. `closest` ensures even then
    # that only valid and new configurations are proposed.
    def _optimize_acqf(self, acqf: Any, best_params: np.ndarray | None) -> np.ndarray:
        points = _normalised(self._candidates.encoding, self._candidates.codes, self._names)
        scores = [acqf.eval_acqf_no_grad(points[i : i + CHUNK]) for i in range(0, len(points), CHUNK)]
        return points[np.argmax(np.concatenate(scores))]


def _normalised(encoding: Encoding, codes: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """Codes as Optuna's processes take them, shape (n, names): integers in the middle of equal parts of 0 to 1,
    categories as their index.
    """
    columns = [encoding.names.index(name) for name in names]
    start = codes[:, columns] + encoding.optional[columns]
    sizes = encoding.sizes[columns] + encoding.optional[columns]
    return np.where(encoding.ordered[columns], (start + 0.5) / sizes, start.astype(np.float64))
