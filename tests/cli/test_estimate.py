"""`redline estimate`: the best predicted configurations, why the others were ruled out, and what it cannot predict."""

import json
import re

import pytest
from command_line import run
from redline.base.errors import UsageError
from redline.estimator import Shape
from redline.estimator.document import estimate_document
from redline.estimator.plans import plan_of
from redline.estimator.survey import survey
from shape_requests import shape_request
from small_llama import small_llama


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return [small_llama(tmp_path_factory.mktemp("model")), "--seq-len", 1024]


@pytest.fixture(scope="module")
def question():
    shape = Shape(layers=8, hidden=1024, heads=16, vocabulary=32000, name="small")
    return shape_request(shape, "a100-40gb", devices=8, seq_len=1024, global_batch=64, fix={"precision": "bf16"})


def test_the_best_are_different_plans_ranked_by_throughput_times_the_chance_to_fit(question):
    found = estimate_document(question, top=4)
    hopes = [each.estimate.throughput * each.estimate.probability_fits for each in found.ranked]
    assert hopes == sorted(hopes, reverse=True) and len(hopes) == 4
    assert all(each.estimate.fits for each in found.ranked)
    assert len({plan_of(each.config) for each in found.ranked}) == 4
    table = question.estimator.table(list(question.space))
    assert hopes[0] == pytest.approx((table.throughput * table.probability_fits)[table.fits].max())
    assert found.baseline.config == question.space.default()
    safest, small = (
        next((each.ranked for each in found.plans if each.role == role), None) for role in ("safest", "least memory")
    )
    assert safest is None or safest.estimate.throughput >= 0.97 * found.ranked[0].estimate.throughput
    half = table.fits & (table.throughput >= 0.5 * found.ranked[0].estimate.throughput)
    assert small.estimate.peak_memory_mib == pytest.approx(table.fullest_memory_mib[half].min())
    assert found.to_dict()["best"][0]["throughput_per_device"] == pytest.approx(found.ranked[0].estimate.throughput / 8)
    everything = survey(question.estimator, question.space)
    assert everything.fitting == table.fits.sum()


def test_a_plan_file_is_what_export_reads(capsys, tmp_path, small):
    import yaml

    plan = tmp_path / "plan.yaml"
    arguments = ["estimate", *small, "--hardware", "a100-40gb", "--devices", 8, "--global-batch", 64, "-o", plan]
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and f"redline export {plan} --to accelerate" in out and f"redline tune {plan}" in out
    kept = yaml.safe_load(plan.read_text())
    assert kept["simulated"] is True and kept["trains"]["devices"]["used"] == 8
    code, out, _ = run(capsys, "export", plan, "--to", "env")
    assert code == 0 and "predicted, simulated: nothing was run" in out and "the fastest plan" in out
    assert f"MICRO_BATCH={kept['best']['configuration']['micro_batch']}" in out.replace("'", "").replace('"', "")
    code, _, err = run(capsys, "export", plan, "--to", "env", "--trial", 3)
    assert code == 2 and "--trial 3 names a trial of a run" in err
    plan.write_text(yaml.safe_dump({**kept, "trains": {**kept["trains"], "workload": None}}))
    code, _, err = run(capsys, "tune", plan)
    assert code == 2 and "does not name a model to tune" in err
    plan.write_text("best: 3\n")
    code, _, err = run(capsys, "export", plan, "--to", "env")
    assert code != 0 and "has no best with a configuration" in err


@pytest.mark.slow
def test_a_search_begins_with_the_plans(capsys, tmp_path):
    import yaml
    from redline.results import View

    plan, out = tmp_path / "plan.yaml", tmp_path / "run"
    asked = ["gpt2-tiny", "--devices", 1, "--seq-len", 16, "--global-batch", 16, "--fix", "fusion=false", "-o", plan]
    code, text, _ = run(capsys, "estimate", *asked)
    assert code == 0 and f"redline tune {plan}" in text
    kept = yaml.safe_load(plan.read_text())
    short = ["--runner", "local", "--trials", 2, "--measure-time", "50ms", "--fix", "fusion=false"]
    code, _, err = run(capsys, "tune", plan, *short, "--out", out)
    assert code == 0, err
    trials = View(out).trials()
    assert [each.sampler for each in trials] == ["default", "user"]
    assert trials[1].config == kept["best"]["configuration"]
    # A run's best.yaml begins a search as well.
    winner = yaml.safe_load((out / "best.yaml").read_text())["best"]["configuration"]
    code, _, err = run(capsys, "tune", out / "best.yaml", *short, "--out", tmp_path / "again")
    assert code == 0, err
    assert winner in [each.config for each in View(tmp_path / "again").trials()[:2]]
    code, _, err = run(capsys, "tune", tmp_path / "other.yaml")
    assert code == 2 and "there is no file or folder" in err and "other.yaml" in err


