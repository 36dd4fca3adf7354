"""A killed process leaves no lock in torch's cache of compiled extensions, for which all later ones would wait."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import redline as rl
from redline.results import Status
from redline.runners.host.process import builds_released, family, kill_tree

BUILD = """
import importlib.util, os, runpy, sys, time

(torch,) = importlib.util.find_spec("torch").submodule_search_locations  # not imported, which takes seconds
FileBaton = runpy.run_path(os.path.join(torch, "utils", "file_baton.py"))["FileBaton"]
baton = FileBaton(os.path.join(sys.argv[1], "lock"))
assert baton.try_acquire()
print("building", flush=True)
time.sleep(600)
"""


@pytest.fixture
def extension(tmp_path):
    """Folder of an extension that is being built."""
    folder = tmp_path / "torch_extensions" / "py311_cpu" / "some_op"
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text("")
    (tmp_path / "build.py").write_text(BUILD)
    return folder


def test_a_killed_builder_s_lock_is_removed(extension, tmp_path):
    (tmp_path / "lock").write_text("")
    building = subprocess.Popen([sys.executable, tmp_path / "build.py", extension], stdout=subprocess.PIPE)
    assert building.stdout.readline() == b"building\n" and (extension / "lock").exists()
    other = extension.parent / "other_op"
    other.mkdir()
    (other / "build.ninja").write_text("")
    (other / "lock").write_text("")
    kill_tree(building.pid)
    building.communicate(timeout=30)
    assert not (extension / "lock").exists()
    assert (other / "lock").exists() and (tmp_path / "lock").exists(), "locks of other processes stay"


def test_a_released_and_taken_lock_stays(extension):
    building = subprocess.Popen([sys.executable, extension.parents[2] / "build.py", extension], stdout=subprocess.PIPE)
    assert building.stdout.readline() == b"building\n"
    with builds_released(family(building.pid)):
        (extension / "lock").unlink()
        time.sleep(0.05)  # the clock of a file's times has steps of some milliseconds
        (extension / "lock").write_text("")
        building.kill()
    building.communicate(timeout=30)
    assert (extension / "lock").exists()


@pytest.mark.slow
def test_a_trial_that_is_killed_while_it_builds(extension, tmp_path):
    def fn(config):
        exec(
            compile(
                Path(tmp_path, "build.py").read_text().replace("sys.argv[1]", repr(str(extension))), "build", "exec"
            )
        )

    space = rl.Space()
    space.choice("a", [1])
    (trial,) = rl.tune(fn, space, trials=1, trial_timeout="15s", out=tmp_path / "run").all_trials
    assert trial.measured.status is Status.TIMEOUT and "building" in (tmp_path / "run" / trial.measured.log).read_text()
    assert not (extension / "lock").exists()


@pytest.mark.slow
def test_a_command_that_is_killed_while_it_builds(extension, tmp_path):
    command = rl.Command(command=f"{sys.executable} {tmp_path / 'build.py'} {extension} {{a}}", metric="speed")
    (trial,) = rl.tune(command, override={"a": [1]}, trials=1, trial_timeout="15s", out=tmp_path / "run").all_trials
    assert trial.measured.status is Status.TIMEOUT and "building" in (tmp_path / "run" / trial.measured.log).read_text()
    assert not (extension / "lock").exists()
