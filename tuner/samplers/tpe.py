"""Optuna's tree-structured Parzen estimator."""

from dataclasses import replace

import numpy as np
from optuna.samplers import TPESampler as OptunaTPESampler

from ...space import Config
from .candidates import Candidates
from .encoding import Encoding
from .model_based import ModelSampler
from .observations import Observations
from .optuna_study import ask, build_study


class TPESampler(ModelSampler):
    """Draws where good trials are dense and bad, failed and pending ones are not.

    Multivariate TPE with the constant liar (https://arxiv.org/abs/2304.11127); failures violate a
    constraint and count among the bad. Of the points that TPE draws, the best that is valid and new is
    taken; where none is, the nearest one that is.
    """

    name = "tpe"

    def choose(self, candidates: Candidates, seen: Observations, rng: np.random.Generator) -> Config:
        tpe = _ConfinedTPE(candidates, seed=int(rng.integers(2**31)))
        study = build_study(tpe, self._encoding, _without_surplus_failures(seen))
        return candidates.closest(ask(study, self._encoding), rng)


def _without_surplus_failures(seen: Observations) -> Observations:
    """The trials with all failures beyond twice the successes as pending ones.

    TPE counts a tenth of all finished trials as good. Where most of them failed (a space may be full of
    configurations that are known not to fit) that would be every success, fast or slow, and failures too.
    Pending trials count as bad whatever their number.
    """
    surplus = np.flatnonzero(seen.failed)[2 * int(seen.ok.sum()) :]
    violation = seen.violation.copy()
    violation[surplus] = np.nan
    return replace(seen, violation=violation)


class _ConfinedTPE(OptunaTPESampler):
    """TPE that prefers, among the points it draws, those that can be proposed."""

    def __init__(self, candidates: Candidates, *, seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True, n_ei_candidates=64)
        self._candidates = candidates

    # Optuna calls this with the points it drew. Were it not to any longer, `closest` would still see to it
    # that only valid and new configurations are proposed.
    def _compute_acquisition_func(self, samples: dict[str, np.ndarray], *estimators: object) -> np.ndarray:
        score = super()._compute_acquisition_func(samples, *estimators)
        encoding: Encoding = self._candidates.encoding
        # Optuna numbers categories from 0; the codes of a conditional knob start at ABSENT.
        codes = np.stack([samples[name] for name in encoding.names], axis=1).astype(np.int32)
        codes -= (encoding.optional & ~encoding.ordered).astype(np.int32)
        found: dict[bytes, bool] = {}
        for i in np.argsort(-score):
            key = codes[i].tobytes()
            if key not in found:
                found[key] = self._candidates.lookup(codes[i]) is not None
            if found[key]:
                score[i] = np.inf
                break
        return score
