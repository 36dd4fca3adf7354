"""A killed compilation leaves nothing behind that a later one would load."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from redline.base.device import detect
from redline.results import Status
from redline.runners import TrialRequest, TrialTerms
from redline.runners.dispatch import DryRunner, Work
from redline.runners.trial.compiling import is_truncated, sweep_compiled
from redline.runners.trial.job import Job, Outcome, RankOutcome
from redline.space import Config

DIGEST = "/tmp/torchinductor_ann/et/cetj4rebefjlz35pqzeimcnkaeww77natz5a6mdhts7arcss33kp"
LIBRARY = next(Path(np.__file__).parent.glob("_core/*.so"))
COMPILED = """
import sys, torch, torch._inductor.codecache
from redline.runners.trial.compiling import sweep_compiled
if sys.argv[1] == "sweep":
    sweep_compiled()
print(torch.compile(lambda x: torch.sin(x) * 3 + 1)(torch.zeros(8)).tolist())
"""


@pytest.mark.parametrize("kept", [0, 32, 64, 0.5, 0.99])
def test_a_library_that_is_not_whole_is_told_from_one_that_is(tmp_path, kept):
    path = tmp_path / "a.so"
    shutil.copy(LIBRARY, path)
    assert not is_truncated(path)
    os.truncate(path, kept if isinstance(kept, int) else int(path.stat().st_size * kept))
    assert is_truncated(path)


def test_complete_and_unfinished_entries_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    import torch._inductor.codecache  # noqa: F401

    folder = tmp_path / "ab"
    folder.mkdir()
    whole, empty, written = folder / "whole.so", folder / "empty.so", folder / "written.so"
    shutil.copy(LIBRARY, whole)
    empty.touch()
    with written.open("wb") as file:
        file.write(b"\x7fELF")
        file.flush()
        sweep_compiled()
        assert sorted(folder.iterdir()) == [whole, written]
    sweep_compiled()
    assert list(folder.iterdir()) == [whole]


SLOW_LINKER = """#!/bin/sh
# As a linker on a slow disk: the library exists, with nothing in it yet.
case "$*" in *.so*) if [ -e "{flag}" ]; then
    for word in "$@"; do case "$before" in -o) : > "$word";; esac; before=$word; done
    sleep 60
fi;; esac
exec {compiler} "$@"
"""


def empty_libraries(cache):
    return [path for path in cache.glob("*/*.so") if path.stat().st_size == 0]


def killed_while_it_links(command, cache, folder, how):
    """Starts a command whose compilations stop at an empty library, and kills its session once there is one.

    Returns the environment for the next command.
    """
    linker, flag = folder / "linker", folder / "slow"
    linker.write_text(SLOW_LINKER.format(flag=flag, compiler=shutil.which("g++")))
    linker.chmod(0o755)
    flag.touch()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "CXX": str(linker)}
    with subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        end = time.monotonic() + 300
        while not empty_libraries(cache) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert empty_libraries(cache), "nothing was being linked"
        os.killpg(process.pid, how)
        process.wait(120)
    flag.unlink()
    assert empty_libraries(cache), "the killed compilation leaves its library behind"
    return environment


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for a CPU by g++")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_compilation_that_was_killed_while_it_linked_does_not_break_the_next(tmp_path, how):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", COMPILED, "sweep"]
    environment = killed_while_it_links(command, cache, tmp_path, how)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and again.stdout == f"{[1.0] * 8}\n", again.stderr
    assert not empty_libraries(cache)


class Listed(Work):
    """Returns the outcome's status as the measurement."""

    def job(self, request, terms):
        return Job(program=b"")

    def measurement(self, request, terms, outcome, known):
        return outcome.status


@pytest.mark.parametrize(
    ("reasons", "status", "runs"),
    [
        ([f"OSError: {DIGEST}.main.so: file too short (during warm-up)", ""], Status.OK, 2),
        (
            [f"OSError: {DIGEST}.so: invalid ELF header"] * 2,
            Status.CRASH,
            2,
        ),
        (["OSError: /home/ann/own.so: file too short"], Status.CRASH, 1),
        (["ValueError: no such thing"], Status.CRASH, 1),
    ],
)
def test_a_trial_that_met_such_a_library_is_tried_again_once(reasons, status, runs):
    outcomes = [
        Outcome.of([RankOutcome(rank=0, status=Status.CRASH if reason else Status.OK, reason=reason)])
        for reason in reasons
    ]

    class Runner(DryRunner):
        done = 0

        def dispatch(self, job):
            self.done += 1
            return outcomes[self.done - 1]

    runner = Runner(Listed(), TrialTerms(device=detect(), devices=1))
    assert runner.run(TrialRequest(number=0, config=Config(x=1))) is status and runner.done == runs
