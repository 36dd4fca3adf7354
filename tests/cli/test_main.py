"""The command line: help, exit codes, and a clear message without a traceback for every bad input."""

import itertools
import json
import re
import shutil
import subprocess
import sys

import click
import pytest
import redline as rl
from command_line import run
from predicted_runner import predicted
from redline.base.device import Device
from redline.base.host_memory import MemoryGroup
from redline.cli import client
from redline.cli.main import redline


@pytest.mark.parametrize("command", redline.list_commands(None))
def test_every_command_has_help_with_examples(capsys, command):
    code, out, _ = run(capsys, command, "-h")
    assert code == 0
    assert "Examples:" in out
    assert f"redline {command}" in out


def test_help_names_every_command_and_loads_no_framework():
    code = "import sys\nfrom redline.cli import main\ntry: main(['-h'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'ray', 'optuna', 'pandas'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {command} " in out for command in redline.list_commands(None))
    assert out.strip().endswith("[]")


def test_no_arguments_show_the_help(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert "Usage: redline" in out


BAD = [
    (["tune", "gpt2-tinny"], "did you mean 'gpt2-tiny'"),
    (["tuen", "gpt2-tiny"], "did you mean 'tune'"),
    (["tune"], "give MODEL, --workload FILE:NAME or --command"),
    (["tune", "gpt2-tiny", "--workload", "a.py:b"], "give either MODEL or --workload"),
    (["tune", "--workload", "train.py"], "must be FILE:NAME"),
    (["tune", "--workload", "no_such_file.py:workload"], "no_such_file.py"),
    (["tune", "gpt2-tiny", "--trials", "0"], "trials must be a whole number of at least 1"),
    (["tune", "gpt2-tiny", "--trials", "many"], "many"),
    (["tune", "gpt2-tiny", "--time", "0s"], "time must be more than 0"),
    (["tune", "gpt2-tiny", "--memory-limit", "-1GiB"], "memory limit must be more than 0"),
    (["tune", "gpt2-tiny", "--set", "micro_bach=1,2"], "did you mean 'micro_batch'"),
    (["tune", "gpt2-tiny", "--set", "micro_batch"], "must look like"),
    (["tune", "gpt2-tiny", "--fix", "micro_batch=large"], "micro_batch"),
    (["tune", "gpt2-tiny", "--fix", "micro_batch=1,2"], "takes one value"),
    (["tune", "gpt2-tiny", "--sampler", "tpee"], "did you mean 'tpe'"),
    (["tune", "gpt2-tiny", "--headroom", "0.1"], "--headroom was removed: 5 % of a device's memory is kept free"),
    (["tune", "gpt2-tiny", "--server", "http://x"], "--server was removed: `redline submit MODEL --wait` searches on"),
    (["tune", "gpt2-tiny", "--warm-start", "no/such/run"], "no/such/run"),
    (["tune", "gpt2-tiny", "--runner", "rays"], "did you mean 'ray'"),
    (["tune", "gpt2-tiny", "--devices", "100000"], "100000 devices were requested"),
    (["tune", "gpt2-tiny", "--devices", "7", "--global-batch", "31"], "31 is not one of 7; 28 is"),
    (["tune", "llama-tiny", "--devices", "8", "--fix", "tp=8"], "8 ranks must divide the 4 key-value heads"),
    (
        ["tune", "gpt2-tiny", "--devices", "3", "--global-batch", "9", "--fix", "tp=3"],
        "must divide the 8 attention heads",
    ),
    (
        ["tune", "gpt2-tiny", "--devices", "2", "--fix", "pp=2", "--fix", "tp=2"],
        "where dp = `2 // (tp * sp * cp * pp)`",
    ),
    (["tune", "gpt2-tiny", "--devices", "2", "--fix", "tp=2", "--fix", "zero=3"], "zero=3 would have no effect"),
    (["tune", "gpt2-tiny", "--devices", "2", "--fix", "zero=4"], "zero must be a stage from 0 to 3, but is 4"),
    (["tune", "gpt2-tiny", "--lora", "rank=16"], "unknown part of lora 'rank'"),
    (["tune", "gpt2-tiny", "--lora", "r=0"], "r of at least 1"),
    (["tune", "gpt2-tiny", "--space", "no_such.yaml"], "no_such.yaml"),
    (["tune", "gpt2-tiny", "--resume"], "--resume needs --out"),
    (["tune", "gpt2-tiny", "--out", "taken"], "'taken' already contains a run"),
    (["tune", "gpt2-tiny", "--resume", "--out", "no/such/run"], "'no/such/run' contains no run to resume"),
    (["tune", "gpt2-tiny", "--log-to", "wandbb"], "did you mean 'wandb'"),
    (["tune", "gpt2-tiny", "--no-such-option"], "no-such-option"),
    (["estimate", "gpt2-tinny"], "did you mean 'gpt2-tiny'"),
    (["estimate"], "give either MODEL or --workload"),
    (["estimate", "gpt2-tiny", "--hardware", "h10"], "did you mean 'h100-80gb'"),
    (["estimate", "gpt2-tiny", "--hardware", "no_such.yaml"], "no_such.yaml cannot be read"),
    (["estimate", "gpt2-tiny", "--hardware", "h100", "--config", "tp"], "must look like"),
    (["estimate", "gpt2-tiny", "--hardware", "h100", "--config", "micro_bach=2"], "did you mean 'micro_batch'"),
    (["estimate", "gpt2-tiny", "--hardware", "h100", "--config", "tp=2"], "it may need more of them (--devices)"),
    (["estimate", "gpt2-tiny", "--hardware", "h100", "--top", "0"], "0"),
    (
        ["estimate", "--layers", "3", "--hidden", "64"],
        "--layers was removed: write the model's sizes into a config.json",
    ),
    (["doctor", "--ranks", "2"], "--ranks was removed: all_reduce_perf of nccl-tests"),
    (["space", "gpt2-tinny"], "did you mean 'gpt2-tiny'"),
    (["show", "no/such/run"], "no/such/run"),
    (["report", "no/such/run"], "there is no folder 'no/such/run'"),
    (["report", "."], "contains no run"),
    (["results", "3f2a", "--json", "--csv", "t.csv"], "--csv, --to, --json and the log each select the output"),
    (["results", "."], "'.' is a folder, and ID is a search of a server; `redline show .` lists a run"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else ""
)
def test_bad_input_is_refused_in_words_before_predictions_and_nothing_is_written(
    capsys, tmp_path, monkeypatch, arguments, message
):
    def predicted(*args, **kwargs):
        pytest.fail("predicted first")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("redline.tuner.setup.estimator_of", predicted)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "trials.csv").write_text("trial,status,throughput\n")
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err + out
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_reproducing_line_carries_what_was_set_and_fixed(tmp_path):
    import shlex

    import yaml
    from redline.cli.main import redline as group

    asked = {"override": {"micro_batch": [4, 48], "precision": ["fp32"]}, "fix": {"attention": "eager"}}
    result = rl.tune(
        "gpt2-tiny", trials=2, out=tmp_path / "run", **asked,
        **predicted("gpt2-tiny", "h100", seq_len=16, global_batch=48, devices=1),
    )  # fmt: skip
    words = shlex.split(yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["reproduce"])
    pairs = list(itertools.pairwise(words))
    assert ("--set", "micro_batch=4,48") in pairs and ("--fix", "attention=eager") in pairs
    assert ("--fix", f"micro_batch={result.best.config['micro_batch']}") in pairs
    parsed = group.get_command(None, "tune").make_context(
        "tune", words[2:], parent=group.make_context("redline", ["tune"])
    )
    assert parsed.params["override"] == ("micro_batch=4,48", "precision=fp32")


def test_too_many_gpus_are_refused_with_both_numbers(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = Device(type="cuda", name="NVIDIA H100", count=2, memory_mib=81_079, capability=(9, 0))
    monkeypatch.setattr("redline.tuner.request.target.detect", lambda: there)
    code, _, err = run(capsys, "tune", "gpt2-tiny", "--devices", "4")
    assert code == 2
    assert "4 devices were requested, but there are 2 (NVIDIA H100)" in err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "redline.cli", "tune", "gpt2-tinny", "--debug"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_models_lists_the_presets_with_their_sizes(capsys):
    code, out, _ = run(capsys, "models")
    assert code == 0
    assert "gpt2-tiny" in out
    assert "llama3-8b" in out
    code, out, _ = run(capsys, "models", "--json")
    assert json.loads(out)["llama2-7b"]["parameters"] == pytest.approx(6.74e9, rel=0.01)


def test_space_shows_the_knobs_and_writes_them_as_yaml(capsys, tmp_path):
    file = tmp_path / "space.yaml"
    code, out, _ = run(capsys, "space", "gpt2-tiny", "--fix", "precision=fp32", "-o", file)
    assert code == 0
    assert "micro_batch" in out
    assert "default:" in out
    code, out, _ = run(capsys, "space", "gpt2-tiny", "--space", file, "--json")
    assert code == 0
    assert json.loads(out)["valid"] > 1


def test_doctor_tells_versions_devices_and_memory(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for word in ("torch", "transformers", "ray", "devices", "MiB"):
        assert word in out
    code, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert facts["versions"]["torch"]
    assert facts["shared_memory_mib"]["total"] == shutil.disk_usage("/dev/shm").total >> 20


def test_doctor_names_what_is_missing_and_what_that_disables(capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in ("hebo", "peft") else real(name, *rest)
    )
    monkeypatch.setattr("shutil.which", lambda name: None)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "--sampler hebo" in out
    assert "pip install --no-deps HEBO==0.3.6" in out
    assert "fusion" in out
    assert "peft" in out and "disables `--lora`" in out and "pip install 'redline[lora]'" in out


def test_an_interrupt_in_the_midst_of_an_import_still_exits_130(tmp_path):
    # In code generated from text, as dataclasses do, CPython would turn the exit into a death by SIGINT.
    code = """
import sys
from redline.cli import main
class Interrupted:
    def main(self, *given, **options):
        exec("raise KeyboardInterrupt")
sys.modules["redline.cli.main"].redline = Interrupted()
main(["tune", "gpt2-tiny"])
"""
    (tmp_path / "cut.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "cut"], cwd=tmp_path, capture_output=True, text=True, timeout=570, check=False
    )
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr


def test_the_help_of_tune_has_groups_and_every_option_once():
    tune = redline.get_command(click.Context(redline), "tune")
    text = tune.get_help(click.Context(tune, max_content_width=100))
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [*tune.groups, "Advanced"] and "\n  [MODEL]" not in text
    named = [name for names in tune.groups.values() for name in names]
    assert len(named) == len(set(named)) and set(named) <= {each.name for each in tune.params}
    for option in tune.params:
        if isinstance(option, click.Option):
            assert len(re.findall(rf"^  (?:-o, )?{option.opts[-1]}\b(?!-)", text, re.MULTILINE)) == 1, option.name


@pytest.mark.parametrize("together", [1, 0])
def test_doctor_tells_whether_a_trial_may_end_the_whole_container(capsys, monkeypatch, tmp_path, together):
    (tmp_path / "memory.oom.group").write_text(f"{together}\n")
    monkeypatch.setattr("redline.base.host_memory.memory_groups", lambda: (MemoryGroup(tmp_path, 2),))
    _, out, _ = run(capsys, "doctor")
    assert ("a trial that fills the host's memory ends this whole container" in out) == bool(together)
    assert ("singleProcessOOMKill" in out) == bool(together)


@pytest.mark.parametrize(
    ("state", "best", "code"), [("failed", None, 1), ("failed", {}, 1), ("done", {"x": 1}, 0), ("running", None, 3)]
)
def test_the_exit_code_of_a_search_on_a_server_tells_a_failure_from_no_result(state, best, code):
    assert client._exit_code(state, best) == code
