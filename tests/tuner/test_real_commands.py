"""Typical training scripts, tuned by the commands of docs/commands.md: real launchers, unmodified programs."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redline
import yaml
from processes import left_of

ROOT = Path(redline.__file__).parent
EXAMPLES = ROOT / "examples" / "commands"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the examples as in a clone; programs of the test environment come first in the path."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "commands").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def tune(*arguments, timeout=900):
    command = [sys.executable, "-m", "redline.cli", "tune", *map(str, arguments), "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    rows = list(csv.DictReader(open("run/trials.csv"))) if Path("run/trials.csv").exists() else []
    return done, rows


SHORT = ("--trials", 2, "--measure-time", "1s", "--trial-timeout", "3m", "--patience", 0)
RUNS = {
    "torchrun with the Trainer": (
        "--command-file", "examples/commands/trainer.yaml", "--devices", 2, "--set", "micro_batch=8,32",
        "--set", "checkpointing=false", "--set", "precision=fp32",
    ),
    "the launcher of the Trainer": (
        "--launcher", "trainer", "--global-batch", 32, "--devices", 2, "--set", "micro_batch=4,16", "--set", "precision=fp32",
        "--set", "checkpoint_ratio=0", "--set", "fusion=false", "--set", "optim=adamw_torch",
        "--command", "torchrun --nproc-per-node 2 --master-port {master_port} examples/commands/trainer.py --use_cpu true",
    ),
    "accelerate": (
        "--launcher", "accelerate", "--devices", 1, "--set", "micro_batch=8,32", "--set", "fusion=false",
        "--set", "precision=fp32",
        "--command", "accelerate launch --num_processes 1 --num_machines 1 --cpu examples/commands/loop.py --batch {micro_batch}",
    ),
    "DeepSpeed": (
        "--command-file", "examples/commands/zero.yaml", "--devices", 2, "--global-batch", 32, "--set", "micro_batch=4,16",
        "--set", "precision=fp32", "--fix", "zero=2",
    ),
    "Lightning": (
        "--devices", 1, "--set", "micro_batch=8,32",
        "--command", "python examples/commands/fit.py --batch {micro_batch} --folder {trial_dir}",
    ),
    "LLaMA-Factory": (
        "--launcher", "llamafactory", "--global-batch", 8, "--devices", 1, "--set", "micro_batch=4,8", "--set", "precision=fp32",
        "--set", "checkpoint_ratio=0", "--set", "kernels=false", "--command", "llamafactory-cli train examples/commands/sft.yaml",
    ),
    "LitGPT": (
        "--launcher", "litgpt", "--global-batch", 8, "--devices", 1, "--set", "micro_batch=4,8", "--set", "precision=fp32",
        "--command", "litgpt finetune_full tiny/litgpt --data JSON --data.json_path tiny/data/count.json "
        "--data.val_split_fraction 0.1 --train.max_seq_length 128",
    ),
    "SQLite": (
        "--command-file", "examples/commands/sqlite.yaml", "--set", "page_size=4096", "--set", "cache=-2000",
        "--set", "journal=DELETE,MEMORY",
    ),
}  # fmt: skip

OWN_ENVIRONMENT = {"LLaMA-Factory": "llamafactory-cli", "LitGPT": "litgpt"}
"""Runs that need other library versions than the tests, by the program that starts each in its own environment."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_a_training_as_anyone_has_it_is_tuned(checkout, name):
    if name == "DeepSpeed":
        pytest.importorskip("deepspeed")
    if name in OWN_ENVIRONMENT:
        if (program := shutil.which(OWN_ENVIRONMENT[name])) is None:
            pytest.skip(f"{OWN_ENVIRONMENT[name]} is not on the PATH")
        subprocess.run([Path(program).parent / "python", EXAMPLES / "tiny_llama.py", "tiny"], check=True)
    there = {each.name for each in checkout.iterdir()}
    done, rows = tune(*RUNS[name], *SHORT)
    assert done.returncode == 0, (
        done.stdout + done.stderr + "".join(each.read_text()[-3000:] for each in sorted(Path("run/logs").glob("*.log")))
    )
    assert [row["status"] for row in rows] == ["ok", "ok"]
    unit = "1/seconds" if name == "SQLite" else "samples/s"
    assert all(row["unit"] == unit and float(row["throughput"]) > 0 for row in rows)
    assert "the winner's command:" in done.stdout
    assert {each.name for each in checkout.iterdir()} == there | {"run"}, "the checkout is left as it was"
    assert yaml.safe_load(Path("run/best.yaml").read_text())["best"]["trial"] in (0, 1)


SERVER = (
    "--command-file", "serve.yaml", "--trial-timeout", "3m", "--set", "wait_ms=2", "--set", "threads=1", "--set", "clients=2",
)  # fmt: skip


def serving(**changes):
    """The example's file with a replaced text, such as a bound that holds however busy the machine is."""
    given = yaml.safe_load((EXAMPLES / "serve.yaml").read_text())
    Path("serve.yaml").write_text(yaml.safe_dump({**given, **changes}))
    return given


@pytest.mark.slow
def test_a_model_server_is_tuned_by_its_load(checkout):
    serving(require="p99_ms < 60000")
    done, rows = tune(*SERVER, "--set", "max_batch=8,1", "--trials", 2, "--patience", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["status"], row["unit"]) for row in rows] == [("ok", "requests/s")] * 2
    for row in rows:
        (line,) = [each for each in Path("run", row["log"]).read_text().splitlines() if " requests/s, p50 " in each]
        assert "p99_ms = " + line.split()[-2].rstrip("0").rstrip(".") in row["reason"]
    assert yaml.safe_load(Path("run/best.yaml").read_text())["best"]["measurement"]["told"].startswith("p99_ms = ")
    assert "load.py" in next(line for line in done.stdout.splitlines() if "the winner's command:" in line)


@pytest.mark.slow
def test_a_server_that_breaks_its_bound_is_wrong_and_nothing_of_it_is_left(checkout):
    serving(require="p99_ms < 0.1")
    before = {each.pid for each in psutil.process_iter()}
    done, rows = tune(*SERVER, "--set", "max_batch=1", "--trials", 1)
    assert done.returncode == 3, done.stdout + done.stderr
    (row,) = rows
    assert row["status"] == "wrong" and "but `p99_ms < 0.1` is required; requests_per_second = " in row["reason"]
    left = [each for each in psutil.process_iter() if each.pid not in before and "serve.py" in " ".join(_words(each))]
    assert left_of(left) == []


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
