"""`redline tune` as a user runs it: real trials and kills, all but one test in a separate process."""

import csv
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from processes import left_of
from redline.cli import main

WORKLOAD = '''
import time

import torch
from torch import nn

import redline as rl

torch.set_num_threads(1)  # so that a busy machine does not make two threads wait for each other


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 256, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def make_space():
    space = rl.Space()
    micro = space.choice("micro_batch", [4, 8, 16, 32, 64], default=8)
    space.choice("checkpoint_ratio", [0, 1])
    space.derive("grad_accum", 64 // micro)
    return space


def net():
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


mlp = rl.Workload(name="mlp", model=net, batch=batch, loss=loss, space=make_space(), global_batch=64)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        time.sleep(0.03)
        return self.net(x)


slow = rl.Workload(name="slow", model=Slow, batch=batch, loss=loss, space=make_space(), global_batch=64)


class Cheating(nn.Module):
    """Faster above micro-batch 8, because it leaves out half of its input; no number above 32."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        if len(x) > 8:
            x = torch.cat([x[:, :128], torch.zeros(len(x), 128)], dim=1) * 5
        return self.net(x) * (float("nan") if len(x) > 32 else 1.0)


cheating = rl.Workload(name="cheating", model=Cheating, batch=batch, loss=loss, space=make_space(), global_batch=64)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work.py").write_text(WORKLOAD)
    return tmp_path


def command(name, *arguments):
    return [
        sys.executable, "-m", "redline.cli", "tune", "--workload", f"work.py:{name}",
        "--runner", "local", "--sampler", "random", "--out", "run", "--measure-time", "100ms",
        "--patience", "0", *map(str, arguments),
    ]  # fmt: skip


def tune(folder, name, *arguments, timeout=570):
    return subprocess.run(command(name, *arguments), cwd=folder, capture_output=True, text=True, timeout=timeout)


def rows(folder):
    path = folder / "run" / "trials.csv"
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_ends_with_the_winner_its_gain_and_its_files(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(command("mlp", "--trials", 6)[3:])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    for word in ("winner", "default", "gain", "samples/s", "measured again"):
        assert word in out
    best = yaml.safe_load((folder / "run" / "best.yaml").read_text())
    assert best["gain"] >= 0.9
    assert best["default"]["configuration"]["micro_batch"] == 8
    assert best["best"]["remeasured"]  # only one, if other work slowed down all the others
    assert "--fix micro_batch=" in best["reproduce"]
    table = rows(folder)
    assert [row["trial"] for row in table] == [str(number) for number in range(6)]
    assert {row["status"] for row in table} == {"ok"}
    assert all(float(row["throughput"]) > 0 and float(row["seconds_overhead"]) >= 0 for row in table)
    assert len({(row["knob.micro_batch"], row["knob.checkpoint_ratio"]) for row in table}) == 6


@pytest.mark.slow
def test_a_faster_candidate_that_computes_something_else_or_no_number_is_wrong(folder):
    done = tune(folder, "cheating", "--trials", 10)
    assert done.returncode == 0, done.stderr
    statuses = {row["knob.micro_batch"]: row["status"] for row in rows(folder)}
    assert statuses == {"4": "ok", "8": "ok", "16": "wrong", "32": "wrong", "64": "wrong"}
    reasons = {row["knob.micro_batch"]: row["reason"] for row in rows(folder)}
    assert "in the first step is" in reasons["16"] and "in the first step is" in reasons["32"]
    assert reasons["64"] == "loss is nan at the first step"


def start(folder, *arguments):
    return subprocess.Popen(
        command(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_rows(folder, count, process):
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if (folder / "run" / "trials.csv").exists() and len(rows(folder)) >= count:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError(f"no {count} rows within five minutes")


@pytest.mark.slow
def test_kill_9_and_resume_lose_nothing_and_repeat_nothing(folder):
    process = start(folder, "slow", "--trials", 5)
    wait_for_rows(folder, 2, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    before = rows(folder)
    assert left_of(family, timeout=60) == []

    refused = tune(folder, "slow", "--trials", 5)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    other = tune(folder, "mlp", "--trials", 5, "--resume")
    assert other.returncode == 2
    assert "workload" in other.stderr
    assert rows(folder) == before

    done = tune(folder, "slow", "--trials", 5, "--resume")
    assert done.returncode == 0, done.stderr
    after = rows(folder)
    # The leaders were measured again since; the configurations and times of the first trials are unchanged.
    kept = ["trial", "sampler", "started", "loss", "log", *(name for name in before[0] if name.startswith("knob."))]
    assert [[row[name] for name in kept] for row in after[: len(before)]] == [
        [row[name] for name in kept] for row in before
    ]
    assert [row["trial"] for row in after] == [str(number) for number in range(5)]
    configs = {(row["knob.micro_batch"], row["knob.checkpoint_ratio"]) for row in after}
    assert len(configs) == 5


@pytest.mark.slow
def test_sigterm_keeps_what_was_found_and_exits_130(folder):
    process = start(folder, "slow", "--trials", 9)
    wait_for_rows(folder, 1, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130, out
    assert "Interrupted" in out
    assert "winner" in out
    assert "Traceback" not in out
    assert left_of(family, timeout=0) == []
    assert (folder / "run" / "best.yaml").exists()
