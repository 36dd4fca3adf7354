"""Search methods of other tools, each through its own library, for `bench/search.py`."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from redline.results import Status, Trial
from redline.space import Config
from redline.tuner.samplers.candidates import remaining
from redline.tuner.samplers.encoding import Encoding
from tables import Surface

Ask = Callable[[list[Trial]], Config | None]
"""Returns the next configuration for the trials so far; None if none is left."""


def peer_optuna(surface: Surface, seed: int, kind: str) -> Ask:
    """Optuna's own sampler, with failures as violated constraints.

    Without failed rows there is no constraint: its model would only double the time of a proposal.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    encoding = Encoding(surface.space)
    space: dict[str, Any] = {}
    for name, size, ordered in zip(encoding.names, encoding.sizes, encoding.ordered):
        int_ = optuna.distributions.IntDistribution(0, int(size) - 1)
        space[name] = int_ if ordered else optuna.distributions.CategoricalDistribution(range(int(size)))

    def constraints(trial: Any) -> tuple[float]:
        return (trial.user_attrs["failed"],)

    cls = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}[kind]
    fails = any(row.status is not Status.OK for row in surface.rows.values())
    options = {"constraints_func": constraints} if fails else {}
    study = optuna.create_study(sampler=cls(seed=seed, **options), direction="maximize")
    rng = np.random.default_rng(seed)

    def ask(done: list[Trial]) -> Config | None:
        if done:
            last = done[-1]
            code = encoding.encode(last.config)
            worked = [t.measurement.throughput for t in done if t.ok]
            value = last.measurement.throughput if last.ok else (min(worked) if worked else 0.0)
            study.add_trial(
                optuna.trial.create_trial(
                    params=dict(zip(encoding.names, code.tolist())),
                    distributions=space,
                    value=value,
                    user_attrs={"failed": -1.0 if last.ok else 1.0},
                    system_attrs={"constraints": (-1.0 if last.ok else 1.0,)} if fails else {},
                )
            )
        left = remaining(encoding, done, rng, sample=1)
        if not len(left):
            return None
        params = study.ask(space).params
        return left.closest(np.array([params[name] for name in encoding.names], dtype=np.int32), rng)

    return ask


def peer_hebo(surface: Surface, seed: int) -> Ask:
    """HEBO by suggest and observe, as called by ATorch: a failure is a throughput of 0."""
    import pandas as pd
    import torch

    with contextlib.redirect_stdout(io.StringIO()):
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO
    encoding = Encoding(surface.space)
    parameters = []
    for name, size, ordered in zip(encoding.names, encoding.sizes, encoding.ordered):
        if ordered:
            parameters.append({"name": name, "type": "int", "lb": 0, "ub": int(size) - 1})
        else:
            parameters.append({"name": name, "type": "cat", "categories": [str(i) for i in range(size)]})
    np.random.seed(seed)
    torch.manual_seed(seed)
    optimizer = HEBO(DesignSpace().parse(parameters), scramble_seed=seed)
    rng = np.random.default_rng(seed)

    def frame(code: np.ndarray) -> Any:
        values = {n: int(v) if o else str(v) for n, v, o in zip(encoding.names, code, encoding.ordered)}
        return pd.DataFrame([values])

    def ask(done: list[Trial]) -> Config | None:
        with contextlib.redirect_stdout(io.StringIO()):
            if done:
                last = done[-1]
                value = -last.measurement.throughput if last.ok else 0.0
                optimizer.observe(frame(encoding.encode(last.config)), np.array([[value]]))
            left = remaining(encoding, done, rng, sample=1)
            if not len(left):
                return None
            suggested = optimizer.suggest(n_suggestions=1).iloc[0]
        return left.closest(np.array([int(suggested[name]) for name in encoding.names], dtype=np.int32), rng)

    return ask


