"""`redline tune --command`: an unmodified program, tuned from the command line and from Python."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import redline as rl
import yaml
from command_line import run
from predicted_runner import predicted
from redline.estimator.hardware import find_hardware
from redline.estimator.survey import device_of
from redline.tuner.request.options import Request
from redline.tuner.request.target import resolve_task
from tiers import tiered

SPACE = """
knobs:
- {name: micro_batch, values: [1, 2, 4]}
- {name: mode, values: [slow, fast]}
"""
TRAIN = """
import sys, time
from redline import report
batch, mode = int(sys.argv[1]), sys.argv[2]
for step in range(400):
    time.sleep((0.005 if mode == "fast" else 0.012) * (3 + batch))
    report(step=step, samples=batch)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("knobs.yaml").write_text(SPACE)
    Path("train.py").write_text(TRAIN)
    return f"{shlex.quote(sys.executable)} train.py {{micro_batch}} {{mode}}"


OPTIONS = ["--space", "knobs.yaml", "--sampler", "grid", "--measure-time", "100ms"]


def test_a_command_is_tuned_and_the_winner_s_command_is_printed(checkout, capsys):
    knobs = ["--set", "micro_batch=1,4", "--fix", "mode=fast"]
    code, out, err = run(capsys, "tune", "--command", checkout, *OPTIONS, *knobs, "--out", "run")
    assert code == 0, out + err
    rows = list(csv.DictReader(open("run/trials.csv")))
    assert [(row["status"], row["unit"]) for row in rows] == [("ok", "samples/s")] * 2
    best = yaml.safe_load(Path("run/best.yaml").read_text())
    assert best["best"]["configuration"] == {"micro_batch": 4, "mode": "fast"}
    (shown,) = [line for line in out.replace("\n  ", " ").splitlines() if "the winner's command:" in line]
    assert shlex.split(shown.partition("command: ")[2])[-3:] == ["train.py", "4", "fast"]
    asked = yaml.safe_load(Path("run/run.yaml").read_text())["asked"]["workload"]["command"]
    assert shlex.split(asked) == ["--command", checkout]
    # The entry that measures the winner again is a complete command line.
    again = best["reproduce"]
    again = shlex.split(again) if isinstance(again, str) else again
    assert again[:3] == ["redline", "tune", "--command"]
    code, out, err = run(capsys, *again[1:], "--out", "again", "--measure-time", "100ms")
    assert code == 0, out + err
    (row,) = csv.DictReader(open("again/trials.csv"))
    assert (row["knob.micro_batch"], row["knob.mode"]) == ("4", "fast")
    assert sorted(each.name for each in Path().iterdir()) == ["again", "knobs.yaml", "run", "train.py"]


def test_a_command_in_a_file_is_tuned_alike_and_dry_starts_nothing(checkout, capsys):
    Path("tune.yaml").write_text(yaml.safe_dump({"command": checkout, "env": ["A={micro_batch}"]}))
    code, out, err = run(capsys, "tune", "--command-file", "tune.yaml", "--space", "knobs.yaml", "--dry")
    assert code == 0, err
    first, second, third = out.splitlines()
    assert first == f"A=1 {sys.executable} train.py 1 slow"
    assert len({first, second, third}) == 3 and not Path("runs").exists()
    assert (
        subprocess.run(
            ["sh", "-c", f"export {first.partition(' ')[0]}; timeout 1 {first.partition(' ')[2]}"], check=False
        ).returncode
        == 124
    )


