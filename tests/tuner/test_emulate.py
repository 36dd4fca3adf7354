"""Searches with emulated trials."""

import csv

import pytest
import redline as rl
import yaml
from command_line import run

NARROW = {
    "global_batch": 32,
    "seq_len": 16,
    "fix": {
        "attention": "sdpa",
        "precision": "fp32",
        "fusion": False,
        "kernels": False,
        "fused_optimizer": True,
        "checkpoint_ratio": 0,
        "tp": 1,
        "sp": 1,
        "cp": 1,
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A search for 64 devices that measures only memory."""
    out = tmp_path_factory.mktemp("runs") / "emulated"
    result = rl.tune(
        "gpt2-tiny", runner="emulate", devices=64, hardware="h100-80gb", trials=2, patience=0, out=out,
        **{**NARROW, "global_batch": 256},
    )  # fmt: skip
    return result, out


def test_a_whole_search_is_emulated_and_says_so_wherever_it_is_shown(finished, capsys):
    result, out = finished
    assert result.emulated
    assert result.best.config["pp"] * result.best.config["dp"] == 64
    rows = list(csv.DictReader((out / "trials.csv").open()))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    for row in rows:
        assert "0" in row["emulated_ranks"].split(",")
        assert float(row["seconds_modelled"]) == pytest.approx(float(row["step_ms"]) / 1e3, rel=1e-5)
    assert yaml.safe_load((out / "best.yaml").read_text())["emulated"] is True
    asked = yaml.safe_load((out / "run.yaml").read_text())["asked"]
    assert asked["emulated"] is True
    assert (asked["devices"]["name"], asked["devices"]["used"]) == ("h100-80gb", 64)
    code, text, _ = run(capsys, "show", out)
    assert code == 0 and "emulated" in text and "h100-80gb" in text
    code, text, _ = run(capsys, "export", out, "--to", "torchtitan")
    assert code == 0 and "emulated" in text
