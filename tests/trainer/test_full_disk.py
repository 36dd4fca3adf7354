"""A disk filled by other work: the training fails and reports on its terminal what was lost, since its log cannot."""

import signal
import sys
from pathlib import Path

import pytest
from small_disk import fill, on_small_disk
from train_commands import Command, curve, trained

pytestmark = pytest.mark.timeout(900)
ROOM = 64 << 20
NO_ROOM = "No space left on device"


def filled_at_the_start(folder, here, launcher):
    """The disk is full before the first step is logged."""
    out = Path(folder, "out")
    arguments = trained("train", "llama", out, "--save-every", 4, steps=8)
    command = Command(arguments[1:] if launcher else arguments, here, launcher)
    command.until_holds((out / "logs" if not launcher else out / "train.yaml").exists)
    fill(folder)
    return *command.wait(), curve(out)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 1, "-m", "redline.train")


@pytest.mark.parametrize(
    "launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["by itself", "under torchrun"]
)
def test_a_full_disk_fails_the_training_and_reports_the_loss(here, launcher):
    code, text, logged = on_small_disk(ROOM, filled_at_the_start, here, launcher)
    text = " ".join(text.split())
    assert logged == {}, "the disk was full before the first line"
    assert code == 1, text
    assert "the training reached step 8, which could not be saved: " in text and NO_ROOM in text
    assert "there is no checkpoint, and --resume starts from step 0" in text
    assert "ended early" not in text
    if not launcher:  # torchrun prints its own traceback
        assert "THE DISK OF " in text and "Traceback" not in text


def interrupted_when_full(folder, here):
    out = Path(folder, "out")
    command = Command(trained("train", "llama", out, "--save-every", 5, steps=100_000), here)
    command.until(out, lambda line: line["kind"] == "checkpoint" and not line["failure"])
    fill(folder)
    command.until_holds(lambda: "THE DISK OF " in command.text)
    command.signal(signal.SIGINT)
    return command.wait()


@pytest.mark.slow
def test_a_start_interrupted_by_a_full_disk_is_no_training(here):
    """Schedulers requeue a job with exit code 130, and it would fail again."""
    code, text = on_small_disk(ROOM, interrupted_when_full, here)
    text = " ".join(text.split())
    assert code == 1, text
    assert "which could not be saved: " in text and NO_ROOM in text
    assert "the latest checkpoint is of step " in text and "--resume continues from there" in text