def peer_smac(surface: Surface, seed: int) -> Ask:
    """SMAC's default for hyperparameters: Sobol points for a quarter of a budget of 50, then a random forest of the logarithm
    and log EI, over the rows instead of SMAC's local search, which knows no set of valid rows.

    Needs `pip install smac`, which is not an extra of redline.
    """
    import tempfile

    from ConfigSpace import CategoricalHyperparameter, Configuration, ConfigurationSpace, OrdinalHyperparameter
    from smac import HyperparameterOptimizationFacade as Facade, Scenario

    encoding = Encoding(surface.space)
    parameters = ConfigurationSpace(seed=seed)
    for name, size, ordered in zip(encoding.names, encoding.sizes, encoding.ordered):
        kind = OrdinalHyperparameter if ordered else CategoricalHyperparameter
        parameters.add(kind(name, list(range(int(size)))))
    with tempfile.TemporaryDirectory() as folder:
        scenario = Scenario(parameters, output_directory=folder, deterministic=True, n_trials=50, seed=seed)
        model, acquisition = Facade.get_model(scenario), Facade.get_acquisition_function(scenario)
        initial = Facade.get_initial_design(scenario).select_configurations()
    rng = np.random.default_rng(seed)

    def configuration(row: Config) -> Any:
        return Configuration(parameters, dict(zip(encoding.names, encoding.encode(row).tolist())))

    rows = {row: configuration(row) for row in surface.rows}

    def ask(done: list[Trial]) -> Config | None:
        if len(done) < len(initial):
            code = np.array([initial[len(done)][name] for name in encoding.names], dtype=np.int32)
            return remaining(encoding, done, rng, sample=1).closest(code, rng)
        tried = {trial.config for trial in done}
        left = [row for row in surface.rows if row not in tried]
        if not left:
            return None
        worst = min((trial.measurement.throughput for trial in done if trial.ok), default=1.0)
        costs = np.array([-np.log(trial.measurement.throughput if trial.ok else worst) for trial in done])
        model.train(np.array([rows[trial.config].get_array() for trial in done]), costs[:, None])
        acquisition.update(model=model, eta=costs.min(), num_data=len(done))
        return left[int(np.argmax(acquisition([rows[row] for row in left])))]

    return ask


def peer_batch_search(surface: Surface, seed: int) -> Ask:
    """The method of DeepSpeed and Slapo: for each layout, the micro-batch doubles until it fails or slows down."""
    rng = np.random.default_rng(seed)
    layouts: dict[tuple, list[Config]] = {}
    for config in surface.rows:
        fixed = {k: v for k, v in config.items() if k not in ("micro_batch", "grad_accum", "dp")}
        layouts.setdefault(tuple(fixed.values()), []).append(config)
    groups = [sorted(group, key=lambda c: c.get("micro_batch", 0)) for group in layouts.values()]
    queue = [groups[i] for i in rng.permutation(len(groups))]
    skipped: list[Config] = []

    def ask(done: list[Trial]) -> Config | None:
        if done and queue:
            last, group = done[-1], queue[0]
            previous = [t for t in done[:-1] if t.config in groups_of[id(group)]]
            slower = (
                bool(previous)
                and last.ok
                and previous[-1].ok
                and (last.measurement.throughput < previous[-1].measurement.throughput)
            )
            if not last.ok or slower:
                skipped.extend(queue.pop(0))
        while queue and not queue[0]:
            queue.pop(0)
        if queue:
            return queue[0].pop(0)
        return skipped.pop(0) if skipped else None

    groups_of = {id(group): set(group) for group in queue}
    return ask


PEERS: dict[str, Callable[[Surface, int], Ask]] = {
    "optuna-tpe": lambda surface, seed: peer_optuna(surface, seed, "tpe"),
    "optuna-gp": lambda surface, seed: peer_optuna(surface, seed, "gp"),
    "hebo-atorch": peer_hebo,
    "smac": peer_smac,
    "batch-search": peer_batch_search,
}
