"""`redline estimate`: the best predicted configurations, why the others were ruled out, and what it cannot know."""

import json
import re

import pytest
from redline.base.errors import UsageError
from redline.cli import main
from redline.estimator import Shape
from redline.estimator.document import estimate_document
from redline.estimator.request import estimate_request
from redline.estimator.survey import plan_of, survey

SMALL = ["--layers", 8, "--hidden", 1024, "--heads", 16, "--vocabulary", 32000, "--seq-len", 1024]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture(scope="module")
def question():
    shape = Shape(layers=8, hidden=1024, heads=16, vocabulary=32000, name="small")
    return estimate_request(shape, "a100-40gb", devices=8, seq_len=1024, global_batch=64, fix={"precision": "bf16"})


def test_the_best_are_different_plans_ranked_by_throughput_times_the_chance_to_fit(question):
    found = estimate_document(question, top=4)
    hopes = [each.estimate.throughput * each.estimate.probability_fits for each in found.ranked]
    assert hopes == sorted(hopes, reverse=True) and len(hopes) == 4
    assert all(each.estimate.fits for each in found.ranked)
    assert len({plan_of(each.config) for each in found.ranked}) == 4
    table = question.estimator.table(list(question.space))
    assert hopes[0] == pytest.approx((table.throughput * table.probability_fits)[table.fits].max())
    assert found.baseline.config == question.space.default()
    assert found.to_dict()["best"][0]["throughput_per_device"] == pytest.approx(found.ranked[0].estimate.throughput / 8)
    assert found.survey.fitting == table.fits.sum()
    unfit = sum(count for reason, count in found.survey.out.items() if reason.startswith("does not fit"))
    assert unfit == (~table.fits).sum()


def test_each_is_shown_with_memory_time_throughput_mfu_and_what_binds_it(capsys):
    code, out, _ = run(capsys, "estimate", *SMALL, "--hardware", "a100-40gb", "--devices", 8, "--fix", "tp=2")
    assert code == 0
    header = next(line for line in out.splitlines() if "MFU" in line)
    assert all(word in header for word in ("tokens/s", "step", "memory", "bound by"))
    lines = out[out.index(header) :].splitlines()[1:]
    rows = [at for at, line in enumerate(lines) if re.match(r"\d  |untuned  ", line)]
    assert len(rows) == 6 and all("GiB" in lines[at] and "%" in lines[at] and "tp=2" in lines[at + 1] for at in rows)
    assert all(len(line) <= 100 for line in lines[: rows[-1] + 2]), "a terminal of 100 columns would wrap it"
    assert "a device" in header and "predicted to be" in out
    assert "ruled out, of" in out


def test_json_holds_what_the_text_says(capsys):
    arguments = ["estimate", *SMALL, "--hardware", "a100-40gb", "--devices", 8, "--global-batch", 64]
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
    assert data["valid"] == data["predicted"] >= data["fitting"]


def test_one_configuration_is_explained_term_by_term(capsys):
    code, out, _ = run(
        capsys, "estimate", *SMALL, "--hardware", "h100", "--devices", 8, "--global-batch", 64,
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
def test_a_configuration_outside_the_space_is_refused_by_its_rule(capsys, config, message):
    code, _, err = run(
        capsys,
        "estimate",
        *SMALL,
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


def test_where_nothing_fits_the_smallest_is_named(capsys):
    code, out, _ = run(capsys, "estimate", *SMALL, "--hardware", "t4", "--memory-limit", "200MiB")
    assert code == 3
    assert "no configuration is predicted to fit" in out
    assert "the least memory," in out


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


def test_the_doctor_writes_a_file_that_estimate_takes(capsys, tmp_path, monkeypatch):
    from redline.estimator import measuring

    monkeypatch.setattr(measuring, "SIZES", {"cpu": (64,), "cuda": (256,)})
    monkeypatch.setattr(measuring, "SECONDS", 0.01)
    path = tmp_path / "machine.yaml"
    code, out, _ = run(capsys, "doctor", "--measure", "--ranks", 1, "--out", path)
    assert code == 0
    assert "matrix products in fp32" in out and str(path) in out
    code, out, _ = run(capsys, "estimate", *SMALL, "--hardware", path, "--global-batch", 4, "--json", "--top", 1)
    assert code == 0
    assert json.loads(out)["best"][0]["throughput"] > 0


def test_blocks_by_name_may_hold_commas_within_a_configuration():
    from redline.cli.estimate import config_of

    assert config_of("micro_batch=8,checkpoint_blocks=0-3,7,tp=2,gathered_blocks=none") == {
        "micro_batch": 8, "tp": 2, "checkpoint_blocks": "0-3,7", "gathered_blocks": "none",
    }  # fmt: skip
    with pytest.raises(UsageError, match="must look like"):
        config_of("micro_batch=8,7")


def test_of_a_space_that_is_too_large_the_drawn_ones_are_counted(question, monkeypatch, capsys):
    whole = survey(question.estimator, question.space)
    monkeypatch.setattr("redline.estimator.survey.MAX_CONFIGS", 300)
    drawn = survey(question.estimator, question.space)
    assert drawn.predicted == 300 < drawn.valid == whole.valid and 0 < drawn.fitting <= 300
    for each in drawn.best:
        assert each.config in question.space
        assert each.estimate.throughput == pytest.approx(question.estimator(each.config).throughput)
    code, out, _ = run(capsys, "estimate", *SMALL, "--hardware", "a100-40gb", "--devices", 8, "--global-batch", 64)
    assert code == 0 and "of 300 configurations, drawn from " in out
