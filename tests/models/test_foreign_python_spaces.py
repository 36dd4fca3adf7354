"""Spaces that other tools state in Python: Optuna's distributions and functions, Ray Tune's domains."""

import math

import optuna
import pytest
from foreign import left, read, values
from ray import tune
from redline.base.errors import UsageError

# -- Optuna --------------------------------------------------------------------------------------------------


def test_optunas_distributions_become_values():
    of = optuna.distributions
    found = read(
        {
            "lr": of.FloatDistribution(1e-4, 1.0, log=True),
            "batch": of.IntDistribution(8, 32, step=8),
            "width": of.IntDistribution(1, 1024, log=True),
            "drop": of.FloatDistribution(0.1, 0.3, step=0.1),
            "opt": of.CategoricalDistribution(["adam", "sgd"]),
            "mixed": of.CategoricalDistribution([None, 1]),
        }
    )
    assert values(found.space) == {
        "lr": (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        "batch": (8, 16, 24, 32),
        "width": (1, 6, 32, 180, 1024),
        "drop": (0.1, 0.2, 0.3),
        "opt": ("adam", "sgd"),
    }
    assert list(left(found)) == ["mixed"]
    assert sum("are tried of" in each for each in found.notes) == 2


def conditional(trial):
    kind = trial.suggest_categorical("kind", ["adam", "sgd", "lion"])
    if kind == "sgd":
        trial.suggest_float("momentum", 0.0, 1.0)
    elif trial.suggest_categorical("amsgrad", [False, True]):
        trial.suggest_int("window", 1, 3)
    layers = trial.suggest_int("layers", 1, 3)
    for at in range(layers):
        trial.suggest_int(f"width_{at}", 4, 8)
    if kind == "sgd" and layers == 3:
        trial.suggest_int("both", 0, 1)
    trial.suggest_float("depends", 0, layers)


def test_a_function_of_a_trial_gives_its_parameters_with_their_conditions():
    found = read(conditional)
    assert set(left(found)) == {"both", "depends"}
    seen = set()
    for config in found.space:
        expected = {"kind", "layers", *(f"width_{at}" for at in range(config["layers"]))}
        expected |= {"momentum"} if config["kind"] == "sgd" else {"amsgrad"}
        expected |= {"window"} if config.get("amsgrad") else set()
        assert set(config) == expected
        seen.add(config["kind"])
    assert seen == {"adam", "sgd", "lion"}


def test_a_function_is_ended_where_it_reports_and_refused_where_it_fails():
    def objective(trial):
        trial.suggest_int("a", 0, 1)
        trial.report(1.0, step=0)
        if trial.should_prune():
            raise optuna.TrialPruned
        raise AssertionError("it went on to train")

    assert values(read(objective).space) == {"a": (0, 1)}
    with pytest.raises(UsageError, match=r"broken\(trial\) failed: ZeroDivisionError"):
        read(broken)
    with pytest.raises(UsageError, match="suggests nothing"):
        read(lambda trial: None)
    with pytest.raises(UsageError, match="must take an Optuna trial and nothing else"):
        read(lambda: None)


def broken(trial):
    return 1 / 0


# -- Ray Tune ------------------------------------------------------------------------------------------------


def test_rays_space_becomes_values():
    found = read(
        {
            "lr": tune.loguniform(1e-4, 1.0),
            "batch": tune.choice([16, 32]),
            "amp": tune.grid_search([True, False]),
            "layers": tune.randint(1, 5),
            "drop": tune.quniform(0.0, 0.5, 0.25),
            "tens": tune.qrandint(10, 40, 10),
            "depth": tune.lograndint(1, 1000),
            "shift": tune.randn(0, 2),
            "model": {"width": tune.choice([64, 128]), "kind": "mlp"},
            "late": tune.sample_from(lambda config: config["lr"]),
            "stages": [1, 2],
        }
    )
    assert values(found.space) == {
        "lr": (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        "batch": (16, 32),
        "amp": (True, False),
        "layers": (1, 2, 3, 4),
        "drop": (0.0, 0.25, 0.5),
        "tens": (10, 20, 30, 40),
        "depth": (1, 6, 32, 180, 999),
        "shift": (-4.0, -2.0, 0.0, 2.0, 4.0),
        "model_width": (64, 128),
        "model_kind": ("mlp",),
    }
    assert set(left(found)) == {"late", "stages"} and "sample_from draws by a function" in left(found)["late"]


def test_values_for_ray_are_ones_that_ray_may_draw():
    domain = tune.qloguniform(0.1, 100, 0.1)
    found = values(read({"x": domain}).space)["x"]
    assert all(domain.is_valid(each) and math.isclose(each / 0.1, round(each / 0.1)) for each in found)
