"""`--time` covers everything up to the winner: the search exceeds it by one trial at most, and nothing waits."""

import random

import pytest
from listeners import RecordingListener
from redline.results import Measurement, RunFolder, Status, summary
from redline.runners import Runner
from redline.space import Config, Space
from redline.tuner.budget import Budget, Stopwatch
from redline.tuner.samplers import make_sampler
from redline.tuner.search import Refinement, Search


class Clock:
    """A clock that moves only while a trial runs."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Takes(Runner):
    """Trials that take the given seconds, in the order of their start, at almost equal speeds."""

    name = "takes"

    def __init__(self, clock, seconds):
        self._clock, self._seconds, self.begun, self.settled = clock, seconds, [], []

    def run(self, request):
        count = len(self.begun)
        self.begun.append((self._clock.now, request.number))
        self.settled.append(request.sustained)
        seconds = self._seconds(count)
        self._clock.now += seconds
        return Measurement(
            status=Status.OK, throughput=100.0 + request.config["x"] / 1e4, seconds_total=seconds,
        )  # fmt: skip


class Searched:
    """A search of so many seconds with such trials."""

    def __init__(self, folder, seconds, trial_seconds, refinement=None, before=0.0, **budget):
        space = Space()
        space.choice("x", list(range(1000)))
        clock, self.listener = Clock(), RecordingListener()
        self.runner = Takes(clock, trial_seconds)
        watch = Stopwatch(seconds, clock)
        begin = clock.now
        clock.now += before
        made = RunFolder.open(folder / "run", {"model": "x"}, knobs={"x": None}, make_config=Config)
        with made:
            search = Search(
                run_folder=made,
                sampler=make_sampler("random", space, seed=0),
                runner=self.runner,
                budget=Budget(seconds=seconds, **budget),
                first=(space.config(x=0),),
                listener=self.listener,
                watch=watch,
            )
            search.run()
            self.ended, self.tried = search.ended, len(self.runner.begun)
            if refinement:
                search.refine(lambda trials: refinement)
            search.confirm()
            self.trials = made.trials()
        self.taken = clock.now - begin
        self.again = len(self.runner.begun) - self.tried
        self.last_begun = self.runner.begun[-1][0] - begin


@pytest.mark.parametrize("seed", range(12))
def test_the_whole_search_stays_within_its_time_and_one_trial(tmp_path, seed):
    draw = random.Random(seed)
    seconds = draw.choice([30.0, 100.0, 300.0])
    durations = [draw.lognormvariate(2.0, 0.8) for _ in range(2000)]
    made = Searched(tmp_path, seconds, durations.__getitem__, before=draw.choice([0.0, 20.0]))
    assert made.taken <= seconds + max(durations[: len(made.runner.begun)])
    assert made.last_begun < seconds


def test_time_is_left_for_measuring_the_leaders_again(tmp_path):
    made = Searched(tmp_path, 300.0, lambda count: 10.0)
    # Three leaders and the default configuration, each twice.
    assert (made.tried, made.again) == (30 - 8, 8)
    assert made.taken == 300.0
    assert len(summary.best(made.trials).remeasured) == 2
    assert made.ended == "the rest of the 300 s is not enough for another trial"


def test_without_time_left_first_measurements_count_with_a_note(tmp_path):
    made = Searched(tmp_path, 60.0, lambda count: [10.0, 10.0, 10.0, 25.0][min(count, 3)])
    assert made.last_begun < 60.0
    assert all(trial.first is None and not trial.remeasured for trial in made.trials)
    assert summary.best(made.trials) is not None
    assert any("their first measurements count" in line for line in made.listener.messages)


def test_leaders_are_not_measured_again_beyond_the_time(tmp_path):
    made = Searched(tmp_path, 30.0, lambda count: 14.0)
    assert (made.tried, made.again, made.taken) == (2, 0, 28.0)
    assert any("their first measurements count" in line for line in made.listener.messages)


def test_the_first_trial_runs_in_any_time(tmp_path):
    made = Searched(tmp_path, 1.0, lambda count: 10.0)
    assert (made.tried, made.again) == (1, 0)
    assert summary.best(made.trials).number == 0


def test_a_refinement_is_tried_only_where_the_leaders_can_be_measured_after_it(tmp_path):
    refinement = Refinement(config=Config(x=5000), summary="more")
    plenty = Searched(tmp_path / "plenty", 1000.0, lambda count: 10.0, refinement=refinement, trials=5)
    none = Searched(tmp_path / "none", 1000.0, lambda count: 10.0, refinement=refinement)
    assert "more" in plenty.listener.messages
    assert "more" not in none.listener.messages
    assert none.taken <= 1000.0
