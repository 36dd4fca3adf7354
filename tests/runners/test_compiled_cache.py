"""A compilation that was killed leaves nothing behind that a later one would load."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from redline.base.device import detect
from redline.results import Status
from redline.runners import TrialRequest, TrialTerms
from redline.runners.compiling import is_truncated, sweep_compiled
from redline.runners.dispatch import DryRunner, Work
from redline.runners.failure import is_damaged_library
from redline.runners.job import Outcome, RankOutcome
from redline.space import Config

DIGEST = "/tmp/torchinductor_ann/et/cetj4rebefjlz35pqzeimcnkaeww77natz5a6mdhts7arcss33kp"
LIBRARY = next(Path(np.__file__).parent.glob("_core/*.so"))
COMPILED = """
import sys, torch, torch._inductor.codecache
from redline.runners.compiling import sweep_compiled
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


def test_what_is_whole_or_being_written_stays(tmp_path, monkeypatch):
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for a CPU by g++")
def test_a_library_that_was_cut_short_breaks_the_next_compilation_unless_it_is_swept_away(tmp_path):
    def run(how):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", COMPILED, how]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    first = run("as it is")
    assert first.returncode == 0, first.stderr
    found = list(tmp_path.glob("*/*.main.so"))
    for path in found:
        os.truncate(path, 0)
    assert found and is_damaged_library(run("as it is").stderr)
    again = run("sweep")
    assert again.returncode == 0 and again.stdout == first.stdout, again.stderr


class Listed(Work):
    """Gives what was to be measured as the status of the outcome."""

    def job(self, request, terms):
        return None

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
