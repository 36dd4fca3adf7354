"""A training in a terminal: its display, and Ctrl-C, which ends it with a checkpoint."""

import re
import sys

import pytest
from processes import left_of
from pseudo_terminal import Terminal
from train_commands import curve, here, lines_of, processes_of, trained  # noqa: F401

REDLINE = [sys.executable, "-m", "redline.cli"]
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def whole(shown, columns):
    """Checks that the cursor is visible and no redrawn line wrapped; returns the redrawn lines."""
    assert "Traceback" not in shown.text, shown.text
    hidden = [match[2] for match in ESCAPE.finditer(shown.raw) if match[1] == "?25"]
    assert hidden and hidden[-1] == "h"
    live = [line for _, frame in shown.frames for line in frame if re.match(r"step [━╸╺ ]", line)]
    assert live and max(map(len, live)) <= columns
    return live


@pytest.mark.parametrize("columns", [70, 160])
def test_a_training_to_its_end(here, columns):  # noqa: F811
    name = f"terminal{columns}"
    shown = Terminal([*REDLINE, *trained("train", "llama", name, steps=30)], cwd=here, columns=columns)
    assert shown.wait() == 0, shown.text
    live = whole(shown, columns)
    text = " ".join(shown.text.split())  # lines break where the paths are long
    assert "training llama on " in text and "configuration: " in text and "corpus.txt: 1 documents" in text
    seen = {int(found[1]) for line in live if (found := re.search(r" (\d+)/30", line))}
    assert {0, 30} <= seen
    # Only the line with the final state remains of the live view.
    kept = [line for line in shown.lines if re.match(r"step [━╸╺ ]", line)]
    assert len(kept) == 1 and "30/30" in kept[0]
    if columns >= 160:
        assert f"loss {curve(here / name)[30]:.4f}" in kept[0]
    assert "trained: 30 steps, the latest checkpoint in" in shown.text
    assert not any(line.endswith("...") for line in shown.lines), "what was waited for is left over"


def test_ctrl_c_in_a_terminal_ends_with_a_checkpoint(here):  # noqa: F811
    """The terminal sends it to every process of the foreground group at once."""
    command = trained("train", "llama", "pressed", steps=100_000)
    shown = Terminal([*REDLINE, *command], cwd=here, columns=120)
    shown.wait_for("loss ")
    started = processes_of(shown.pid)
    assert len(started) > 1
    shown.send("\x03")
    assert shown.wait() == 130, shown.text
    whole(shown, 120)
    assert "note: saving a checkpoint and ending; Ctrl-C again ends at once, without a checkpoint" in shown.text
    assert left_of(started) == []
    last = lines_of(here / "pressed")[-1]
    assert last["kind"] == "end" and last["stopped"] and not last["failure"]
    assert [each.name for each in (here / "pressed" / "checkpoints").iterdir()] == [f"step-{last['step']:08d}"]
    joined = re.sub(r"\s+", " ", shown.text)
    assert f"ended early: {last['step']} steps" in joined and "resume redline train pressed --resume" in joined
