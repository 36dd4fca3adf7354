"""What a configuration means is stated once: training, estimates and exports follow where it changes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from redline.models import Training, numerics
from redline.results import Measurement, Status, Trial
from redline.results.export import render
from redline.results.meaning import EXCHANGES, FORMATS, formats_of
from redline.runners.estimate import Estimator, TrainingSetup

CONFIG = {"dp": 2, "micro_batch": 4, "grad_accum": 1, "precision": "bf16"}
SHAPE = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 1000}


def changed(patch, **fields):
    """Another meaning of `precision=bf16`."""
    patch.setitem(FORMATS, "bf16", replace(FORMATS["bf16"], **fields))


def check_what_travels(zero, fields):
    sent = set()

    def noted(function):
        def call(output, *args, **kwargs):
            sent.add(output.dtype)
            return function(output, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        changed(patch, **fields)
        config = {**CONFIG, "zero": zero}
        training = Training(
            numerics.tiny("llama"), config, torch.device("cpu"), rank=dist.get_rank(), world_size=2
        )
        patch.setattr(dist, "all_reduce", noted(dist.all_reduce))
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                patch.setattr(dist, name, noted(getattr(dist, name)))
        training._passes(training._data[0], None)
    return sent


def test_training_follows(two):
    assert two.run(check_what_travels, 0, {}) == [{torch.float32}] * 2
    assert two.run(check_what_travels, 0, {"reduced": "bf16"}) == [{torch.bfloat16}] * 2


def estimate(**config):
    setup = TrainingSetup(devices=2, seq_len=128, global_batch=8, precision="bf16")
    return Estimator(SHAPE, "a100-80gb", setup)({**CONFIG, **config})


def test_estimates_follow(monkeypatch):
    before = estimate(zero=0).breakdown["time.data parallel"]
    gathered = estimate(zero=2).peak_memory_mib
    with monkeypatch.context() as patch:
        changed(patch, reduced="bf16", gathered="fp32")
        assert estimate(zero=0).breakdown["time.data parallel"] < before
        assert estimate(zero=2).peak_memory_mib > gathered


def exported(target, **config):
    done = Measurement(status=Status.OK, throughput=1.0, unit="tokens/s", devices=2)
    trial = Trial(number=0, config={**CONFIG, **config}, sampler="bayes", measurement=done)
    document = {"asked": {"model": "llama3-8b", "seq_len": 128, "global_batch": 8, "devices": {"used": 2}}}
    return render(target, trial, document)


def test_exports_follow(monkeypatch):
    def told():
        deepspeed = yaml.safe_load(exported("deepspeed").text)["communication_data_type"]
        return deepspeed, "--grad-reduce-in-bf16" in exported("megatron").text

    assert told() == ("fp32", False)
    assert "training.dtype float32" in exported("torchtitan").text
    changed(monkeypatch, reduced="bf16", weights="bf16")
    assert told() == ("bf16", True)
    assert "training.dtype bfloat16" in exported("torchtitan").text


def test_the_knob_changes_what_travels_and_nothing_else():
    for precision in FORMATS:
        own = formats_of({"precision": precision})
        assert formats_of({"precision": precision, "reduce_dtype": "bf16"}) == replace(own, reduced="bf16")
    assert estimate(reduce_dtype="bf16").step_ms < estimate(reduce_dtype="fp32").step_ms
    assert "--grad-reduce-in-bf16" in exported("megatron", reduce_dtype="bf16").text
    for target in ("trainer", "accelerate", "torchtitan"):
        assert "reduce_dtype=bf16 has no counterpart here" in " ".join(exported(target, reduce_dtype="bf16").notes)


def test_more_is_cut_with_every_stage():
    assert [len(each.cut) for each in EXCHANGES.values()] == [0, 1, 2, 3]
