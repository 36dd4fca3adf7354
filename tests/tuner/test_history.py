"""The trial that others must reproduce, and searches that begin with the fastest configurations of earlier ones."""

import threading

import pytest
import redline as rl
from probes import BF16, FP32, probe
from redline.results import Measurement, RunFolder, Status, Trial
from redline.runners import Runner
from redline.space import Config, Space
from redline.tuner.budget import Budget
from redline.tuner.history import reference
from redline.tuner.listener import SearchListener
from redline.tuner.samplers import make_sampler
from redline.tuner.search import Search


def test_the_reference_is_the_first_trial_that_ran_in_the_finest_format():
    def ran(number, roundoff, status=Status.OK):
        measured = Measurement(status=status, throughput=1.0, probe=probe(roundoff))
        return Trial(number=number, config=Config(micro_batch=number + 1), measurement=measured)

    trials = [ran(0, BF16), ran(1, FP32, Status.WRONG), ran(2, BF16)]
    assert reference(trials[:1], 0) is None
    assert reference(trials, 1) is trials[0].measured.probe
    trials += [ran(3, FP32), ran(4, FP32), Trial(number=5, config=Config())]
    assert reference(trials, 5) is trials[3].measured.probe
    assert reference(trials, 3) is None  # a wrong trial beside it must not make it wrong
    assert reference(trials, 4) is trials[3].measured.probe
    assert reference(trials, 5).roundoff == FP32


class Beside(Runner):
    """Two trials at once: trial 0 ends first, and trial 1, which began beside it, has other logits."""

    name, slots, confirms = "beside", 2, False

    def __init__(self):
        self._first = threading.Event()

    def run(self, request):
        if request.number == 1:
            assert request.reference is None and self._first.wait(30)
        found = probe(logits=(5.0, -5.0, 5.0, 5.0)) if request.number == 1 else probe()
        return Measurement(status=Status.OK, throughput=1.0 + request.number, probe=found)

    def ended(self, trial):
        if trial.number == 0:
            self._first.set()


def test_a_trial_that_began_beside_the_default_is_compared_when_it_ends(tmp_path):
    space, runner, listener = Space(), Beside(), SearchListener()
    space.choice("x", list(range(3)))
    listener.on_trial_end = runner.ended
    with RunFolder.open(tmp_path / "run", {"model": "x"}, knobs={"x": None}, make_config=Config) as made:
        Search(
            run_folder=made,
            sampler=make_sampler("grid", space, seed=0),
            runner=runner,
            budget=Budget(trials=3),
            first=(space.config(x=0),),
            listener=listener,
        ).run()
        trials = made.trials()
    assert [trial.measured.status for trial in trials] == [Status.OK, Status.WRONG, Status.OK]
    assert "the logits" in trials[1].measured.reason


def speed(config):
    if config["x"] == 9:
        raise rl.OutOfMemory("too large")
    return float(config["x"])


def run_of(folder, values, fn=speed, **options):
    space = Space()
    space.choice("x", values)
    return rl.tune(fn, space, sampler="grid", isolate=False, out=folder, **options)


def test_a_search_begins_with_the_fastest_configurations_of_earlier_ones_in_turns(tmp_path):
    run_of(tmp_path / "a", [1, 2, 3, 4, 9])
    run_of(tmp_path / "b", [6, 7])
    result = run_of(tmp_path / "c", list(range(1, 8)), warm_start=[tmp_path / "a", tmp_path / "b"])
    assert [trial.config["x"] for trial in result.all_trials][:4] == [1, 4, 7, 3]
    narrow = run_of(tmp_path / "d", [1, 2, 3], warm_start=str(tmp_path / "a"))
    assert narrow.all_trials[1].config["x"] == 3
    assert any(note.startswith("not tried, because it is not valid here: x=4") for note in narrow.notes)


def test_a_run_without_anything_to_begin_with_is_refused(tmp_path):
    def fails(config):
        raise rl.OutOfMemory("too large")

    run_of(tmp_path / "a", [1, 2], fails)
    for folder, reason in (("a", "no trial of .* succeeded"), ("b", "is this run's own folder"), ("none", "none")):
        with pytest.raises(rl.UsageError, match=f"warm start: .*{reason}"):
            run_of(tmp_path / "b", [1, 2], warm_start=tmp_path / folder)
