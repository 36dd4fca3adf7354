"""`bench/search.py` takes any table of its format, with or without memory, failure causes and a YAML file beside it."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import redline

pytestmark = pytest.mark.slow
ROOT = Path(redline.__file__).parent
HEAD = "micro_batch,checkpoint_ratio,attention,status,peak_memory_mib,memory_limit_mib"


def table(limit, objective):
    """Writes a CSV of 30 rows whose memory grows with the micro-batch."""
    lines = [f"{HEAD},{objective}"]
    for micro in (1, 2, 4, 8, 16):
        for ratio in (0, 0.5, 1):
            for attention in ("eager", "sdpa"):
                need = 100 + 60 * micro * (1.5 - ratio)
                speed = micro**0.5 * (1 - 0.2 * ratio) * (1.3 if attention == "sdpa" else 1)
                value = 1e3 / speed if objective == "step_ms" else speed
                row = f"ok,{need},{limit},{value}" if need <= limit else f"oom,,{limit},"
                lines.append(f"{micro},{ratio},{attention},{row}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Outputs of the command for a feasible table by speed, one by time, and an infeasible one."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "fast.csv").write_text(table(700, "samples_per_second"))
    (folder / "slow.csv").write_text(table(700, "step_ms"))
    (folder / "none.csv").write_text(table(50, "samples_per_second"))
    out = folder / "out"
    command = [
        sys.executable,
        "bench/search.py",
        "--surfaces",
        folder,
        "--seeds",
        "2",
        "--trials",
        "12",
        "--out",
        out,
    ]
    samplers = "bayes,bayes+reversed,bayes+random,random,batch-search"
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), "--samplers", samplers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done, out


def test_every_search_is_a_row_and_every_sampler_has_a_summary(ran):
    _, out = ran
    rows = list(csv.DictReader((out / "search.csv").open()))
    assert {(row["sampler"], row["surface"]) for row in rows} == {
        (sampler, surface)
        for sampler in ("bayes", "bayes+random", "random", "batch-search")
        for surface in ("fast", "slow")
    }
    for row in rows:
        assert 0 < float(row["after_5"]) <= float(row["after_10"]) <= 1
        assert 0 <= float(row["failed_10"]) <= 1
    summary = {row["sampler"]: row for row in csv.DictReader((out / "search-summary.csv").open())}
    for name, row in summary.items():
        means = [float(each["after_10"]) for each in rows if each["sampler"] == name]
        assert float(row["after_10"]) == pytest.approx(100 * sum(means) / len(means), abs=0.01)
        ahead = float(summary["bayes"]["after_10"]) - float(row["after_10"])
        assert float(row["behind_after_10"]) == pytest.approx(ahead, abs=0.02)


def test_a_table_of_failures_ends_in_nothing_feasible_within_eight_dry_runs(ran):
    done, _ = ran
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("bayes ") and " none " in line]
    assert int(line.split("none")[1].split()[0]) <= 8
    assert "nothing feasible" in line and "the smallest predicted shortfall is" in line


def test_an_estimate_that_the_table_does_not_allow_is_reported(ran):
    done, _ = ran
    assert "bayes+reversed on fast: no estimate, as no YAML beside the table has model" in done.stderr


def test_sparse_tables_are_read_by_their_rows(tmp_path):
    """A table of 40 rows among 40 ** 8 combinations, beside an index of the tables."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(40) for _ in range(8)], axis=1)
    lines = [",".join(f"knob{i}" for i in range(8)) + ",throughput,status"]
    lines += [",".join(map(str, row)) + f",{1 + sum(row)},ok" for row in rows.tolist()]
    (tmp_path / "sparse.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "tables.csv").write_text("table,kind\nsparse,made up\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "bench/search.py", "--tables", str(tmp_path), "--seeds", "1", "--trials", "40"]
    done = subprocess.run(
        [*command, "--samplers", "bayes,optuna-tpe"], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines() if "failed 0%/0%" in line] == [
        ["bayes", "sparse"],
        ["optuna-tpe", "sparse"],
    ]
    assert done.stdout.count("100.0%") >= 2  # every row was tried after 40 dry runs
