"""A run leaves nothing in the temporary directory, however its processes end."""

import os
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from processes import running
from redline.base.scratch import OWNER, YOUNG_S, Scratch, sweep

STARTS = """
import sys, time
from redline.runners.host.client import HostAgent
agent = HostAgent(["json"])
agent.wait_ready()
print(agent.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def age(folder):
    old = time.time() - 2 * YOUNG_S
    os.utime(folder / OWNER, (old, old))


@pytest.fixture
def driver(temporary):
    started = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    yield started, psutil.Process(int(started.stdout.readline()))
    started.kill()
    started.communicate()


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_agent_whose_starter_is_killed_takes_its_folder_with_it(driver, temporary):
    started, agent = driver
    assert [each.name[:14] for each in temporary.iterdir()] == ["redline-agent-"]
    started.kill()
    wait_until(lambda: not running(agent))
    assert list(temporary.iterdir()) == []


def test_leftovers_of_two_killed_processes_are_removed_at_the_next_start(driver, temporary):
    started, agent = driver
    (folder,) = temporary.iterdir()
    sweep()
    age(folder)
    sweep()
    assert folder.exists()  # its owner is alive
    agent.kill()
    started.kill()
    started.wait()
    sweep()
    assert not folder.exists()


def test_a_young_folder_and_what_is_somebody_else_s_are_left_alone(temporary):
    kept = temporary / "redline-results"  # for instance a run's folder with its own lock
    kept.mkdir()
    (kept / ".lock").touch()
    (temporary / "redline-file").touch()
    (temporary / "redline-link").symlink_to(kept)
    (temporary / "other").mkdir()
    (temporary / "other" / OWNER).touch()
    young = temporary / "redline-agent-young"
    young.mkdir()
    (young / OWNER).touch()
    age(temporary / "other")
    before = sorted(temporary.rglob("*"))
    sweep()
    assert sorted(temporary.rglob("*")) == before


def test_a_folder_goes_with_the_end_of_its_use_and_its_lock_not_with_a_fork(temporary):
    made = Scratch("run")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    age(made.path)
    sweep()
    assert made.path.exists()
    made.close()
    made.close()
    assert list(temporary.iterdir()) == []
