"""`redline tune --from`: the file of another tuner, from the command line and from Python."""

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest
import redline as rl
import yaml
from command_line import run
from redline.base.errors import UsageError

DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": [1, 2, 4],
    "zero_optimization": {"stage": [0, 1], "overlap_comm": True},
    "bf16": {"enabled": False},
    "autotuning": {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}},
}
READER = """
import json, sys
given = json.load(open(sys.argv[sys.argv.index("--deepspeed") + 1]))
assert given["autotuning"]["enabled"] is False and given["train_batch_size"] is None, given
assert given["train_micro_batch_size_per_gpu"] == int(sys.argv[sys.argv.index("--batch") + 1])
assert given["zero_optimization"]["overlap_comm"] is True and given["bf16"] == {"enabled": False}
print(json.dumps({"speed": given["train_micro_batch_size_per_gpu"] + 10 * given["zero_optimization"]["stage"]}))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("reader.py").write_text(READER)
    Path("own.yaml").write_text("knobs: [{name: batch, values: [1]}]")
    Path("ds.json").write_text(json.dumps(DEEPSPEED))


def configurations(folder):
    return [row for row in csv.DictReader(open(Path(folder, "trials.csv"))) if row["status"] == "ok"]


def test_a_deepspeed_file_is_rendered_for_the_command_that_reads_it(capsys):
    command = f"{shlex.quote(sys.executable)} reader.py --deepspeed ds.json --batch 1"
    options = ["--metric", "speed", "--direction", "max", "--sampler", "grid", "--out", "run"]
    code, out, err = run(capsys, "tune", "--from", "ds.json", "--command", command, *options)
    assert code == 0, out + err
    rows = configurations("run")
    assert {(row["knob.micro_batch"], row["knob.zero"]) for row in rows} == {(m, z) for m in "124" for z in "01"}
    best = yaml.safe_load(Path("run/best.yaml").read_text())
    assert best["best"]["configuration"] == {"micro_batch": 4, "zero": 1}
    again = shlex.split(best["reproduce"]) if isinstance(best["reproduce"], str) else best["reproduce"]
    code, out, err = run(capsys, *again[1:], "--out", "again")
    assert code == 0 and len(configurations("again")) == 1, out + err
    assert json.loads(Path("ds.json").read_text()) == DEEPSPEED


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "ds.json", "--space", "own.yaml", "--command", "true {batch}"], "give one of them"),
        (["--from", "ds.json"], "defines the knobs, not the target: give MODEL, --workload or --command"),
        (["--from", "none.yaml", "--command", "true {x}"], "none.yaml cannot be read"),
        (["--from", "own.yaml", "--command", "true {batch}"], "a space of redline: give it with --space"),
        (["--from", "ds.json", "--command-file", "c.yaml"], "c.yaml cannot be read"),
        (["gpt2-tiny", "--from", "ds.json", "--metric", "x"], "--metric is an option of a command"),
        (["--from", "ds.json", "--command", "true"], "the command does not read ds.json"),
    ],
)
def test_conflicting_options_are_refused_at_once(capsys, arguments, says):
    code, _, err = run(capsys, "tune", *arguments)
    assert code == 2 and says in " ".join(err.split()), err
    assert not Path("runs").exists()


def test_a_callable_is_tuned_over_another_tuners_space():
    given = {"train_micro_batch_size_per_gpu": [1, 2, 4], "autotuning": {"metric": "latency"}}
    found = rl.tune(lambda config: float(config["micro_batch"]), taken_from=given, isolate=False, sampler="grid")
    assert found.best.config["micro_batch"] == 4 and len(found.trials) == 3
    assert any("not carried over: autotuning.metric" in each for each in found.notes)
    with pytest.raises(UsageError, match="both say what may vary"):
        rl.tune(lambda config: 1.0, rl.Space(), taken_from=given)
    with pytest.raises(UsageError, match="not a known format"):
        rl.tune(lambda config: 1.0, taken_from={"batch": 4})


def test_a_model_takes_the_values_of_knobs_that_it_has_and_keeps_the_rest(capsys):
    Path("fs.yaml").write_text(
        yaml.safe_dump(
            {
                "experiment": {
                    "runner": {"nproc_per_node": 2},
                    "auto_tuner": {
                        "space": {
                            "data_parallel_size": [2],
                            "tensor_model_parallel_size": [1, 2],
                            "micro_batch_size": [2, 4],
                            "context_parallel_size": [1, 2],
                            "expert_model_parallel_size": [1, 2],
                            "use_distributed_optimizer": "auto",
                            "use_recompute": [False],
                        }
                    },
                }
            }
        )
    )
    shown = ["space", "gpt2-tiny", "--devices", 2, "--global-batch", 8, "--from", "fs.yaml", "--json"]
    code, out, err = run(capsys, *shown)
    assert code == 0, err
    space = json.loads(out)
    listed = {each["name"]: each.get("values") for each in space["knobs"]}
    assert listed["micro_batch"] == [2, 4] and listed["zero"] == [0, 1] and listed["tp"] == [1, 2]
    assert listed["precision"] == ["fp32"] and listed["checkpoint_ratio"] == [0.0]
    assert listed["cp"] == [1, 2] and "ep" not in listed
    assert {"require": "dp in [2]", "reason": "data_parallel_size"} in space["constraints"]
    assert space["valid"] == 4  # both micro-batches, with and without ZeRO, on two replicas
    notes = "\n".join(space["notes"])
    assert "not carried over: ep: the model has no such knob" in notes and "fusion=false" in notes
    code, out, err = run(capsys, *shown, "--set", "checkpoint_ratio=0,1")
    assert code == 0 and json.loads(out)["valid"] == 8, err
