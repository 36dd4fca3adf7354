"""Messages of `redline train`: what it trains on, that no steps are left, and the next command."""

import io
import json
import re

import pytest
import yaml
from redline.cli import train_progress
from train_commands import PLAIN, SIZES, WORKLOADS, curve, ended, lines_of, trained, words

pytestmark = pytest.mark.timeout(900)
MADE_UP = "no data is given, so llama trains on made-up tokens"


@pytest.fixture(scope="session")
def finished(here):
    """A finished training of three steps."""
    assert ended(here, *trained("train", "llama", "all-done", "--save-every", 1, steps=3)) == 0
    return here / "all-done"


def test_a_training_without_data_says_that_it_learns_nothing(run, finished):
    arguments = ["train", "llama", *SIZES, *PLAIN, "--devices", 1, "--steps", 1, "--out", "no-data"]
    text = words(run(*arguments))
    assert f"note: {MADE_UP}: that shows its speed, but it learns nothing; --data names training files" in text
    assert "data: made-up tokens" in text
    again = words(run("train", "no-data", "--resume", "--steps", 2))
    assert MADE_UP in again, "whoever goes on is told as well"
    assert MADE_UP not in words(run("train", finished.name, "--resume", "--steps", 4))


def test_a_training_that_is_done_is_neither_planned_nor_started_again(run, finished):
    document, log = (finished / "train.yaml").read_bytes(), lines_of(finished)
    steps = max(curve(finished))
    text = words(run("train", finished.name, "--resume", "--steps", steps, "--devices", 2))
    assert f"note: all {steps} steps are done already; a higher --steps continues" in text
    assert "replanned" not in text and f"export redline convert {finished.name} OUT --to hf" in text
    assert (finished / "train.yaml").read_bytes() == document and lines_of(finished) == log


def test_a_training_without_a_checkpoint_says_that_it_restarts(run, finished, tmp_path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "train.yaml").write_bytes((finished / "train.yaml").read_bytes())
    text = words(run("train", tmp_path / "killed", "--resume", "--steps", 1))
    assert "note: there is no checkpoint to continue from: the training starts from step 0" in text


def test_the_suggested_export_is_possible(run, here, finished):
    assert f"export redline convert {finished.name} OUT --to hf" in words(run("train", finished.name, "--resume"))
    adapted = words(run(*trained("train", "llama", "of-adapters", "--lora", "r=4", steps=1)))
    assert "export redline convert of-adapters OUT --to peft" in adapted
    assert words(run("convert", "of-adapters", "as-peft", "--to", "peft")).startswith("wrote as-peft")
    own = words(run("train", "work.py:net", "--devices", 1, "--steps", 1, "--out", "of-own-code"))
    assert "trained: 1 step, " in own and "export" not in own


def test_a_dry_run_is_compared_only_with_its_own_training(run, here, finished):
    (first,) = yaml.safe_load((finished / "train.yaml").read_text())["strategies"]
    best = {"configuration": first["configuration"], "throughput": 1e12}
    trains = {"workload": {"spec": "llama"}, "seq_len": 16, "global_batch": 8, "devices": {"used": 1}}
    (here / "won.yaml").write_text(yaml.safe_dump({"best": best, "trains": trains}))
    arguments = ["train", "won.yaml", "--data", "corpus.txt", "--steps", 1, "--out"]
    assert "tokens/s, 100.0 % below the dry run" in words(run(*arguments, "as-it-was"))
    assert "the dry run" not in words(run(*arguments, "adapted-won", "--lora", "r=4"))
    assert "the dry run" not in words(run(*arguments, "longer", "--seq-len", 32))


def test_a_long_restore_of_a_checkpoint_shows_its_progress(run, here, monkeypatch):
    """A workload whose ranks report after every piece simulates a large checkpoint."""
    ready = "from redline.trainer.checkpoint import state\n        state.PROGRESS_S = 0.0\n        self.samples = 0\n"
    (here / "often.py").write_text(WORKLOADS.replace("self.samples = 0\n", ready))
    monkeypatch.setattr(train_progress, "READING_S", 0.0)
    assert "reading step" not in words(run("train", "often.py:net", "--devices", 1, "--steps", 1, "--out", "often"))
    text = words(run("train", "often", "--resume", "--steps", 2))
    assert "reading step-00000001: " in text
    progress = [line for line in lines_of(here / "often") if line["kind"] == "progress"]
    for what in ("reading step-00000001",):
        bytes_read = [line["bytes"] for line in progress if line["what"] == what]
        (whole,) = {line["of"] for line in progress if line["what"] == what}
        assert bytes_read == sorted(bytes_read) and bytes_read[-1] == whole > 100_000
    out = words(run("train", "often", "--resume", "--steps", 3, "--json"))
    assert json.loads(out)["step"] == 3
    assert len([each for each in lines_of(here / "often") if each["kind"] == "progress"]) == 2 * len(progress)


def test_a_log_shows_the_progress_of_a_checkpoint_now_and_then_and_a_terminal_in_its_line(monkeypatch):
    line = {"kind": "progress", "what": "checking step-00000400", "bytes": 2**31, "of": 2**36}
    shown = "checking step-00000400: 2,048 MiB of 64.0 GiB"
    plain = io.StringIO()
    with train_progress.listening(plain) as listener:
        listener.on_line(line)
        assert plain.getvalue() == "", "the latest line is younger than half a minute"
        monkeypatch.setattr(train_progress, "READING_S", 0.0)
        listener.on_line(line)
    assert plain.getvalue() == f"{shown}\n"
    live = train_progress._Live(io.StringIO())
    live._task = live._progress.add_task("step", total=10, numbers=["starting"])
    live.on_line(line)
    assert live._progress.tasks[0].fields["numbers"] == [shown]


@pytest.mark.parametrize("columns", [45, 60, 70, 80, 160])
def test_a_narrow_terminal_shows_fewer_numbers_but_how_far_a_training_is(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    live = train_progress._Live(io.StringIO())
    live._task = live._progress.add_task("step", total=1000, numbers=["starting"])
    live.on_line({
        "kind": "step", "step": 120, "loss": 6.1234, "lr": 1e-3, "grad_norm": 1.234, "tokens_per_second": 1234.0,
        "memory_mib": 345.0, "seconds_left": 184.0,
    })  # fmt: skip
    with live._console.capture() as captured:
        live._console.print(live._progress.get_renderable())
    (line,) = captured.get().rstrip("\n").split("\n")
    assert len(line.rstrip()) <= columns and re.match(r"step ━+ +120/1000 ", line), line
    assert ("3:04 left" in line) is (columns >= 60) and ("345 MiB" in line) is (columns >= 160)
