"""A disk filled by other work: the training fails and reports on its terminal what was lost, since its log cannot."""

from pathlib import Path

import pytest
from small_disk import fill, on_small_disk
from train_commands import Command, curve, trained

pytestmark = pytest.mark.timeout(900)


def filled_at_the_start(folder, here):
    """The disk is full before the first step is logged."""
    out = Path(folder, "out")
    command = Command(trained("train", "llama", out, "--save-every", 4, steps=8), here)
    command.until_holds((out / "logs").exists)
    fill(folder)
    return *command.wait(), curve(out)


@pytest.mark.slow
def test_a_full_disk_fails_the_training_and_reports_the_loss(here):
    code, text, logged = on_small_disk(64 << 20, filled_at_the_start, here)
    text = " ".join(text.split())
    assert logged == {}, "the disk was full before the first line"
    assert code == 1, text
    assert "the training reached step 8, which could not be saved: " in text and "No space left on device" in text
    assert "there is no checkpoint, and --resume starts from step 0" in text
    assert "ended early" not in text
    assert "THE DISK OF " in text and "Traceback" not in text