def test_the_first_two_that_crash_alike_end_the_search(checkout, capsys):
    works = Path("train.py").read_text()
    Path("train.py").write_text("import sys\nraise SystemExit(f'no such file: {sys.argv[1]}')\n")
    code, out, _ = run(capsys, "tune", "--command", checkout, "--space", "knobs.yaml", "--trials", 6, "--out", "run")
    assert code == 3 and "the first two trials crashed in the same way, so the command is to blame" in out
    assert "next     read run/logs/0.log" in out and "no such file: " in Path("run/logs/0.log").read_text()
    assert len(list(csv.DictReader(open("run/trials.csv")))) == 2
    Path("train.py").write_text(works)
    options = ["--space", "knobs.yaml", "--measure-time", "200ms", "--trials", 3, "--out", "run", "--resume"]
    code, out, err = run(capsys, "tune", "--command", checkout, *options)
    assert code == 0, "the crashes are of another version of the program: " + out + err
    assert [each["status"] for each in csv.DictReader(open("run/trials.csv"))] == ["crash", "crash", "ok"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["gpt2-tiny", "--command", "true {micro_batch} {mode}"],
            "give one target to tune, but got 'gpt2-tiny' as well",
        ),
        (["gpt2-tiny", "--model", "x"], "--model is an option of a command"),
        (["--command", "true {micro_batch} {mode}", "--model", "gpt3-tiny"], "did you mean 'gpt2-tiny'"),
        (["--command", "true {micro_batch} {mode}", "--model", "gpt2", "--layerwise"], "--layerwise needs a workload"),
        (["--command", "true {micro_batch} {mode} {global_batch}"], "set it with --global-batch"),
        (
            ["--command", "true {micro_batch} {mode}", "--global-batch", "8"],
            "has no placeholder for the global batch, 8",
        ),
        (["--command", "true {micro_batch} {mode}", "--hardware", "h100-80gb"], "--hardware is for a workload"),
        (["gpt2-tiny", "--metric", "x"], "--metric is an option of a command"),
        (["--command", "true {micro_batch}"], "the knob 'mode' is not used"),
        (["--command", "true {micro_batch} {mode}", "--seq-len", "8"], "are for a workload, not for a command"),
        (
            ["--command", "true {micro_batch} {mode}", "--runner", "simulate"],
            "simulate was removed: `redline estimate -o plan.yaml` predicts",
        ),
        (["--command-file", "render.yaml"], "x.yaml, cannot be read"),
        (["--command", "true", "--metric-file", "log.csv"], "--metric-file was removed: print the numbers"),
        (["--command", "true", "--env", "A=1"], "--env was removed: write NAME=VALUE before the command's program"),
        (["--command-file", "none.yaml"], "none.yaml cannot be read"),
        (["--command-file", "odd.yaml"], "unknown field 'comand'; did you mean 'command'?"),
        (["--command-file", "odd.yaml", "--metric", "x"], "write the value of --metric into it"),
        (["gpt2-tiny", "--dry"], "--dry prints commands"),
    ],
)
def test_options_that_do_not_apply_to_a_command_are_refused_at_once(checkout, capsys, arguments, says):
    Path("odd.yaml").write_text("command: a\ncomand: b\n")
    Path("render.yaml").write_text("command: 'true {micro_batch} {mode}'\nrender: x.yaml\n")
    code, _, err = run(capsys, "tune", *arguments, *(["--space", "knobs.yaml"] if "gpt2-tiny" not in arguments else []))
    assert code == 2 and says in err
    assert not Path("runs").exists()


def test_a_command_without_a_knob_is_measured_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""
import time, torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for rows in DataLoader(torch.randn(4000, 8), batch_size=4):
    time.sleep(0.01)
    model(rows).sum().backward()
    optimizer.step()
