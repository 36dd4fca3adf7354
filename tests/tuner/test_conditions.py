"""Trials that ran while other work slowed the machine down are compared after a correction for that load."""

import os
import subprocess
import sys

import pytest
from listeners import RecordingListener
from redline.results import Measurement, Status, Trial
from redline.runners.trial.load import HostLoad, Watch, foreign_cores
from redline.space import Config
from redline.tuner.history import Conditions, History, at_first_speed


def ran(throughput, load, **more):
    return Measurement(status=Status.OK, throughput=throughput, unit="tokens/s", foreign_cores=load, **more)


def trial(number, measured):
    return Trial(
        number=number, config=Config(x=number), measurement=measured, sampler="default" if number == 0 else "x"
    )


class Canary:
    """Measures trial 0 again: each call returns the next of these values."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self, trial):
        self.asked.append(trial.number)
        return self.answers.pop(0)


def _seconds_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_while_nothing_changes_no_canary_is_run():
    canary, listener = Canary(), RecordingListener()
    conditions = Conditions(canary, listener)
    trials = []
    for number, load in enumerate((0.1, 0.15, 0.0, 0.3)):
        measured = conditions.judge(trials, ran(100.0 + number, load))
        assert measured.machine_speed is None
        trials.append(trial(number, measured))
    assert (
        canary.asked == []
        and listener.messages == []
        and History(lambda: trials).update().best * conditions.speed == 103.0
    )


def test_load_on_cores_that_a_gpu_does_not_need_changes_nothing():
    canary, listener = Canary(ran(90.0, 15.0)), RecordingListener()
    conditions = Conditions(canary, listener, spare_cores=12.0)
    trials = [trial(0, conditions.judge([], ran(100.0, 1.0)))]
    assert conditions.judge(trials, ran(100.0, 11.0)).machine_speed is None and not canary.asked
    assert conditions.judge(trials, ran(95.0, 15.0)).machine_speed == 0.9  # now cores are short


def test_a_resumed_search_compares_with_the_load_of_its_first_process():
    canary, listener = Canary(ran(40.0, 1.0)), RecordingListener()
    busy = Conditions(canary, listener).judge([trial(0, ran(100.0, 0.0))], ran(60.0, 1.0))
    assert canary.asked == [0] and busy.machine_speed == 0.4


def test_a_trial_under_another_load_is_judged_by_a_canary_run_beside_it():
    canary, listener = Canary(ran(40.0, 1.0), ran(100.0, 0.0)), RecordingListener()
    conditions = Conditions(canary, listener)
    trials = [trial(0, conditions.judge([], ran(100.0, 0.0)))]
    busy = conditions.judge(trials, ran(60.0, 1.0))
    trials.append(trial(1, busy))
    assert canary.asked == [0] and busy.machine_speed == 0.4
    assert busy.throughput == 60.0, "what is kept is what was measured"
    assert at_first_speed(trials[1]).measurement.throughput == pytest.approx(150.0)
    # A candidate is stopped early against the speed of the best under the present load, not in a quiet minute.
    assert History(lambda: trials).update().best * conditions.speed == pytest.approx(60.0)
    assert "trial 0 now runs at 40 % of its first speed" in listener.messages[0]
    quiet = conditions.judge(trials, ran(120.0, 0.05))
    assert canary.asked == [0, 0] and quiet.machine_speed is None
    assert History(lambda: trials).update().best * conditions.speed == pytest.approx(150.0)


def test_a_load_that_is_gone_when_the_canary_runs_again_is_not_taken_for_none():
    """Trial 0 runs beside a busy core, trial 1 beside the end of that load, the canary after it.

    The canary is 1.8 times as fast as trial 0, but trial 1 was not.
    """
    conditions = Conditions(Canary(ran(180.0, 0.0), ran(140.0, 0.5)), RecordingListener())
    trials = [trial(0, conditions.judge([], ran(100.0, 1.2)))]
    trials.append(trial(1, conditions.judge(trials, ran(170.0, 0.9))))
    assert trials[1].measurement.machine_speed == pytest.approx(1.8**0.25)
    # One load lies between those seen, the other above all of them.
    trials.append(trial(2, conditions.judge(trials, ran(210.0, 0.05))))
    assert trials[2].measurement.machine_speed == 1.8
    trials.append(trial(3, conditions.judge(trials, ran(200.0, 0.4))))
    assert trials[3].measurement.machine_speed == 1.4 == conditions.speed


def test_under_a_heavier_load_than_the_canary_ever_ran_a_core_costs_what_it_did_before():
    conditions = Conditions(Canary(ran(200.0, 0.0), ran(200.0, 0.0)), RecordingListener())
    trials = [trial(0, conditions.judge([], ran(100.0, 1.0)))]
    heavy = conditions.judge(trials, ran(50.0, 1.5))
    assert heavy.machine_speed == pytest.approx(0.5**0.5)


def test_cores_that_others_keep_busy_are_counted_a_host():
    ranks = [HostLoad("a", 10.0, 25.0, 9.0), HostLoad("a", 10.0, 25.0, 9.5), HostLoad("b", 10.0, 10.0, 10.0), None]
    assert foreign_cores(ranks) == pytest.approx(2.5 - 1.85)
    assert foreign_cores([None]) is None and foreign_cores([]) is None


def test_a_canary_that_fails_changes_nothing():
    crashed = Measurement(status=Status.CRASH, reason="gone")
    canary, listener = Canary(crashed, crashed, ran(40.0, 1.0)), RecordingListener()
    conditions = Conditions(canary, listener)
    trials = [trial(0, conditions.judge([], ran(100.0, 0.0)))]
    # It is measured again when the load has changed since, and not after every trial.
    for load, asked in ((1.0, 1), (1.1, 1), (2.0, 2), (1.9, 2)):
        assert conditions.judge(trials, ran(60.0, load)).machine_speed is None
        assert len(canary.asked) == len(listener.messages) == asked
    assert "trial 0" in listener.messages[0] and "crash (gone)" in listener.messages[0]
    assert conditions.judge(trials, ran(60.0, 1.0)).machine_speed == 0.4


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the kernel does not tell")
def test_a_process_that_spins_beside_is_seen():
    spin = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])
    try:
        watch = Watch()
        # Wait until the other process has had a second of a core, however busy the machine is.
        while _seconds_of(other.pid) < 1.0:
            sum(range(10_000))
        load = watch.load()
    finally:
        other.kill()
        other.wait()
    assert load.busy - load.own > 0.7
    assert foreign_cores([load]) > 0.0
