"""Messages of `redline train`: what it trains on, that no steps are left, and the next command."""

import io

import pytest
import yaml
from redline.cli import train_progress
from train_commands import PLAIN, SIZES, curve, ended, lines_of, trained, words

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


def test_the_progress_of_a_checkpoint_is_shown_now_and_then(monkeypatch):
    line = {"kind": "progress", "what": "checking step-00000400", "bytes": 2**31, "of": 2**36}
    shown = "checking step-00000400: 2,048 MiB of 64.0 GiB"
    plain = io.StringIO()
    listener = train_progress.listener_for(plain)
    listener.on_line(line)
    assert plain.getvalue() == "", "the latest line is younger than half a minute"
    monkeypatch.setattr(train_progress, "READING_S", 0.0)
    listener.on_line(line)
    assert plain.getvalue() == f"{shown}\n"
