"""The default sampler uses an estimate, recovers from a wrong one, and avoids configurations that do not fit."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import redline as rl
from redline.results import Measurement, Status
from redline.space import Space
from redline.testing.samplers import boundless_space, failed, finished, ok, search
from redline.tuner.samplers import make_sampler
from redline.tuner.samplers.posterior import SearchPosterior, SurrogatePrior
from tiers import tiered

LIMIT = 1000.0


def make_space():
    space = Space()
    space.choice("micro_batch", [1, 2, 4, 8, 16, 32, 64], monotone_memory=1)
    space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1], monotone_memory=-1)
    space.choice("attention", ["eager", "sdpa", "flash_attention_2"])
    space.flag("fusion")
    return space


def speed(config):
    gains = {"eager": 1.0, "sdpa": 1.4, "flash_attention_2": 1.7}
    own = 1 + 0.04 * (int(config.id, 16) % 11 - 5) / 5  # an effect that no model with few parameters explains
    gain = gains[config["attention"]] * (1.25 if config["fusion"] else 1.0) * own
    return 100 * config["micro_batch"] ** 0.45 * gain * (1 - 0.3 * config["checkpoint_ratio"])


def need(config):
    return 150.0 + 60.0 * config["micro_batch"] * (1.3 - config["checkpoint_ratio"])


def outcome(config):
    if need(config) > LIMIT:
        return Measurement(status=Status.OOM, reason="does not fit", memory_limit_mib=LIMIT)
    return ok(speed(config), peak_memory_mib=need(config), memory_limit_mib=LIMIT)


class Estimate:
    """An estimate with random errors of about a tenth."""

    fits = None

    def __init__(self, config):
        off = np.random.default_rng(int(config.id, 16) % 2**32).normal(0, 0.1, 2)
        self.throughput = 3.0 * speed(config) ** 0.95 * float(np.exp(off[0]))
        self.peak_memory_mib = 1.1 * need(config) * float(np.exp(off[1]))
        self.fits = self.peak_memory_mib <= LIMIT


BEST = max(speed(config) for config in make_space() if need(config) <= LIMIT)


def reached(trials, after, seeds=6, **options):
    """Mean share of the best after so many trials, and the share of trials that failed."""
    shares, failures = [], []
    for seed in range(seeds):
        done = search(make_sampler("bayes", make_space(), seed, **options), outcome, trials)
        shares.append([max((t.measurement.throughput or 0) for t in done[:n]) / BEST for n in after])
        failures.append(np.mean([not t.ok for t in done]))
    return np.mean(shares, axis=0), float(np.mean(failures))


def quiet(message):
    pass


def test_with_an_estimate_a_handful_of_trials_suffices():
    (five, ten), failures = reached(10, (5, 10), seeds=1, prior=Estimate)
    assert five > 0.95
    assert ten > 0.98
    assert failures <= 0.3


def test_without_one_ten_trials_get_most_of_it_and_fewer_fail_than_by_chance():
    (ten,), failures = reached(10, (10,))
    assert ten > 0.9
    assert failures < np.mean([need(config) > LIMIT for config in make_space()])


@pytest.mark.parametrize("kind", ["random", "reversed"])
def test_a_wrong_prior_ends_no_worse_than_none(kind):
    noise = {config: float(np.exp(np.random.default_rng(i).normal())) for i, config in enumerate(make_space())}
    prior = noise.__getitem__ if kind == "random" else (lambda config: 1e6 / speed(config))
    (without,), _ = reached(24, (24,), seeds=2)
    (wrong,), _ = reached(24, (24,), seeds=2, prior=prior, warn=quiet)
    assert wrong > without - 0.02
    assert wrong > 0.95


BAD = {
    "nan": lambda config: float("nan"),
    "text": lambda config: "fast",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_useless_prior_is_ignored_with_one_warning(kind):
    messages = []
    sampler = make_sampler("bayes", make_space(), 0, prior=BAD[kind], warn=messages.append)
    done = search(sampler, outcome, 12)
    assert len(done) == 12
    assert len(messages) == 1
    assert "the prior predicts nothing for 210 of 210 configurations" in messages[0]
    assert "count as unknown" in messages[0]


def test_a_prior_that_raises_for_some_is_used_for_the_others():
    messages = []

    def prior(config):
        if config["attention"] == "eager":
            raise KeyError("no kernel of that name")
        return Estimate(config)

    sampler = make_sampler("bayes", make_space(), 0, prior=prior, warn=messages.append)
    done = search(sampler, outcome, 10)
    assert max(t.measurement.throughput or 0 for t in done) > 0.95 * BEST
    assert len(messages) == 1
    assert "nothing for 70 of 210 configurations" in messages[0] and "no kernel of that name" in messages[0]


class Network:
    """An estimate that overrates the network, and states that it is unsure of it."""

    def __init__(self, unsure):
        self.unsure = unsure

    def table(self, configs):
        far = np.array([config["tp"] > 8 for config in configs], dtype=float)
        size = np.array([config["micro_batch"] for config in configs])
        made = {"throughput": size**0.3 * np.where(far, 2.0, 1.0), "log_throughput_std": np.hypot(0.1, far)}
        if self.unsure:
            made["log_throughput_effects"] = np.column_stack([far, np.zeros(len(configs))])
        return type("Table", (), made)


@pytest.mark.parametrize("seed", range(2))
def test_one_trial_settles_a_shared_uncertainty_of_the_estimate(seed):
    space = Space()
    space.choice("tp", [1, 2, 4, 8, 16, 32, 64, 128])
    space.choice("micro_batch", [1, 2, 3, 4, 5, 6, 7, 8])

    def slow_network(config):
        return ok(config["micro_batch"] ** 0.3 * (0.25 if config["tp"] > 8 else 1.0))

    spent = {}
    for unsure in (True, False):
        sampler = make_sampler("bayes", space, seed, prior=Network(unsure))
        done = search(sampler, slow_network, 24)
        assert done[0].config["tp"] > 8  # as the estimate predicts
        spent[unsure] = next(n for n, trial in enumerate(done) if trial.config["tp"] <= 8)
    assert spent[True] <= 3
    assert spent[True] < spent[False]


def test_tune_takes_a_prior_records_its_predictions_and_says_once_what_is_wrong():
    def half(config):
        return Estimate(config) if config["fusion"] else float("nan")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = rl.tune(outcome, make_space(), trials=8, prior=half, patience=0, isolate=False)
    assert sum("the prior predicts nothing for 105 of 210" in note for note in result.notes) == 1, result.notes
    for trial in result.all_trials:
        known = Estimate(trial.config) if trial.config["fusion"] else None
        if known is None:
            assert trial.predicted_throughput is None
        else:
            assert trial.predicted_throughput == pytest.approx(known.throughput)
            assert trial.predicted_memory_mib == pytest.approx(known.peak_memory_mib)


def test_other_samplers_say_that_they_have_no_use_for_a_prior():
    result = rl.tune(outcome, make_space(), trials=3, sampler="random", prior=Estimate, isolate=False)
    assert any("'random' does not use a prior" in note for note in result.notes)


def billions():
    """10^9 raw points, about half of which a rule excludes."""
    space = Space()
    knobs = [space.choice(f"k{i}", list(range(1, 11))) for i in range(9)]
    space.require(sum(knobs[1:], knobs[0]) <= 50, "room")
    return space


@pytest.mark.parametrize("declare", tiered([billions], [boundless_space]))
def test_a_vast_space_is_searched_in_layers(declare):
    space = declare()
    names = [knob.name for knob in space.knobs]

    def fn(config):
        if config[names[0]] + config[names[1]] > 16:
            return failed(Status.OOM)
        return ok(float(np.exp(sum(config[name] for name in names[:6]) / 10)))

    done = search(make_sampler("bayes", space, 0), fn, 16)
    chance = search(make_sampler("random", space, 0), fn, 16)
    best, by_chance = (max(t.measurement.throughput or 0 for t in each) for each in (done, chance))
    assert best > 1.3 * by_chance


def test_in_a_vast_space_an_estimate_draws_the_candidates():
    """No sample of a few thousand contains the best hundred of 10^9 points: those that the prior rates highly must be sought."""
    space = billions()

    def worth(config):
        return float(np.exp(sum((config[f"k{i}"] - 6) ** 2 for i in range(9)) / -20))

    (first,) = make_sampler("bayes", space, 0, prior=worth).propose([])
    drawn = sorted(worth(config) for config in space.sample(2048, 5))
    assert worth(first) > 1.15 * drawn[-1]


class Large:
    """A space of 20,736 configurations, more than are scored in every round, and an estimate with a table of all of them."""

    def __init__(self, refuses=0):
        self.space = Space()
        for i in range(4):
            self.space.choice(f"k{i}", list(range(12)))
        self.asked = []
        self.refuses = refuses

    def worth(self, config):
        return float(np.exp(-sum((config[f"k{i}"] - 7) ** 2 for i in range(4)) / 100))

    def table(self, configs):
        if 0 < self.refuses < len(configs):
            raise MemoryError(f"{len(configs)} are too many")
        self.asked.append(len(configs))
        return type("Table", (), {"throughput": np.array([self.worth(config) for config in configs])})

    def measure(self, config):
        return ok(1 + self.worth(config))


def test_a_table_is_asked_for_a_listed_space_once():
    large = Large()
    done = search(make_sampler("bayes", large.space, 0, prior=large), large.measure, 6)
    assert large.asked == [12**4]
    assert done[0].config == large.space.config({f"k{i}": 7 for i in range(4)}), "the best of all that it knows"


def test_a_risk_lowers_the_preference_and_not_what_a_trial_is_compared_with():
    """A stall may slow the row that is predicted fastest; if it was not slowed, it is as fast as predicted."""
    space = Space()
    space.choice("pp", [1, 2, 3, 4])
    predicted = {1: 100.0, 2: 110.0, 3: 60.0, 4: 50.0}

    class Risky:
        unit = "tokens/s"

        def table(self, configs):
            return SimpleNamespace(
                throughput=np.array([predicted[config["pp"]] for config in configs]),
                log_throughput_risk=np.array([0.3 if config["pp"] == 2 else 0.0 for config in configs]),
                log_throughput_effects=np.full((len(configs), 1), 0.05),
            )

    prior = SurrogatePrior(space, prior=Risky())
    order = [config["pp"] for config in make_sampler("bayes", space, 0, prior=Risky()).propose([], 4)]
    assert order[:2] == [1, 2]
    done = finished([space.config(pp=2)], lambda config: ok(110.0, unit="tokens/s"))
    posterior = SearchPosterior(prior, done)
    assert posterior.speed.mean[0] == pytest.approx(np.log(100 / 110), abs=0.02)


def test_a_table_of_the_wrong_length_is_asked_one_by_one():
    class Prior:
        def table(self, configs):
            return type("Table", (), {"throughput": np.ones(3)})

        def __call__(self, config):
            return Estimate(config)

    messages = []
    done = search(make_sampler("bayes", make_space(), 0, prior=Prior(), warn=messages.append), outcome, 6)
    assert max(t.measurement.throughput or 0 for t in done) > 0.9 * BEST
    assert len(messages) == 1 and "its table raised" in messages[0]
