"""`redline export` on a run of `redline tune`; the Python script that it writes is run."""

import json
import os
import re
import subprocess
import sys

import pytest
import redline as rl
import torch
import yaml
from redline.cli import main
from redline.frameworks import export_targets, render
from redline.results import Measurement, RunFolder, Status, Trial

TEXT = "Full throughput, no out of memory. " * 400


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one trial on one device."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.raises(SystemExit) as ended:
        main([
            *("tune", "gpt2-tiny", "--trials", "1", "--runner", "local", "--measure-time", "100ms"),
            *("--set", "micro_batch=4,8", "--fix", "fusion=false", "--seq-len", "32", "--global-batch", "8"),
            *("--memory-limit", "2GiB", "--out", str(folder)),
        ])  # fmt: skip
    assert ended.value.code == 0
    return folder


def export(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def launch(script, *arguments, ranks=1, cwd):
    """Runs a script, directly or by torchrun, and returns its output."""
    command = [sys.executable, str(script)]
    if ranks > 1:
        flags = ["--nproc-per-node", str(ranks), "--master-port", "0", "--rdzv-backend", "c10d"]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, "--rdzv-endpoint", "localhost:0"]
        command.append(str(script))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def losses(out):
    return [float(each) for each in re.findall(r"loss (\S+)", out)]


@pytest.mark.parametrize("target", sorted(export_targets()))
def test_every_target_takes_the_winner_of_a_run(capsys, run, target):
    code, out, err = export(capsys, run, "--to", target)
    assert code == 0, err
    best = yaml.safe_load((run / "best.yaml").read_text())["best"]
    assert f"trial {best['trial']}" in out or target in ("json",)
    if target == "json":
        assert json.loads(out)["configuration"] == best["configuration"]
    if target == "deepspeed":
        made = json.loads(out)
        assert made["train_batch_size"] == 8
        assert made["train_micro_batch_size_per_gpu"] == best["configuration"]["micro_batch"]


def test_a_file_is_written_with_instructions_to_use_it(capsys, run, tmp_path):
    path = tmp_path / "args.json"
    code, out, err = export(capsys, run, "--to", "trainer", "-o", path, "--trial", "0")
    assert (code, out) == (0, "")
    assert f"wrote {path}\nUse: HfArgumentParser(TrainingArguments).parse_json_file({str(path)!r})" in err
    assert f"\nStart: OMP_WAIT_POLICY=PASSIVE torchrun --nproc-per-node 1 train.py {path}\n" in err
    assert "note: seq_len=32" in err  # JSON has no comments
    made = json.loads(path.read_text())
    assert made["per_device_train_batch_size"] == 8 and made["use_cpu"] is True


