"""A few of the kills of bench/chaos_local.py, which counts what they lose, repeat, orphan or hang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "chaos_local.py"


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "kills"), [("local", 6), pytest.param("ray", 20, marks=pytest.mark.exhaustive)])
def test_kills_at_random_lose_repeat_orphan_and_hang_nothing(tmp_path, runner, kills):
    told = tmp_path / "told.json"
    command = [sys.executable, BENCH, "--kills", str(kills), "--runners", runner, "--seed", "7", "--out", told]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = json.loads(told.read_text())
    assert [counted[each] for each in ("lost", "repeated", "orphaned", "hung")] == [0] * 4
    assert sum(counted["kills"].values()) == kills