""")
    code, out, err = run(
        capsys, "tune", "--command", f"{sys.executable} train.py", "--measure-time", "1s", "--out", "r"
    )
    assert code == 0, out + err
    assert "the command has no knob, so it is measured once: write {micro_batch}" in out
    shown = out.partition("\nmeasured ")[2]
    assert "samples/s" in shown.splitlines()[0] and "winner" not in shown
    for line in ("samples a step   4: 1 pass of 4", "formats          9 in float32; matrix products in float32"):
        assert line in shown
    step_ms, forward = (
        float(re.search(pattern, shown)[1]) for pattern in (r"step +([\d.]+) ms", r"wall time +forward (\d+) %")
    )
    # The forward sleeps 10 ms, whatever else the machine does: its share is at least that, but for rounding and stalls.
    assert step_ms >= 10 and forward / 100 * step_ms >= 9.5
    limit = "stalls" if "stalls take" in out else "the forward and backward passes"
    assert f"limited by       {limit}" in shown
    (row,) = csv.DictReader(open("r/trials.csv"))
    assert float(row["samples_per_second"]) == pytest.approx(4e3 / step_ms, rel=0.01) and step_ms < 40


def test_results_are_not_lost_if_the_command_fails_when_it_is_measured_again(checkout, capsys):
    text = "import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir()\nprint('value', sys.argv[1])\n"
    Path("train.py").write_text(text)
    command = f"{shlex.quote(sys.executable)} train.py {{clients}}"
    code, out, err = run(
        capsys, "tune", "--command", command, "--set", "clients=1,3", "--metric", r"value (?P<value>\d)", "--sampler",
        "grid", "--out", "r",
    )  # fmt: skip
    assert code == 0 and "Nothing feasible" not in out, out + err
    text = " ".join(out.split())
    assert (
        "winner trial 1: 3 value, unconfirmed it ended as crash when it was measured again: the command exited" in text
    )
    best = yaml.safe_load(Path("r/best.yaml").read_text())["best"]
    assert (best["throughput"], best["unconfirmed"].partition(" when ")[0]) == (3.0, "it ended as crash")
    code, out, _ = run(capsys, "show", "r")
    assert code == 0 and "unconfirmed: it ended as crash when it was measured again" in " ".join(out.split())


@pytest.mark.parametrize("runner", tiered(["local"], ["ray"]))
def test_a_global_batch_gives_the_accumulation_and_when_it_is_measured_again(checkout, capsys, runner):
    Path("train.py").write_text(TRAIN.replace("fast", "2"))
    command = f"{shlex.quote(sys.executable)} train.py {{micro_batch}} {{grad_accum}}"
    options = ["--global-batch", "4", "--measure-time", "200ms"]
    code, out, err = run(
        capsys, "tune", "--command", command, "--set", "micro_batch=2,4", *options, "--sampler", "grid", "--runner",
        runner, "--out", "r",
    )  # fmt: skip
    assert code == 0, out + err
    rows = list(csv.DictReader(open("r/trials.csv")))
    assert [(row["knob.micro_batch"], row["knob.grad_accum"]) for row in rows] == [("2", "2"), ("4", "1")]
    again = shlex.split(yaml.safe_load(Path("r/best.yaml").read_text())["reproduce"])
    assert again[again.index("--global-batch") + 1] == "4"
    code, out, err = run(capsys, *again[1:], "--out", "again", "--measure-time", "200ms")
    assert code == 0, out + err
    (row,) = csv.DictReader(open("again/trials.csv"))
    assert (row["knob.micro_batch"], row["knob.grad_accum"]) in (("2", "2"), ("4", "1"))


MEGATRON = "torchrun pretrain_gpt.py --bf16 --seq-length 1024"
CLUSTER = predicted("gpt2", "h100-80gb", devices=8, global_batch=64, trials=6)


def test_a_command_whose_model_is_known_is_estimated_exported_and_begins_another_search(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    megatron = rl.Command(command=MEGATRON, launcher="megatron", model="gpt2")
    found = rl.tune(megatron, out="r", **CLUSTER)
    assert any(note.startswith("the estimate is that of gpt2, 1024 tokens a sample") for note in found.notes)
    best = yaml.safe_load(Path("r/best.yaml").read_text())
    size = best["best"]["configuration"]["micro_batch"]
    asked = yaml.safe_load(Path("r/run.yaml").read_text())["asked"]
    assert asked["workload"]["spec"] == "gpt2" and asked["shape"]["layers"] == 12 and asked["seq_len"] == 1024
    (shown,) = [note for note in found.notes if note.startswith("the winner's command")]
    assert f"--micro-batch-size {size} " in shown and "--global-batch-size 64" in shown and "--train-iters" not in shown
    assert Path("r/winner/command.sh").read_text() in f"{shown}\n"
    code, out, err = run(capsys, "export", "r", "--to", "yaml")
    assert code == 0 and f"micro_batch: {size}" in out and MEGATRON in out, out + err
    again = rl.tune(megatron, out="again", warm_start="r", **CLUSTER)
    assert again.all_trials[1].config == found.best.config and again.all_trials[1].sampler == "user"
    otherwise = rl.Command(command=f"{MEGATRON} --model gpt2 --use-flash-attn", launcher="megatron")
    notes = " ".join(rl.tune(otherwise, out="otherwise", **CLUSTER).notes)
    assert "the command names it, and `model` names another" in notes


def test_a_model_that_flags_describe_needs_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257"
    found = rl.tune(rl.Command(command=f"{MEGATRON} {sizes}", launcher="megatron"), out="r", **CLUSTER)
    described_by = "the estimate is that of the model that the command's flags describe, 1024 tokens a sample"
    assert any(note.startswith(described_by) for note in found.notes)
    assert yaml.safe_load(Path("r/run.yaml").read_text())["asked"]["shape"]["layers"] == 12


def test_a_global_batch_that_the_command_says_itself_is_the_estimates_too():
    """Megatron-LM accumulates micro-batches up to the global batch, which fills a pipeline."""
    text = f"{MEGATRON} --global-batch-size 48"
    command = rl.Command(command=text, launcher="megatron", model="gpt2")
    h100 = device_of(find_hardware("h100-80gb"))
    task = resolve_task(Request(command, devices=8), device=h100)
    assert task.without == {"global_batch": 48, "precision": "bf16"}
    configs = list(task.space)
    assert configs and all(48 % (each["micro_batch"] * 8 // (each["tp"] * each["pp"])) == 0 for each in configs)
    assert {each["micro_batch"] for each in configs} > {1, 2}
    free = rl.Command(command=MEGATRON, launcher="megatron", model="gpt2")
    assert resolve_task(Request(free, devices=8), device=h100).without["grad_accum"] == 1
    plain = f"{MEGATRON} --tensor-model-parallel-size 4 --micro-batch-size {{micro_batch}} --global-batch-size 16"
    request = Request(rl.Command(command=plain), override={"micro_batch": (1, 2, 4, 8, 16)}, devices=8)
    task = resolve_task(request, cluster=True)
    assert task.without == {"global_batch": 16, "precision": "bf16"}
    assert [each["micro_batch"] for each in task.space] == [1, 2, 4, 8], "two replicas of 4 devices"
    assert task.command._samples_per_step({"micro_batch": 2}) == 16


def test_a_model_that_only_the_command_knows_is_no_obstacle(checkout, capsys):
    code, out, err = run(
        capsys, "tune", "--command", f"{checkout} --model=resnet-of-ours", *OPTIONS, "--trials", 1, "--out", "r"
    )
    note = "without an estimate of the command's model (--model names one): unknown model 'resnet-of-ours'"
    assert code == 0 and note in out, out + err


@pytest.mark.slow
def test_the_first_two_that_time_out_without_a_metric_end_the_search(checkout, capsys):
    Path("train.py").write_text("import time\nprint('[iter 00010] 654.4 samples/sec', flush=True)\ntime.sleep(600)\n")
    options = ["--space", "knobs.yaml", "--trials", 6, "--out", "run", "--trial-timeout", "6s"]
    code, out, _ = run(capsys, "tune", "--command", checkout, *options)
    assert (
        code == 3
        and "the first two trials timed out without a usable metric, so the command is to blame"
        in " ".join(out.split())
    )
    rows = list(csv.DictReader(open("run/trials.csv")))
    assert [each["status"] for each in rows] == ["timeout", "timeout"]
