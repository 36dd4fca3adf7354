"""The trials so far as an Optuna study, for the samplers that Optuna brings."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from .encoding import ABSENT, Encoding
from .observations import Observations


def distributions(encoding: Encoding) -> dict[str, BaseDistribution]:
    """A distribution per free knob, over its codes: ordered knobs as integers, all others as categories.

    A conditional knob is absent below its lowest value, so that every trial has every parameter: Optuna's
    models leave trials aside that lack one.
    """
    out: dict[str, BaseDistribution] = {}
    for column, name in enumerate(encoding.names):
        low, high = (ABSENT if encoding.optional[column] else 0), int(encoding.sizes[column]) - 1
        if encoding.ordered[column]:
            out[name] = IntDistribution(low, high)
        else:
            out[name] = CategoricalDistribution(range(low, high + 1))
    return out


def build_study(sampler: BaseSampler, encoding: Encoding, seen: Observations) -> Study:
    """A study in memory that maximises the objective and holds every trial seen.

    Failures are told as completed trials of poor value that violate a constraint. It is built afresh for
    each proposal, which costs milliseconds: a sampler that keeps nothing proposes the same in a resumed run.
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
    # A sampler takes constraints for granted in every trial or in none, and models them at a cost.
    constraints = {"works": float(seen.violation[row])} if seen.failed.any() else None
    value = seen.poor if seen.failed[row] else float(seen.objective[row])
    return create_trial(params=params, distributions=space, value=value, constraints=constraints)


def ask(study: Study, encoding: Encoding) -> np.ndarray:
    """The code that the study's sampler proposes, shape (knobs,); it need not be valid or new."""
    with quiet():
        params = study.ask(distributions(encoding)).params
    return np.array([params[name] for name in encoding.names], dtype=np.int32)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna from logging that a study was created, and puts its verbosity back."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
