"""bench/parallel.py measures every side of its table and writes the table."""

import subprocess
import sys
from pathlib import Path

import pytest
import redline

BENCH = Path(redline.__file__).parent / "bench" / "parallel.py"


@pytest.mark.exhaustive
def test_every_side_is_measured_on_two_ranks(tmp_path):
    pytest.importorskip("accelerate")
    command = "--models llama-tiny --seq-len 16 --global-batch 8 --trials 1 --turns 2 --steps 2 --runner local"
    done = subprocess.run(
        [sys.executable, str(BENCH), *command.split(), "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = (tmp_path / "parallel-llama-tiny-2xcpu.md").read_text()
    rows = [line.split("|")[1:-1] for line in kept.splitlines() if line.startswith("| ")][1:]
    assert [row[0].split(",")[0].strip() for row in rows] == [
        "DDP", "transformers.Trainer", "FSDP2 as by accelerate", "redline", "redline"
    ]  # fmt: skip
    for row in rows:
        assert float(row[1].split()[0]) > 0 and row[5].strip().endswith("x")
    assert rows[-1][5].strip() == "1.00x"
    assert "--models llama-tiny" in kept and "torch 2." in kept