@pytest.mark.slow
def test_the_python_script_trains_on_a_text(capsys, run, tmp_path):
    script, text, weights = tmp_path / "train.py", tmp_path / "corpus.txt", tmp_path / "weights.pt"
    text.write_text(TEXT)
    assert export(capsys, run, "--to", "python", "-o", script)[0] == 0
    code, out, err = launch(
        script, "--data", str(text), "--steps", "8", "--lr", "3e-3", "--log-every", "1", "--save", str(weights),
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    values = losses(out)
    assert len(values) == 8
    assert values[-1] < values[0] - 1.0
    model = rl.workload("gpt2-tiny").build_model()
    model.load_state_dict(torch.load(weights))


def trained(folder, **knobs):
    """Losses and weights after three steps of llama-tiny, which has no dropout."""
    ranks = 2 if knobs else 1
    config = {"micro_batch": 2, "grad_accum": 4 // knobs.get("dp", 1), **knobs}
    devices = {"type": "cpu", "used": ranks}
    asked = {"workload": {"spec": "llama-tiny"}, "seq_len": 32, "global_batch": 8, "devices": devices}
    measured = Measurement(status=Status.OK, throughput=1.0, devices=ranks)
    made = render("python", Trial(number=0, config=config, measurement=measured), {"asked": asked})
    (folder / "train.py").write_text(made.text)
    arguments = ["--steps", "3", "--log-every", "1", "--lr", "1e-2", "--save", "weights.pt"]
    code, out, err = launch(folder / "train.py", *arguments, ranks=ranks, cwd=folder)
    assert code == 0, err
    return losses(out), torch.load(folder / "weights.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Result of the training on one device."""
    return trained(tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"dp": 2, "zero": 2}, id="dp"),
        pytest.param({"tp": 2}, id="tp", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, id="pp", marks=pytest.mark.exhaustive),
    ],
)
def test_the_python_script_runs_under_torchrun_as_on_one_device(knobs, alone, tmp_path):
    """Two ranks compute the losses and weights of one device."""
    values, weights = trained(tmp_path, **knobs)
    assert values == pytest.approx(alone[0], abs=2e-3)
    assert weights.keys() == alone[1].keys()
    for name, one in alone[1].items():
        # AdamW's first steps have the learning rate's size whatever the gradient's, so tiny gradients may change sign.
        assert (weights[name] - one).abs().mean() < 1e-4, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "acelerate"], "did you mean 'accelerate'"),
        (["--to", "yaml", "--trial", "99"], "there is no trial 99; the run has 0 to 2"),
        (["--to", "yaml", "-o", "no/such/folder/x.yaml"], "there is no folder"),
        (["--to", "python", "--launch", "slurm"], "--launch was removed: the header of the file has the line"),
        (["--to", "yaml", "--force"], "--force is for a single trial"),
        ([], "--to"),
    ],
)
def test_bad_input_is_named(capsys, simulated, arguments, message):
    code, out, err = export(capsys, simulated, *arguments)
    assert code == 2 and message in err and out == ""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """A simulated run for 64 devices on hosts of eight: a winner, a trial without memory, and a pending one."""
    asked = {
        "model": "llama3-8b",
        "workload": {"id": "3f2a", "spec": "llama3-8b"},
        "shape": {
            "family": "llama",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "intermediate": 14336,
            "vocabulary": 128256,
        },
        "devices": {"type": "cuda", "name": "h100-80gb", "count": 8, "used": 64, "per_host": 8},
        "seq_len": 128,
        "global_batch": 64,
        "simulated": True,
    }
    config = {"tp": 4, "pp": 2, "dp": 8, "zero": 1, "precision": "bf16"}
    outcomes = (
        Measurement(status=Status.OK, throughput=1000.0, unit="tokens/s", devices=64, seconds_measure=1.0),
        Measurement(status=Status.OOM, reason="simulated: out of memory", devices=64, peak_memory_mib=90000.0),
    )
    path = tmp_path_factory.mktemp("runs") / "simulated"
    with RunFolder.open(path, asked, knobs=dict.fromkeys([*config, "micro_batch", "grad_accum"])) as run:
        for micro_batch, measured in ((1, outcomes[0]), (8, outcomes[1]), (4, None)):
            trial = run.start({**config, "micro_batch": micro_batch, "grad_accum": 8 // micro_batch}, sampler="user")
            if measured is not None:
                run.finish(trial.number, measured)
    return path


def test_a_simulated_run_is_started_on_the_hosts_of_its_hardware(capsys, simulated):
    out = export(capsys, simulated, "--to", "megatron")[1]
    assert "--nnodes 8 --nproc-per-node 8" in out and "--num-layers 32\n" in out


def test_a_trial_that_did_not_run_to_its_end_is_refused_unless_forced(capsys, simulated):
    for number, end in (
        (1, "did not run to its end, it ended as oom (simulated: out of memory)"),
        (2, "has not ended"),
    ):
        code, out, err = export(capsys, simulated, "--to", "accelerate", "--trial", number)
        assert (code, out) == (2, "") and f"trial {number} {end}" in err and "--force" in err
        code, out, _ = export(capsys, simulated, "--to", "accelerate", "--trial", number, "--force")
        assert code == 0 and f"# - trial {number} {end}" in out


def test_the_targets_can_be_listed(capsys):
    code, out, _ = export(capsys, "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(export_targets())
