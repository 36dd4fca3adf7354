"""Tests of single samplers and of their registry; the conformance suite has those of all samplers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from redline.base.errors import MissingDependency, UsageError
from redline.results import Status
from redline.space import Space
from redline.testing.samplers import (
    conditional_space,
    failed,
    finished,
    ok,
    plausible,
    search,
    small_space,
    vast_space,
    wide_space,
)
from redline.tuner.samplers import make_sampler, sampler_names
from redline.tuner.samplers.containment import contained


def python(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter and returns its output."""
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570)
    assert run.returncode == 0, run.stderr
    return run.stdout


PROPOSALS = """
import json
import optuna, scipy.optimize, scipy.sparse, scipy.stats, torch
from redline.tuner.samplers import make_sampler, sampler_names
from redline.testing.samplers import finished, plausible, process_state, wide_space
space = wide_space()
trials = finished(space.sample(14, 9), plausible)
proposals, changes = {}, {}
for name in sampler_names():
    options = {"epochs": 20} if name == "hebo" else {}
    before = process_state()
    sampler = make_sampler(name, space, 3, **options)
    proposals[name] = [config.id for config in sampler.propose(trials, 2)]
    after = process_state()
    changes[name] = [what for what in before if before[what] != after[what]]
"""


@pytest.fixture(scope="module")
def fresh():
    """Proposals of every sampler in a fresh process with another hash seed; no sampler was imported before."""
    pytest.importorskip("hebo")
    program = "import torch\ntorch.set_num_threads(2)" + PROPOSALS + "print(json.dumps([proposals, changes]))"
    proposals, changes = json.loads(python(program, PYTHONHASHSEED="4321"))
    return {"proposals": proposals, "changes": changes}


class TestRegistry:
    def test_every_name_makes_a_sampler_of_that_name(self):
        assert sampler_names() == ("bayes", "random", "grid", "tpe", "gp", "hebo")
        for name in ("bayes", "random", "grid", "tpe", "gp"):
            assert make_sampler(name, small_space(), 1).name == name

    def test_an_unknown_name_is_answered_with_the_nearest(self):
        with pytest.raises(UsageError, match="unknown sampler 'tpee'; did you mean 'tpe'"):
            make_sampler("tpee", small_space())

    def test_an_unknown_option_is_answered_with_the_nearest(self):
        with pytest.raises(UsageError, match="option of the sampler 'tpe' 'start'; did you mean 'startup'"):
            make_sampler("tpe", small_space(), start=3)
        with pytest.raises(UsageError, match="unknown option of the sampler 'random'"):
            make_sampler("random", small_space(), startup=3)

    @pytest.mark.parametrize("startup", [1, 0, -4])
    def test_too_few_trials_to_start_with_are_refused(self, startup):
        with pytest.raises(UsageError, match=f"at least 2.*{startup}"):
            make_sampler("tpe", small_space(), startup=startup)

    @pytest.mark.slow
    def test_proposals_do_not_depend_on_the_hash_seed(self, fresh):
        here: dict[str, object] = {}
        exec(PROPOSALS, here)
        assert fresh["proposals"] == here["proposals"]
        assert set(fresh["proposals"]) == set(sampler_names())

    @pytest.mark.slow
    def test_importing_them_leaves_threads_warnings_and_generators_alone(self, fresh):
        assert fresh["changes"] == {name: [] for name in sampler_names()}

    def test_neither_hebo_nor_torch_is_imported_for_the_others(self):
        code = """
import sys
from redline.tuner.samplers import make_sampler
from redline.testing.samplers import small_space
make_sampler("random", small_space()).propose([], 2)
print([name for name in ("hebo", "gpytorch", "sklearn") if name in sys.modules])
"""
        assert python(code).strip() == "[]"


class TestRandom:
    def test_every_configuration_is_as_likely(self):
        space = small_space()
        first = [make_sampler("random", space, seed).propose([])[0] for seed in range(700)]
        counts = np.array([first.count(config) for config in space])
        assert counts.sum() == 700
        assert ((counts - 50) ** 2 / 50).sum() < 39  # chi-squared, 13 degrees of freedom: 99.98 %


class TestGrid:
    def test_the_whole_space_comes_once_in_a_stable_order(self):
        space = conditional_space()
        order = make_sampler("grid", space).propose([], 99)
        assert sorted(map(space.index, order)) == list(range(len(space)))
        assert make_sampler("grid", space, 7).propose([], 99) == order
        trials = finished(order[1:3], plausible)
        assert make_sampler("grid", space).propose(trials, 2) == [order[0], order[3]]

    def test_any_beginning_of_the_walk_is_spread_over_the_first_knob(self):
        space = Space()
        space.choice("micro_batch", [1, 2, 4, 8, 16])
        space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1])
        space.flag("fusion")
        first = make_sampler("grid", space).propose([], 10)
        counts = [sum(config["micro_batch"] == value for config in first) for value in (1, 2, 4, 8, 16)]
        assert min(counts) >= 1
        assert max(counts) <= 3

    def test_a_vast_space_is_not_gone_through_for_its_first_configurations(self):
        space = vast_space()
        sampler = make_sampler("grid", space)
        started = time.process_time()
        assert len(set(sampler.propose([], 3))) == 3
        assert time.process_time() - started < 1


