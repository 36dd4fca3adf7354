"""Searches with emulated trials: alone, before real devices, and with a framework's own command."""

import csv
import sys
from pathlib import Path

import pytest
import redline as rl
import yaml
from command_line import run
from redline.frameworks.launcher import without_torchrun
from redline.tuner.emulating import communicated

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


OLD = "import sys; sys.exit('pretrain_gpt.py: error: unrecognized arguments: --fake-process-group')"


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


def test_torchrun_is_taken_out_of_a_command_and_nothing_else():
    assert (
        without_torchrun("torchrun --nproc-per-node 8 --standalone pretrain_gpt.py --bf16")
        == "python pretrain_gpt.py --bf16"
    )
    assert (
        without_torchrun("/opt/bin/torchrun --nnodes=2 -m torchtitan.train --x 1") == "python -m torchtitan.train --x 1"
    )
    assert without_torchrun("python -m torch.distributed.run --nproc_per_node {devices} a.py") == "python a.py"
    assert without_torchrun("torchrun --no-python --nproc-per-node 2 ./train --lr 1") == "./train --lr 1"
    assert without_torchrun("python train.py --with torchrun.yaml") == "python train.py --with torchrun.yaml"


FAKE = """
import os, sys, time
assert "--fake-process-group" in sys.argv, sys.argv
assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("16", "0")
batch = int(sys.argv[sys.argv.index("--micro-batch-size") + 1])
for step in range(1, 300):
    time.sleep(0.01)
    print(f" iteration {step}/ 300 | consumed samples: {step} | elapsed time per iteration (ms): 10.0 | "
          f"global batch size: 32 | lm loss: 9.0 |", flush=True)
"""
COMMAND = [
    *("tune", "--command-file", "command.yaml", "--devices", "16", "--global-batch", "32", "--trials", "2"),
    *("--set", "micro_batch=1,2", "--measure-time", "100ms", "--sampler", "grid", "--out", "run"),
]


def write_command(command):
    """Writes command.yaml, with the launcher's own emulation."""
    fields = {"command": command, "launcher": "megatron", "emulate": True}
    fields["metric"] = r"elapsed time per iteration \(ms\): (?P<step_ms>[\d.]+)"
    Path("command.yaml").write_text(yaml.safe_dump(fields))


def test_one_rank_of_a_command_runs_in_the_framework_s_own_mode(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pretrain_gpt.py").write_text(FAKE)
    write_command("torchrun --nproc-per-node 16 pretrain_gpt.py")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    code, out, err = run(capsys, *COMMAND)
    assert code == 0, out + err
    rows = list(csv.DictReader(open("run/trials.csv")))
    assert [row["status"] for row in rows] == ["ok", "ok"], rows
    assert {row["emulated_ranks"] for row in rows} == {"0"}
    assert {row["devices"] for row in rows} == {"16"}
    assert "emulated rank 0 of 16" in rows[0]["reason"]
    assert "(emulated on one device)" in out


def test_the_share_that_a_rank_alone_lacks_is_that_of_links_and_bubble():
    estimate = rl.Estimator("gpt2", "h100-80gb", {"devices": 8, "global_batch": 64})({"pp": 2, "micro_batch": 4})
    lacking = sum(estimate.breakdown[f"time.{name}"] for name in ("bubble", "pipeline transfers", "data parallel"))
    assert (
        communicated(estimate) == pytest.approx(lacking / estimate.step_ms, abs=0.05) and communicated(estimate) > 0.1
    )


def test_a_version_that_lacks_the_mode_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pretrain_gpt.py").write_text(OLD)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    write_command("torchrun pretrain_gpt.py")
    code, _, _ = run(capsys, *COMMAND)
    assert code == 3
    row = next(csv.DictReader(open("run/trials.csv")))
    assert row["status"] == "crash"
    assert "this version of megatron has no --fake-process-group" in row["reason"]
