"""Every command in a terminal: it ends properly, fits the width, and leaves no remains of its live view."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from processes import left_of
from pseudo_terminal import Terminal
from redline.cli.main import redline as command_line

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "build" / "recordings"
REDLINE = [sys.executable, "-m", "redline.cli"]
WORKLOAD = """
import time

import torch
from torch import nn

import redline as rl


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 64, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def make_space():
    space = rl.Space()
    micro = space.choice("micro_batch", [4, 8, 16, 32, 64], default=8)
    space.choice("checkpoint_ratio", [0, 1])
    space.derive("grad_accum", 64 // micro)
    return space


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


class Slow(Net):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


mlp = rl.Workload(name="mlp", model=Net, batch=batch, loss=loss, space=make_space(), global_batch=64)
slow = rl.Workload(name="slow", model=Slow, batch=batch, loss=loss, space=make_space(), global_batch=64)


def nothing(output, batch):
    raise ValueError("no such kernel")


broken = rl.Workload(name="broken", model=Net, batch=batch, loss=nothing, space=make_space(), global_batch=64)
"""
pytestmark = pytest.mark.timeout(600)  # for a machine that is busy with other things
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "work.py").write_text(WORKLOAD)
    return folder


@pytest.fixture(scope="module")
def runs(place):
    """Two finished runs, made in a terminal of 80 columns."""
    for name in ("a", "b"):
        shown = tune(place, "--trials", 4, "--out", f"runs/{name}")
        assert shown.wait() == 0, shown.text
    return place / "runs"


def tune(place, *arguments, workload="mlp", **terminal):
    command = [
        *REDLINE, "tune", "--workload", f"work.py:{workload}", "--runner", "local", "--sampler", "random",
        "--measure-time", "50ms", "--patience", "0", *arguments,
    ]  # fmt: skip
    return Terminal(command, cwd=place, **terminal)


def ended_well(shown, code=0):
    """Checks the exit code, that the cursor is visible, and that no traceback and no part of the live view remains."""
    assert shown.wait() == code, shown.text
    assert "Traceback" not in shown.text, shown.text
    hidden = [match[2] for match in ESCAPE.finditer(shown.raw) if match[1] == "?25"]
    assert not hidden or hidden[-1] == "h"
    if hidden:  # the live view hides the cursor; plain lines remain
        live = r"\.\.\.$|about \d+:\d\d left|^trial \d+, \d+:\d\d: "
        assert [line for line in shown.lines if re.search(live, line)] == []


def trial_lines(shown):
    return [line for line in shown.lines if re.match(r" +\d+  (ok|oom|crash|timeout|wrong|skipped)\b", line)]


# -- tune ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "columns", [80, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (60, 110, 200))]
)
def test_a_search_to_its_end(place, columns):
    shown = tune(place, "--trials", 4, "--out", f"w{columns}", columns=columns, rows=30)
    ended_well(shown)
    shown.record(RECORDINGS / f"tune-{columns}.cast")
    lines = trial_lines(shown)
    assert [int(line.split()[0]) for line in lines] == [0, 1, 2, 3], "a line that wrapped would be two"
    # The first line shows the whole configuration, the others only the differences.
    assert "micro_batch=8 checkpoint_ratio=0"[: columns - 45] in lines[0]
    assert not any("grad_accum" in line for line in lines)
    for word in ("winner", "default", "gain", "±", "wrote", "redline report"):
        assert word in shown.text
    assert any("trial " in line for _, frame in shown.frames for line in frame), "what runs was never shown"
    # Only the last lines, which are paths and commands to copy, may be longer than the terminal's width.
    body = shown.raw[: shown.raw.index("wrote ")]
    plain = ESCAPE.sub("", body).replace("\r", "\n")
    assert max(map(len, plain.splitlines())) <= columns


@pytest.mark.slow
def test_ctrl_c_keeps_results_and_resume_continues(place):
    before = set(psutil.Process().children(recursive=True))
    shown = tune(place, "--trials", 5, "--out", "stopped", workload="slow")
    shown.wait_for("   1  ok")
    beside = Terminal([*REDLINE, "show", "stopped"], cwd=place)
    ended_well(beside)
    assert re.search(r"trials: \d ok, 1 pending", beside.text), beside.text
    shown.send("\x03")
    ended_well(shown, 130)
    done = len(trial_lines(shown))  # two, and any that ended meanwhile
    assert "Interrupted; the results so far are kept." in shown.text
    assert "--out stopped --resume" in shown.text
    assert set(psutil.Process().children(recursive=True)) <= before
    again = tune(place, "--trials", 5, "--out", "stopped", "--resume", workload="slow")
    ended_well(again)
    assert f"resumed after {done} trials" in again.text
    assert [int(line.split()[0]) for line in trial_lines(again)] == list(range(done, 5))


@pytest.mark.exhaustive
def test_the_main_command_through_ray(place):
    shown = tune(place, "--trials", 2, "--out", "ray", "--runner", "ray")
    ended_well(shown)
    assert "runner ray" in shown.text and "gain" in shown.text


# -- the other commands --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_dashboard_serves_until_ctrl_c(runs):
    shown = Terminal([*REDLINE, "dashboard", "runs", "--port", "0"], cwd=runs.parent)
    shown.wait_for("\nhttp://127.0.0.1:")  # on a line of its own, to be clicked
    shown.send("\x03")
    assert shown.wait() in (0, 130)
    assert "Traceback" not in shown.text


HELPS = """
import contextlib, sys
from redline.cli import main
for command in sys.argv[1:]:
    print("\\x1e")
    with contextlib.suppress(SystemExit):
        main([command, "-h"])
"""
"""Prints the help of each command in one process."""


@pytest.mark.parametrize("columns", [60, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_every_help_fits(columns):
    commands = command_line.list_commands(None)
    shown = Terminal([sys.executable, "-c", HELPS, *commands], columns=columns)
    assert shown.wait() == 0
    for command, help in zip(commands, shown.raw.split("\x1e")[1:], strict=True):
        plain = ESCAPE.sub("", help).replace("\r", "").splitlines()
        # Examples are lines to copy, which must not be broken.
        helped = plain[: next(at for at, line in enumerate(plain) if "Examples:" in line)]
        assert max(map(len, helped)) <= max(columns, 70), command


# -- make ----------------------------------------------------------------------------------------------------


def clone(to):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(to)], check=True, timeout=60)
    return to


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_make_tune_in_a_fresh_clone(tmp_path):
    """A new user's first ten minutes, with the installation, in an empty folder. The recording is for people to view."""
    shown = Terminal(["make", "tune"], cwd=clone(tmp_path / "redline"), columns=110, rows=45)
    assert shown.wait(1400) == 0, shown.text
    shown.record(RECORDINGS / "make-tune.cast")
    for word in ("winner", "gain", "wrote    runs/gpt2-tiny"):
        assert word in shown.text
    assert "Traceback" not in shown.text


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm-256color", pytest.param("dumb", marks=pytest.mark.exhaustive)])
def test_a_terminal_that_goes_away_ends_the_search_with_what_was_found(place, term):
    shown = tune(place, "--out", term, workload="slow", env={"TERM": term})
    shown.wait_for("   0  ok")
    family = psutil.Process(shown.pid).children(recursive=True)
    os.close(shown.fd)  # the kernel then sends SIGHUP
    _, status = os.waitpid(shown.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert left_of(family) == []
    best = yaml.safe_load((place / term / "best.yaml").read_text())
    assert best["best"]["trial"] == 0
