"""A trial's time and its compilations' time are counted separately, and each ends the trial."""

import pytest
from redline.runners.host.process import Deadline
from redline.runners.trial.job import COLLECTIVE_MARGIN_S, Job


def test_the_trial_s_time_is_paused_during_compilation():
    deadline = Deadline(0.0, 30.0, 300.0)
    deadline.compiling(True, 10.0)
    deadline.compiling(True, 15.0)  # another rank compiles as well
    deadline.compiling(False, 200.0)
    assert deadline.at == 30.0 + 190.0
    assert deadline.reason == "no result within 30 s"


def test_a_compilation_that_hangs_ends_when_its_own_time_is_over():
    deadline = Deadline(0.0, 30.0, 300.0)
    deadline.compiling(True, 10.0)
    assert (deadline.at, deadline.reason) == (310.0, "compilation took more than 300 s")


def test_all_compilations_together_have_one_time():
    deadline = Deadline(0.0, 30.0, 300.0)
    deadline.compiling(True, 0.0)
    deadline.compiling(False, 250.0)
    deadline.compiling(True, 260.0)
    assert deadline.at == 260.0 + 50.0


@pytest.mark.parametrize(("timeout_s", "compile_s"), [(5.0, 300.0), (7200.0, 7200.0)])
def test_collectives_wait_longer_than_the_longest_trial(timeout_s, compile_s):
    job = Job(program=b"", timeout_s=timeout_s, compile_timeout_s=compile_s)
    assert job.collective_timeout_s == timeout_s + compile_s + COLLECTIVE_MARGIN_S
    deadline = Deadline(0.0, timeout_s, compile_s)
    deadline.compiling(True, timeout_s)  # at the last moment
    assert deadline.at < job.collective_timeout_s
