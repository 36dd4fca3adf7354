"""A training in a terminal: its display, and Ctrl-C, which ends it with a checkpoint."""

import re
import sys

import pytest
from processes import left_of
from pseudo_terminal import Terminal
from train_commands import curve, here, lines_of, processes_of, trained  # noqa: F401

REDLINE = [sys.executable, "-m", "redline.cli"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_training_to_its_end(here):  # noqa: F811
    shown = Terminal([*REDLINE, *trained("train", "llama", "terminal", steps=30)], cwd=here, columns=160)
    assert shown.wait() == 0, shown.text
    text = " ".join(shown.text.split())  # lines break where the paths are long
    assert "training llama on " in text and "configuration: " in text and "corpus.txt: 1 documents" in text
    assert f"step 30 loss {curve(here / 'terminal')[30]:.4f}" in text
    assert "trained: 30 steps, the latest checkpoint in" in shown.text


def test_ctrl_c_in_a_terminal_ends_with_a_checkpoint(here):  # noqa: F811
    """The terminal sends it to every process of the foreground group at once."""
    command = trained("train", "llama", "pressed", steps=100_000)
    shown = Terminal([*REDLINE, *command], cwd=here, columns=120)
    shown.wait_for("loss ")
    started = processes_of(shown.pid)
    assert len(started) > 1
    shown.send("\x03")
    assert shown.wait() == 130, shown.text
    assert "Traceback" not in shown.text, shown.text
    assert "note: saving a checkpoint and ending; Ctrl-C again ends at once, without a checkpoint" in shown.text
    assert left_of(started) == []
    last = lines_of(here / "pressed")[-1]
    assert last["kind"] == "end" and last["stopped"] and not last["failure"]
    assert [each.name for each in (here / "pressed" / "checkpoints").iterdir()] == [f"step-{last['step']:08d}"]
    joined = re.sub(r"\s+", " ", shown.text)
    assert f"ended early: {last['step']} steps" in joined and "resume redline train pressed --resume" in joined