class TestGP:
    def test_memory_of_successes_warns_of_the_wall(self):
        space = Space()
        space.choice("micro_batch", [1, 2, 4, 8, 16, 32, 64, 128])
        space.choice("checkpoint_ratio", [0, 0.25, 0.5, 0.75, 1])

        def outcome(config):
            need = 60.0 * config["micro_batch"] * (1.2 - config["checkpoint_ratio"])
            memory = {"peak_memory_mib": need, "memory_limit_mib": 1000.0}
            return ok(10.0 * config["micro_batch"] ** 0.8, **memory) if need < 1000 else failed(Status.OOM)

        blind = [outcome(config) for config in space.sample(12, 3)]
        trials = finished(space.sample(12, 3), outcome)
        assert 3 <= sum(not each.ok for each in blind) <= 9
        batch = [make_sampler("gp", space, seed).propose(trials, 4) for seed in range(2)]
        fails = [not outcome(config).ok for configs in batch for config in configs]
        chance = np.mean([not outcome(config).ok for config in space])
        assert np.mean(fails) < chance


class TestContainment:
    def test_output_of_other_threads_is_kept(self, capsys):
        with contained(0):
            print("noise")
            other = threading.Thread(target=print, args=("progress",))
            other.start()
            other.join()
        print("after")
        assert capsys.readouterr().out == "progress\nafter\n"

    def test_the_seed_of_the_process_is_put_back_when_it_fails(self):
        state = np.random.get_state()[1].tolist()
        with pytest.raises(KeyError), contained(0):
            np.random.rand(3)
            raise KeyError
        assert np.random.get_state()[1].tolist() == state

    def test_an_interrupt_is_late_rather_than_swallowed(self):
        reached = []
        with pytest.raises(KeyboardInterrupt), contained(0):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
            except:  # noqa: E722 - as HEBO does around every step of its fit
                pytest.fail("the interrupt came where it would have been swallowed")
            reached.append("the end")
        assert reached == ["the end"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class TestHEBO:
    def test_without_it_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "hebo", None)
        monkeypatch.setitem(sys.modules, "hebo.acquisitions.acq", None)
        with pytest.raises(MissingDependency) as caught:
            make_sampler("hebo", small_space())
        assert "`pip install --no-deps HEBO==0.3.6`" in str(caught.value)
        assert '`pip install "redline[hebo]"`' in str(caught.value)

    @pytest.mark.slow
    def test_another_default_dtype_does_not_matter(self):
        pytest.importorskip("hebo")
        import torch

        space = wide_space()
        trials = finished(space.sample(12, 0), plausible)
        expected = make_sampler("hebo", space, epochs=5).propose(trials)
        torch.set_default_dtype(torch.float64)
        try:
            assert make_sampler("hebo", space, epochs=5).propose(trials) == expected
        finally:
            torch.set_default_dtype(torch.float32)


def test_learners_find_faster_configurations_than_chance_does():
    """The best of 14 trials, mean over seeds."""
    space = wide_space()
    gains = {"eager": 1.0, "sdpa": 1.5, "flash_attention_2": 1.6}

    def outcome(config):
        if config["micro_batch"] >= 32:
            return failed(Status.OOM)
        gain = gains[config["attention"]] * (1.3 if config["fusion"] else 1.0)
        return ok(config["micro_batch"] ** 0.6 * gain * (1 - 0.4 * config["checkpoint_ratio"]))

    fastest = max(outcome(config).throughput or 0 for config in space)

    def reached(name: str, seeds: int) -> float:
        best = []
        for seed in range(seeds):
            trials = search(make_sampler(name, space, seed), outcome, 14)
            best.append(max(trial.measurement.throughput or 0 for trial in trials) / fastest)
        return float(np.mean(best))

    chance = reached("random", 12)
    assert reached("tpe", 8) > chance + 0.05
    assert reached("gp", 4) > chance + 0.15


def test_a_proposal_keeps_to_one_thread_and_leaves_the_others_as_they_were():
    from threadpoolctl import threadpool_info, threadpool_limits

    def threads():
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    space, during = Space(), []
    space.choice("micro_batch", [1, 2, 4, 8])

    def prior(config):
        during.append(threads())
        return 1.0

    with threadpool_limits(limits=2, user_api="blas"):
        before = threads()
        make_sampler("bayes", space, prior=prior).propose([])
        assert threads() == before
    assert during and all(each == {1} for each in during)