@pytest.mark.slow
def test_a_request_resolved_once_needs_no_torch_again(tmp_path):
    import os
    import subprocess
    import sys

    code = (
        "import sys\nfrom redline.cli import main\n"
        "try:\n main(['estimate', 'gpt2-tiny', '--hardware', 'h100', '--devices', '2', '--json'])\n"
        "except SystemExit: pass\nprint('torch' in sys.modules)"
    )
    answers = []
    for _ in range(2):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        answers.append(done.stdout.splitlines())
    assert [each[1] for each in answers] == ["True", "False"]
    assert answers[0][0] == answers[1][0], "what is kept answers as what is resolved"


def test_the_cache_serves_only_the_same_request_and_model(tmp_path):
    from redline.estimator.hardware import find_hardware
    from redline.estimator.resolved_cache import key_of
    from redline.estimator.survey import device_of
    from redline.models.request import TrainingRequest

    device = device_of(find_hardware("h100"))
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "gpt2"}')
    keys = {key_of(TrainingRequest("gpt2"), device, 8), key_of(TrainingRequest("gpt2"), device, 16)}
    keys |= {key_of(TrainingRequest("gpt2", fix={"zero": 1}), device, 8), key_of(TrainingRequest(str(file)), device, 8)}
    file.write_text('{"model_type": "gpt2", "n_layer": 3}')
    keys.add(key_of(TrainingRequest(str(file)), device, 8))
    assert len(keys) == 5 and None not in keys
    assert key_of(TrainingRequest("train.py:workload"), device, 8) is None, "code may change what it resolves to"
    assert key_of(TrainingRequest("owner/name"), device, 8) is None


def test_json_holds_what_the_text_says(capsys, small):
    arguments = ["estimate", *small, "--hardware", "a100-40gb", "--devices", 8, "--global-batch", 64]
    code, out, err = run(capsys, *arguments, "--json", "--top", 2)
    data = json.loads(out)
    assert (code, err, len(data["best"])) == (0, "", 2)
    best = data["best"][0]
    assert best["config"]["tp"] * best["config"]["pp"] * best["config"]["dp"] == 8
    assert best["throughput"] == pytest.approx(64 * 1024 / (best["step_ms"] * 1e-3))
    assert best["memory_low"] < best["peak_memory_mib"] < best["memory_high"]
    assert sum(value for name, value in best["breakdown"].items() if name.startswith("memory.")) == pytest.approx(
        best["peak_memory_mib"]
    )
    assert data["valid"] > data["predicted"] >= data["fitting"] > 0
    assert [each["role"] for each in data["plans"]][:2] == ["fastest", "2nd"] and data["plans"][0]["devices"] == 8


@pytest.mark.slow
def test_plans_by_another_trainer_name_it_and_its_facts(capsys, small):
    asked = ["estimate", *small, "--hardware", "a100-40gb", "--devices", 8, "--framework", "megatron"]
    code, out, _ = run(capsys, *asked)
    assert code == 0 and " by megatron on 8 x a100-40gb" in out.splitlines()[0]
    assert "assumed of megatron: weights are kept in bf16; master weights in fp32" in " ".join(out.split())
    code, out, _ = run(capsys, *asked, "--memory-limit", "0.2GiB")
    assert code == 3 and "assumed of megatron: weights are kept in bf16" in " ".join(out.split())
    code, _, err = run(capsys, *asked[:-1], "megatorn")
    assert code == 2 and "did you mean 'megatron'" in err


def test_one_configuration_is_explained_term_by_term(capsys, small):
    code, out, _ = run(
        capsys, "estimate", *small, "--hardware", "h100", "--devices", 8, "--global-batch", 64,
        "--config", "tp=4,zero=1,micro_batch=2", "--explain",
    )  # fmt: skip
    assert code == 0
    assert "tp=4" in out and "micro_batch=2" in out
    for term in ("matmul", "tensor parallel", "activations", "optimizer", "80 % within"):
        assert term in out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("tp=3", "no value 3"),
        ("tp=2,dp=8", "dp follows from the other knobs and is 4"),
        ("micro_batch=64,tp=1,sp=1,cp=1,pp=1", "global batch"),
        ("kernals=true", "unknown knob 'kernals'"),
    ],
)
def test_a_configuration_outside_the_space_is_refused_by_its_rule(capsys, config, message, small):
    code, _, err = run(
        capsys,
        "estimate",
        *small,
        "--hardware",
        "h100",
        "--devices",
        8,
        "--global-batch",
        64,
        "--config",
        config,
    )
    assert code == 2
    assert message in err


