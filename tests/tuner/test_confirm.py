"""The leaders are measured again, and only what holds up can win."""

from dataclasses import replace
from types import SimpleNamespace

from redline.results import Measurement, Status, Trial, summary
from redline.results.again import judged
from redline.runners import Runner
from redline.space import Config
from redline.tuner.budget import Budget
from redline.tuner.search import ROUNDS, Search


class Memory:
    """A run's trials, kept in memory."""

    def __init__(self, throughputs):
        self._trials = [
            Trial(
                number=number,
                config=Config({"micro_batch": number}),
                sampler="random" if number else "default",
                measurement=Measurement(status=Status.OK, throughput=throughput),
            )
            for number, throughput in enumerate(throughputs)
        ]

    def trials(self):
        return self._trials

    def remeasure(self, number, throughputs, failure=None):
        self._trials[number] = judged(self._trials[number], throughputs, failure)

    def log_path(self, number):
        return SimpleNamespace(with_suffix=lambda suffix: None)


class Again(Runner):
    """Every trial gives the same throughput again, except those that crash."""

    name = "again"

    def __init__(self, folder, crashing):
        self._folder, self._crashing, self.order = folder, crashing, []

    def run(self, request):
        self.order.append(request.number)
        if request.number in self._crashing:
            return Measurement(status=Status.CRASH, reason="lost its nerve")
        return self._folder.trials()[request.number].measurement


def confirm(throughputs, crashing=()):
    folder = Memory(throughputs)
    runner = Again(folder, crashing)
    Search(run_folder=folder, sampler=None, runner=runner, budget=Budget(trials=1)).confirm()
    return folder.trials(), runner.order


def test_leaders_and_the_default_are_measured_in_turns():
    trials, order = confirm([60.0, 100.0, 99.0, 98.0, 97.0])
    assert order == [1, 2, 3, 0] * ROUNDS
    assert summary.best(trials).number == 1


def test_where_no_leader_holds_up_the_next_best_are_measured():
    trials, order = confirm([60.0, 100.0, 99.0, 98.0, 97.0, 96.0], crashing={0, 1, 2, 3})
    assert order == [1, 2, 3, 0] * ROUNDS + [4, 5] * ROUNDS
    assert summary.best(trials).number == 4


def test_where_nothing_holds_up_there_is_no_winner_and_the_reason_is_said():
    trials, order = confirm([60.0, 100.0], crashing={0, 1})
    assert order == [1, 0] * ROUNDS
    assert summary.best(trials) is None
    assert "failed when it was measured again" in summary.why_nothing(trials)
