"""A few of the kills of bench/chaos_local.py, which counts lost, repeated, orphaned and hanging work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "chaos_local.py"


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "kills"), [("local", 6), pytest.param("ray", 20, marks=pytest.mark.exhaustive)])
def test_kills_at_random_lose_repeat_orphan_and_hang_nothing(tmp_path, runner, kills):
    counts_file = tmp_path / "told.json"
    command = [sys.executable, BENCH, "--kills", str(kills), "--runners", runner, "--seed", "7", "--out", counts_file]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = json.loads(counts_file.read_text())
    assert [counted[each] for each in ("lost", "repeated", "orphaned", "hung")] == [0] * 4
    assert sum(counted["kills"].values()) == kills


OF_RAY = ("rank", "host agent", "Ray node", "Ray head")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "kills"),
    [([], 7), pytest.param(["--ray", "--kinds", *OF_RAY], 6, marks=pytest.mark.exhaustive)],
    ids=["sqlite", "ray"],
)
def test_the_service_loses_and_repeats_nothing_under_kills(tmp_path, where, kills):
    """The time until it continues is measured by the benchmark, on an idle machine."""
    counts_file = tmp_path / "told.json"
    command = [
        sys.executable,
        BENCH.parent / "chaos.py",
        "--kills",
        kills,
        "--searches",
        2,
        "--trials",
        3,
        "--out",
        counts_file,
    ]
    done = subprocess.run([str(each) for each in [*command, *where]], capture_output=True, text=True, timeout=590)
    assert counts_file.exists(), done.stdout + done.stderr
    counted = json.loads(counts_file.read_text())
    assert (counted["lost"], counted["repeated"], counted["kills"]) == ([], [], kills)
