"""Damaged runs, two thousand in the slow tier: each is shown or refused with a message, and none hides the others."""

import random
import shutil

import pytest
from damage import copied, damage, make_run, read_everything, serve_everything
from redline.results import View
from redline.views.report import Source


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("whole") / "whole")


def fuzz(whole, root, seeds):
    left_out = 0
    for seed in seeds:
        run = copied(whole, root / "damaged")
        damages = damage(run, random.Random(seed))
        try:
            refused = read_everything(run, whole)
            (line,) = (
                serve_everything(root).values()
                if any((run / name).exists() for name in ("run.yaml", "study.log", "trials.csv"))
                else [{}]
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}: {', '.join(damages)}") from error
        left_out += bool(line.get("problems") or any(each.startswith("show") for each in refused))
        shutil.rmtree(run)
    return left_out


def test_damaged_runs_are_read_or_refused_in_words(whole, tmp_path):
    # Damage must be noticed often, or this test could not fail.
    assert fuzz(whole, tmp_path, range(12)) > 3


def test_one_damaged_run_is_a_row_beside_the_others(whole, tmp_path):
    copied(whole, tmp_path / "whole")
    for name in ("run.yaml", "best.yaml", "study.log"):
        (copied(whole, tmp_path / name.replace(".", "-")) / name).write_bytes(b"[" * 50_000 + b"\n")
    lines = serve_everything(tmp_path)
    assert sorted(lines) == ["best-yaml", "run-yaml", "study-log", "whole"]
    assert lines["whole"]["problems"] == 0 and lines["whole"]["trials"] == 8
    assert all(lines[name]["problems"] for name in lines if name != "whole")
    assert lines["best-yaml"]["trials"] == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seq_len: 128", "seq_len: lots", "asked.seq_len is 'lots', not a whole number"),
        ("heads: 4", "heads: 0", "asked.shape.heads is 0, not a whole number from 1 on"),
        ("heads: 4", "kv_lora_rank: 1 $(x)\n    heads: 4", "asked.shape.kv_lora_rank is '1 $(x)', not a whole number"),
        ("layers: 4", "layers: 9000000000", "asked.shape.layers is 9000000000, not a whole number from 1 to 1,048,576"),
        ("family: gpt2", "family: [gpt2]", "asked.shape.family is a list of 1, not a text"),
        ("used: 8", "used: .nan", "asked.devices.used is nan, not a whole number"),
    ],
)
def test_a_part_of_another_type_is_named_and_left_out(whole, tmp_path, old, new, message):
    run = copied(whole, tmp_path / "run")
    text = (run / "run.yaml").read_text()
    assert old in text
    (run / "run.yaml").write_text(text.replace(old, new))
    assert any(message in each for each in View(run).problems)
    assert any(message in each for each in Source.read(run).problems)
    assert [problem for problem in read_everything(run, whole) if "Error" in problem] == []


def test_a_trial_that_makes_no_sense_is_named_and_left_out(whole, tmp_path):
    run = copied(whole, tmp_path / "run")
    text = (run / "study.log").read_text()
    assert '"peak_memory_mib":501.0' in text
    (run / "study.log").write_text(text.replace('"peak_memory_mib":501.0', '"peak_memory_mib":"lots"'))
    view = View(run)
    assert [trial.number for trial in view.trials()] == [0, 2, 3, 4, 5, 6, 7, 8]
    assert "trial 1: peak_memory_mib must be a number, but got 'lots'; left out" in "".join(view.problems)
