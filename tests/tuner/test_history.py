"""A search's knowledge of its trials is updated by the changed ones, and equals that of a fresh read."""

import random
import threading
from dataclasses import replace

from probes import BF16, FP32, probe
from redline.results import Measurement, RunFolder, Status, Trial
from redline.results.measurement import REFINEMENT
from redline.results.summary import judged
from redline.runners import Runner
from redline.space import Config, Space
from redline.tuner.budget import Budget
from redline.tuner.history import History
from redline.tuner.listener import SearchListener
from redline.tuner.samplers import make_sampler
from redline.tuner.search import Search


def seen(trials):
    return History(lambda: trials).update()


def test_after_any_changes_it_is_what_a_first_look_says():
    draw = random.Random(0)
    trials: list[Trial] = []
    history = History(lambda: trials)
    for _ in range(400):
        pending = [trial for trial in trials if trial.pending]
        worked = [trial for trial in trials if trial.ok]
        action = draw.random()
        if action < 0.4 or not trials:
            sampler = REFINEMENT if draw.random() < 0.1 else "x"
            trials = [*trials, Trial(number=len(trials), config=Config(n=len(trials)), sampler=sampler)]
        elif action < 0.8 and pending:
            trial = draw.choice(pending)
            speed = draw.uniform(1, 9)
            status = draw.choice([Status.OK, Status.OK, Status.OOM, Status.SKIPPED])
            measured = Measurement(status=status, reason="so")
            if status is Status.OK:
                measured = Measurement(status=status, throughput=speed, probe=probe())
            trials = [replace(each, measurement=measured) if each is trial else each for each in trials]
        elif worked:
            trial = draw.choice(worked)
            again = judged(trial, (draw.uniform(1, 9),))
            trials = [again if each is trial else each for each in trials]
        if draw.random() < 0.5:
            continue  # several changes at once
        now, first = history.update(), seen(trials)
        assert now.comparable == first.comparable
        assert (now.tried, now.best) == (first.tried, first.best)
        assert now.reference(3) == first.reference(3)
    assert history.tried > 50


def test_the_reference_is_the_first_trial_that_ran_in_the_finest_format():
    def ran(number, roundoff, status=Status.OK):
        measured = Measurement(status=status, throughput=1.0, probe=probe(roundoff))
        return Trial(number=number, config=Config(micro_batch=number + 1), measurement=measured)

    trials = [ran(0, BF16), ran(1, FP32, Status.WRONG), ran(2, BF16)]
    assert seen(trials[:1]).reference(0) is None
    assert seen(trials).reference(1).config_id == trials[0].config.id
    trials += [ran(3, FP32), ran(4, FP32), Trial(number=5, config=Config())]
    assert seen(trials).reference(5).config_id == trials[3].config.id
    assert seen(trials).reference(3) is None  # a wrong trial beside it must not make it wrong
    assert seen(trials).reference(4).config_id == trials[3].config.id
    assert seen(trials).reference(5).probe.roundoff == FP32


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
