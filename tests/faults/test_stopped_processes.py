"""A stopped process (SIGSTOP) blocks nothing: it is killed with all its descendants, and another replaces it."""

import os
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest
from processes import left_of
from redline.base.errors import RunnerError
from redline.results import Status
from redline.runners.host import client
from redline.runners.host.client import HostAgent
from redline.runners.trial.job import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON_S = 2.0


@pytest.fixture
def agent(monkeypatch):
    for limit in ("BEGIN_S", "ANSWER_S"):
        monkeypatch.setattr(client, limit, SOON_S)
    made = HostAgent(["cloudpickle", "redline.runners.host.supervisor"])
    yield made
    made.close()


def run(agent, program, **job):
    return agent.run(Job(program=cloudpickle.dumps(program), **{"timeout_s": 100, **job}))


def wait_for(file):
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return file.read_text()


@pytest.mark.parametrize("stops", ["the supervisor", "the supervisor and its rank"])
def test_a_trial_with_a_stopped_supervisor_is_a_timeout_and_leaves_nothing(agent, tmp_path, stops):
    pids = tmp_path / "pids"

    def program(context):
        hidden = subprocess.Popen(["sleep", "597"], start_new_session=True)
        pids.write_text(f"{os.getpid()} {os.getppid()} {hidden.pid}")
        os.kill(os.getppid(), signal.SIGSTOP)
        if stops != "the supervisor":
            os.kill(os.getpid(), signal.SIGSTOP)
        return "done"  # no process receives it

    begin = time.monotonic()
    outcome = run(agent, program, timeout_s=1)
    assert time.monotonic() - begin >= 1 + SOON_S
    assert outcome.status is Status.TIMEOUT
    assert outcome.reason == "no result within 1 s; its supervisor did not answer for another 2 s and was killed"
    assert left_of(pids.read_text().split()) == []
    assert run(agent, lambda context: 7).ranks[0].report == 7


@pytest.mark.parametrize("size", [0, 4 << 20], ids=["a small job", "a job larger than what a socket holds"])
def test_a_stopped_agent_is_replaced(agent, size):
    agent.wait_ready()
    first = agent.pid
    os.kill(first, signal.SIGSTOP)
    ballast = bytes(size)
    with pytest.raises(RunnerError, match="took no job within 2 s and was ended"):
        run(agent, lambda context: len(ballast))
    assert left_of([first]) == []
    assert run(agent, lambda context: len(ballast)).ranks[0].report == size
    assert agent.pid != first


def test_a_stopped_agent_is_killed_when_closed(agent, monkeypatch):
    monkeypatch.setattr(client, "CLOSE_S", SOON_S)
    agent.wait_ready()
    os.kill(agent.pid, signal.SIGSTOP)
    agent.close()
    assert left_of([agent.pid]) == []
