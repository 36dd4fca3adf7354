"""Without a named model, the standard names of knobs guide the search; wrong ones mislead it only briefly."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from redline.estimator import Estimator, Shape, TrainingSetup, find_hardware
from redline.results import Measurement, Status, Trial
from redline.space import Space
from redline.tuner.default_prior import default_prior
from redline.tuner.samplers import make_sampler
from redline.tuner.samplers.posterior import SearchPosterior, SurrogatePrior

H100 = find_hardware("h100-80gb")
TOTAL = 64


def make_space(names=("micro_batch", "tp", "pp", "zero", "checkpoint_ratio")):
    """A space for 16 devices with these names of its five knobs."""
    micro, tp, pp, zero, ratio = names
    space = Space()
    size = space.choice(micro, [1, 2, 4, 8, 16], monotone_memory=1 if micro == "micro_batch" else 0)
    ways = space.choice(tp, [1, 2, 4, 8])
    stages = space.choice(pp, [1, 2, 4])
    space.choice(zero, [0, 1, 2, 3])
    space.choice(ratio, [0.0, 0.5, 1.0])
    standard = "tp" in names
    replicas = space.derive("dp" if standard else "copies", 16 // (ways * stages))
    passes = space.derive("grad_accum" if standard else "passes", TOTAL // (size * replicas))
    space.require(size * replicas * passes == TOTAL, "global batch")
    return space


SPACE = make_space()
VAGUE = default_prior(SPACE, 16, H100)


def table(**changes):
    """The prior's table of configurations that differ in one knob, from its first value to its last."""
    ((name, values),) = changes.items()
    base = {"micro_batch": 2, "tp": 2, "pp": 1, "dp": 8, "zero": 0, "checkpoint_ratio": 0.0, "grad_accum": 4}
    return VAGUE.table([base | {name: value} for value in values])


def cluster(limit_mib=78_000.0):
    """Measurements of a simulated cluster of 16 H100 with a model of 13 B parameters, a size that the prior does not assume."""
    shape = Shape(layers=40, hidden=5120, heads=40, intermediate=13824, vocabulary=32000)
    setup = TrainingSetup(devices=16, seq_len=2048, global_batch=TOTAL, memory_limit_mib=limit_mib)
    estimator, random = Estimator(shape, H100, setup), np.random.default_rng(3)
    for name in ("_time", "_memory"):
        correction = getattr(estimator, name)
        scale = np.sqrt(np.diag(correction.covariance))
        shift = np.clip(
            random.multivariate_normal(np.zeros(len(scale)), correction.covariance), -1.5 * scale, 1.5 * scale
        )
        setattr(estimator, name, dataclasses.replace(correction, theta=correction.theta + shift))
    made = estimator.table(list(SPACE))
    return {
        config: Measurement(status=Status.OK, throughput=speed, unit="tokens/s")
        if need <= limit_mib
        else Measurement(status=Status.OOM, reason="does not fit")
        for config, speed, need in zip(SPACE, made.throughput.tolist(), made.fullest_memory_mib.tolist())
    }


def search(measure, prior, trials, seed=0, space=SPACE):
    """Returns the trials of a search with the default sampler."""
    sampler = make_sampler("bayes", space, seed=seed, prior=prior)
    done: list[Trial] = []
    while len(done) < trials:
        (config,) = sampler.propose(done, 1)
        done.append(Trial(number=len(done), config=config, measurement=measure(config)))
    return done


def share(trials, best):
    """The best throughput of the trials as a share of `best`."""
    return max((trial.throughput for trial in trials if trial.ok), default=0.0) / best


def ok(throughput):
    return Measurement(status=Status.OK, throughput=throughput, unit="it/s")


def test_the_default_prior_needs_two_varying_standard_knobs():
    assert default_prior(make_space(("a", "b", "c", "d", "e")), 16, H100) is None
    one = Space()
    one.choice("micro_batch", [1, 2, 4])
    one.choice("tp", [2])
    one.choice("rate", [0.1, 0.2])
    assert default_prior(one, 8, H100) is None
    one.choice("pp", [1, 2])
    assert default_prior(one, 8, H100) is not None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tp", ["row", "column"]),
        ("zero", [0, 1, 7]),
        ("checkpoint_ratio", [0, 50, 100]),
        ("precision", ["single", "double"]),
        ("fusion", ["on", "off"]),
        ("micro_batch", [0, 1]),
    ],
)
def test_a_standard_name_with_other_values_is_no_standard_knob(name, values):
    space = Space()
    space.choice(name, values)
    space.choice("offload", ["none", "optimizer"])
    assert default_prior(space, 8, H100) is None
    space.choice("sequence_parallel", [False, True])
    found = default_prior(space, 8, H100).table(list(space))
    assert np.isfinite(found.throughput).all()
    for value in values[1:]:  # these values make no difference
        same = [config for config in space if config[name] in (values[0], value)]
        throughput = default_prior(space, 8, H100).table(same).throughput
        assert throughput[: len(same) // 2] == pytest.approx(throughput[len(same) // 2 :])


def test_tuning_a_callable_imports_no_torch():
    code = (
        "import sys, redline\n"
        "space = redline.Space()\n"
        "space.choice('micro_batch', [1, 2, 4]); space.choice('tp', [1, 2]); space.flag('fusion')\n"
        "redline.tune(lambda config: float(config['micro_batch']), space, trials=5, isolate=False)\n"
        "assert 'redline.tuner.default_prior' in sys.modules\n"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("seed", range(2))
def test_knobs_that_mean_something_else_cost_a_few_trials_and_nothing_at_the_end(seed):
    """Values that the names promise to be fast are slow, and values that the names call large fit."""
    world = cluster()
    ranked = sorted(world, key=lambda config: world[config].throughput if world[config].ok else 0.0)

    def backwards(config):
        place = ranked.index(config)
        return ok(float(np.exp(-3.0 * place / len(ranked))))

    best = max(backwards(config).throughput for config in world)
    trials = search(backwards, VAGUE, 30, seed)
    assert share(trials[:10], best) > 0.6
    assert share(trials, best) > 0.9


def test_the_default_prior_is_dropped_when_trials_contradict_it():
    throughput = VAGUE.table(list(SPACE)).throughput
    order = np.argsort(throughput)
    rows = [order[int(place)] for place in np.linspace(0, len(order) - 1, 8)]
    configs = list(SPACE)

    def weight(power):
        trials = [
            Trial(
                number=number,
                config=configs[row],
                measurement=ok(float((throughput[row] / throughput.mean()) ** power)),
            )
            for number, row in enumerate(rows)
        ]
        return SearchPosterior(SurrogatePrior(SPACE, prior=VAGUE), trials).speed.weights[0]

    assert weight(1.0) > 0.9
    assert weight(-1.0) < 0.1
