"""`--allow lossy`: values that trade accuracy for speed are tried only on request and never reported alone."""

import json

import pytest
import redline as rl
import yaml
from command_line import run
from memory_folder import MemoryFolder
from predicted_runner import predicted
from redline.cli.outcome import print_result
from redline.cli.progress import trial_line
from redline.estimator import Shape
from redline.estimator.document import estimate_document
from redline.estimator.hardware import find_hardware
from redline.estimator.survey import device_of
from redline.models.request import TrainingRequest
from redline.results import Measurement, Status, Trial
from redline.space import Config
from redline.tuner.confirm import Confirmation
from redline.tuner.request.target import resolve_task
from shape_requests import shape_request

H100 = find_hardware("h100-80gb")
FIX = {
    "attention": "sdpa", "fusion": False, "kernels": False, "offload": "none", "fused_optimizer": True,
    "checkpoint_ratio": 0.0,
}  # fmt: skip


def precisions(**how):
    task = resolve_task(TrainingRequest("gpt2-tiny", **how), device=device_of(H100))
    return task.space["precision"].values, dict(task.lossy)


@pytest.mark.slow
def test_lossy_values_are_allowed_by_allow_or_by_name():
    assert precisions() == (("tf32", "bf16"), {})
    assert precisions(allow="lossy") == precisions(allow=["lossy"])
    both = {"precision": ["bf16_pure"], "reduce_dtype": ["bf16"]}
    assert precisions(allow="lossy") == (("tf32", "bf16", "bf16_pure"), both)
    asked = {"precision": ["fp32", "bf16_pure"]}
    assert precisions(override=asked) == (("fp32", "bf16_pure"), {"precision": ["bf16_pure"]})
    assert precisions(fix={"precision": "bf16_pure"})[1] == {"precision": ["bf16_pure"]}
    assert precisions(allow="lossy", fix={"precision": "bf16"}) == (("bf16",), {"reduce_dtype": ["bf16"]})


def test_a_whole_search_names_both_and_keeps_both(tmp_path, capsys):
    result = rl.tune(
        "gpt2-tiny", trials=8, patience=0, allow="lossy", out=tmp_path / "run", fix=FIX,
        **predicted("gpt2-tiny", "a100-40gb", devices=8, global_batch=1024),
    )  # fmt: skip
    assert result.best.config["precision"] == "bf16_pure" and result.best.trial.lossy == ("precision",)
    assert result.best_exact.config["precision"] in ("tf32", "bf16")
    assert result.best_exact.trial.remeasured, "what is compared at the end is measured again"
    assert 0 < result.best_exact.throughput < result.best.throughput
    document = json.loads(json.dumps(result.to_dict()))
    assert (document["best"]["lossy"], document["best_exact"]["lossy"]) == ("precision=bf16_pure", "")
    asked = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["asked"]
    assert asked["lossy"] == {"precision": ["bf16_pure"], "reduce_dtype": ["bf16"]}
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["best_exact"]["trial"] == result.best_exact.trial.number
    print_result(result)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [each for each in lines if each.startswith("without lossy values")]
    assert f"  trial {result.best_exact.trial.number}: " in line and "tokens/s" in line
    (row,) = [each.split() for each in lines if each.startswith("precision")]
    assert row[:4] == ["precision", "bf16_pure", "(lossy)", result.best_exact.config["precision"]]
    assert "precision=bf16_pure (lossy)" in trial_line(result.best.trial).plain
    _, out, _ = run(capsys, "show", tmp_path / "run")
    assert f"without lossy values: trial {result.best_exact.trial.number}, " in out


def test_the_best_without_lossy_values_is_measured_again_beside_lossy_leaders():
    lossy = ("precision",)
    speeds = [(60.0, ()), (100.0, lossy), (99.0, lossy), (98.0, lossy), (80.0, ()), (70.0, ())]
    trials = [
        Trial(
            number=number,
            config=Config(micro_batch=number),
            sampler="bayes" if number else "default",
            measurement=Measurement(status=Status.OK, throughput=speed),
            lossy=lossy,
        )
        for number, (speed, lossy) in enumerate(speeds)
    ]
    found = Confirmation(MemoryFolder(trials), None, None, None, None)._contenders(())
    assert [trial.number for trial in found] == [1, 2, 3, 4, 0]


def test_an_estimate_names_both():
    shape = Shape(layers=8, hidden=1024, heads=16, vocabulary=32000, name="small")
    how = {"devices": 2, "seq_len": 1024, "global_batch": 64, "fix": {"tp": 1, "pp": 1}}
    found = estimate_document(shape_request(shape, H100, allow="lossy", **how), top=3)
    assert [each.lossy for each in found.ranked] == [("precision",)] * 3
    assert found.survey.best_exact.config["precision"] == "bf16"
    alone = estimate_document(shape_request(shape, H100, **how), top=1)
    assert found.survey.best_exact.estimate.throughput == pytest.approx(alone.ranked[0].estimate.throughput)
    assert alone.survey.best_exact is None and alone.ranked[0].lossy == ()
    document = found.to_dict()
    assert (document["best"][0]["lossy"], document["best_exact"]["lossy"]) == ("precision=fp8", "")