@pytest.mark.slow
def test_the_smallest_configuration_is_named_if_none_fits(capsys, small):
    few = [f"--fix={knob}" for knob in ("fusion=false", "kernels=false", "attention=sdpa", "precision=fp16")]
    code, out, _ = run(capsys, "estimate", *small, *few, "--hardware", "t4", "--memory-limit", "200MiB")
    assert code == 3
    assert "no configuration is predicted to fit" in out
    assert "with the least memory," in out and "Predicted as well, and too large: shorter sequences" in out


def test_the_advice_of_a_refusal_is_computed(capsys, small):
    fixed = ("--fix=fusion=false", "--fix=kernels=false", "--fix=attention=sdpa")
    limited = [*small, *fixed, "--hardware", "t4", "--memory-limit", "1.4GiB"]
    code, out, _ = run(capsys, "estimate", *limited)
    assert code == 3
    advised = re.findall(r"(--[a-z-]+ \w+) \(([\d.]+) GiB\)", " ".join(out.split()))
    assert advised
    for options, memory in advised:
        # The last of equal options counts.
        code, out, err = run(capsys, "estimate", *limited, *options.split())
        assert code == 0, options + out + err
        assert float(memory) <= 1.4


UNTRACEABLE = """
import torch
import redline as rl

class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 4)

    def forward(self, x):
        y = self.first(x)
        return y if y.sum().item() > 0 else y * 2

def batch(size, seed):
    return torch.zeros(size, 16), torch.zeros(size, 4)

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[1])

workload = rl.Workload(model=Reads, batch=batch, loss=loss, global_batch=32)
"""


def test_a_model_that_cannot_be_traced_names_the_operator_and_what_is_known(capsys, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(UNTRACEABLE)
    code, _, err = run(capsys, "estimate", "--workload", f"{file}:workload", "--hardware", "h100")
    assert code == 2
    assert "operator aten._local_scalar_dense.default" in err
    assert "68 parameters" in err
    assert "Traceback" not in err


def test_blocks_by_name_may_hold_commas_within_a_configuration():
    from redline.cli.estimate import config_of

    found = config_of("micro_batch=8,strategy=0-3:tp1,ckpt 4-7:zero2,tp=2")
    assert found == {"micro_batch": 8, "tp": 2, "strategy": "0-3:tp1,ckpt 4-7:zero2"}
    with pytest.raises(UsageError, match="must look like"):
        config_of("micro_batch=8,7")


def test_samples_of_an_image_model_are_images(capsys):
    code, out, _ = run(capsys, "estimate", "vit-tiny", "--hardware", "h100", "--devices", "1")
    assert code == 0 and ", images of " in " ".join(out.split()) and "None" not in out


def test_facts_of_software_are_stated_by_version_and_one_by_one(capsys, small):
    command = ("estimate", *small, "--hardware", "b200", "--devices", 8, "--fix", "tp=2", "--fix", "micro_batch=1")
    speeds = []
    for options in (
        ("--framework", "megatron-bridge"),
        ("--framework", "megatron-bridge@25.04"),
        ("--framework", "megatron-bridge", "--assume", "early_kernels=true"),
    ):
        code, out, _ = run(capsys, *command, *options, "--json")
        assert code == 0
        speeds.append(json.loads(out)["best"][0]["throughput"])
    latest, first, early = speeds
    assert latest > first == pytest.approx(early, rel=0.02)
    code, _, err = run(capsys, *command, "--assume", "early_kernel=true")
    assert code == 2 and "unknown fact 'early_kernel'; did you mean 'early_kernels'" in err


def test_the_verdict_on_a_device_without_a_measured_run_says_so(capsys, small):
    for hardware, says in (("mi300x", True), ("h100", False)):
        code, out, _ = run(capsys, "estimate", *small, "--hardware", hardware, "--devices", 1)
        verdict = " ".join(out.split()).partition("tokens/s per GPU")[0]
        assert code == 0 and (f"no training on {hardware} was measured" in verdict) is says
