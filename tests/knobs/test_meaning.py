"""The meaning of a configuration is defined once: training, estimates and exports all follow a change of it."""

from dataclasses import replace

import numerics_table as numerics
import pytest
import torch
import torch.distributed as dist
import yaml
from redline.base.errors import UsageError, WorkloadError
from redline.estimator import Estimator, TrainingSetup
from redline.estimator.hardware import find_hardware
from redline.estimator.stages import stage_blocks
from redline.frameworks import render
from redline.knobs.meaning import (
    BUCKET_MIB,
    EXCHANGES,
    FORMATS,
    SUMMED,
    formats_of,
    pipeline_schedule_of,
    recomputed,
    stage_sizes,
)
from redline.knobs.pipeline import PIPELINE_SCHEDULES
from redline.models.architecture import Architecture, shape_of
from redline.models.huggingface import hugging_face_workload
from redline.models.skeleton import skeleton
from redline.results import Measurement, Status, Trial
from redline.schedule import create_schedule
from redline.schedule.parallel.collectives import PlannedMesh
from redline.schedule.parallel.replicas import BUCKET_BYTES
from redline.training import Training

CONFIG = {"dp": 2, "micro_batch": 4, "grad_accum": 1, "precision": "bf16"}
SHAPE = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 1000}


def changed(patch, **fields):
    """Changes the meaning of `precision=bf16`."""
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
        training = Training(numerics.tiny("llama"), config, torch.device("cpu"), rank=dist.get_rank(), world_size=2)
        patch.setattr(dist, "all_reduce", noted(dist.all_reduce))
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                patch.setattr(dist, name, noted(getattr(dist, name)))
        training._passes(training.data[0], None)
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


def exported(target, shape=None, **config):
    done = Measurement(status=Status.OK, throughput=1.0, unit="tokens/s", devices=2)
    trial = Trial(number=0, config={**CONFIG, **config}, sampler="bayes", measurement=done)
    document = {
        "asked": {"model": "llama3-8b", "shape": shape, "seq_len": 128, "global_batch": 8, "devices": {"used": 2}}
    }
    return render(target, trial, document)


def test_exports_follow(monkeypatch):
    def reported():
        deepspeed = yaml.safe_load(exported("deepspeed").text)["communication_data_type"]
        return deepspeed, "--grad-reduce-in-bf16" in exported("megatron").text

    assert reported() == ("fp32", False)
    assert "training.dtype float32" in exported("torchtitan").text
    changed(monkeypatch, reduced="bf16", weights="bf16")
    assert reported() == ("bf16", True)
    assert "training.dtype bfloat16" in exported("torchtitan").text


def test_the_knob_changes_what_travels_and_nothing_else():
    for precision in FORMATS:
        own = formats_of({"precision": precision})
        assert formats_of({"precision": precision, "reduce_dtype": "bf16"}) == replace(own, reduced="bf16")
    assert estimate(reduce_dtype="bf16").step_ms < estimate(reduce_dtype="fp32").step_ms
    assert "--grad-reduce-in-bf16" in exported("megatron", reduce_dtype="bf16").text
    for target in ("trainer", "accelerate", "torchtitan"):
        assert "reduce_dtype=bf16 has no counterpart here" in " ".join(exported(target, reduce_dtype="bf16").notes)


def gathers(zero, gathered):
    """Returns how often a rank gathers weights in a step of two micro-batches."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXCHANGES, zero, replace(EXCHANGES[zero], gathered=gathered))
        config = {"dp": 2, "micro_batch": 2, "grad_accum": 2, "zero": zero}
        training = Training(numerics.tiny("llama"), config, torch.device("cpu"), rank=dist.get_rank(), world_size=2)
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if call := getattr(dist, name, None):
                patch.setattr(dist, name, lambda *args, call=call, **more: calls.append(1) or call(*args, **more))
        training.passes()
    return len(calls)


def test_zero_stages_mean_the_same_everywhere(two, monkeypatch):
    # "step" makes ZeRO 3 gather once a step, as ZeRO 2 does.
    each_pass, each_step = (two.run(gathers, 3, each) for each in ("pass", "step"))
    assert each_step == two.run(gathers, 2, "step") and 0 < each_step[0] < each_pass[0]
    assert "fsdp_reshard_after_forward always" in exported("torchtitan", zero=3).text
    longer = estimate(zero=3, grad_accum=2, micro_batch=2).breakdown["time.parameter gathers"]
    monkeypatch.setitem(EXCHANGES, 3, replace(EXCHANGES[3], gathered="step"))
    assert "fsdp_reshard_after_forward never" in exported("torchtitan", zero=3).text
    assert "fsdp_reshard_after_forward: false" in exported("accelerate", zero=3).text
    assert estimate(zero=3, grad_accum=2, micro_batch=2).breakdown["time.parameter gathers"] < longer


GROUPS = {"dp": 4, "hsdp": 2, "zero": 3, "micro_batch": 1, "grad_accum": 2}


def sums(often):
    """Returns how often a rank sums reduced gradients with the other group, in a step of two micro-batches."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUMMED, False, often)
        training = Training(numerics.tiny("llama"), GROUPS, torch.device("cpu"), rank=dist.get_rank(), world_size=4)
        training.passes()
        call = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *args, **more: calls.append(args[0].numel()) or call(*args, **more))
        training.passes()
    return sum(size > 1 for size in calls)


def test_when_groups_sum_is_followed_by_all(four, monkeypatch):
    (once,), (twice,) = set(four.run(sums, "step")), set(four.run(sums, "micro_batch"))
    assert once > 0 and twice == 2 * once

    def reduces():
        hosts = replace(find_hardware("a100-80gb"), devices_per_node=2)
        setup = TrainingSetup(devices=4, seq_len=128, global_batch=8, overlap_gradients=False)
        return Estimator(SHAPE, hosts, setup)(GROUPS).breakdown["time.data parallel"]

    before = reduces()
    assert "torchtitan sums gradients between hosts" in " ".join(exported("torchtitan", **GROUPS).notes)
    monkeypatch.setitem(SUMMED, False, "micro_batch")
    assert reduces() > before
    assert "torchtitan sums gradients" not in " ".join(exported("torchtitan", **GROUPS).notes)


def test_indivisible_groups_are_refused_everywhere():
    for knobs, reason in (({"zero": 1}, "needs zero 2 or 3"), ({"hsdp": 4}, "into groups of two or more")):
        config = {**GROUPS, **knobs}
        with pytest.raises(UsageError, match=reason):
            estimate(**config)
        with pytest.raises(WorkloadError, match=reason):
            Training(numerics.tiny("llama"), config, torch.device("cpu"), world_size=4)


def blocks_of_stages(config):
    """Returns the recomputed blocks of a Llama of 12 blocks, and the last block of each stage but the last."""
    model = Architecture(
        model_type="llama", arguments={**numerics.FAMILIES["llama"][1], "num_hidden_layers": 12}, task="causal"
    )
    workload = hugging_face_workload(model, name="llama", spec="llama", seq_len=16, global_batch=8)
    sch = create_schedule(skeleton(workload), PlannedMesh(pp=config.get("pp", 1)))
    workload.schedule(sch, config)
    steps = [(each.primitive, int(each.path.split(".")[-1])) for each in sch.tree.steps]
    return tuple([at for primitive, at in steps if primitive == what] for what in ("checkpoint", "cut_pipeline_stage"))


def one_more(blocks, ratio):
    return list(range(round(ratio * blocks) + 1)) if ratio else []


def last_first(blocks, stages):
    least, more = divmod(blocks, stages)
    return [least + (stage >= stages - more) for stage in range(stages)]


def recomputes(ratio):
    config = {"pp": 4, "dp": 1, "micro_batch": 1, "grad_accum": 8, "checkpoint_ratio": ratio}
    setup = TrainingSetup(devices=4, seq_len=128, global_batch=8)
    return Estimator({**SHAPE, "layers": 12}, "a100-80gb", setup)(config).breakdown["time.recomputation"]


def layers_of_megatron(pp):
    shape = {**shape_of(numerics.tiny("llama").model), "layers": 32}
    made = exported("megatron", shape, pp=pp, dp=1, micro_batch=1, grad_accum=8, checkpoint_ratio=0.25)
    return int(made.text.partition("--recompute-num-layers ")[2].split()[0])


def test_which_blocks_are_recomputed_is_followed_by_all(monkeypatch):
    assert blocks_of_stages({"checkpoint_ratio": 0.5})[0] == [1, 3, 5, 7, 9, 11]
    # A stage has three blocks, of which half is rounded to two.
    assert blocks_of_stages({"pp": 4, "checkpoint_ratio": 0.5})[0] == [1, 2, 4, 5, 7, 8, 10, 11]
    # Clocks depend on the share of products, which is larger with more recomputation.
    assert recomputes(0.5) == pytest.approx(recomputes(1.0) * 2 / 3, rel=1e-4)
    assert layers_of_megatron(pp=4) == 2  # of eight
    monkeypatch.setattr(recomputed, "__code__", one_more.__code__)
    assert blocks_of_stages({"checkpoint_ratio": 0.25})[0] == [0, 1, 2, 3]
    assert recomputes(0.5) == pytest.approx(recomputes(0.25) * 3 / 2, rel=1e-4)
    assert layers_of_megatron(pp=4) == 3


def test_which_blocks_a_stage_has_is_followed_by_all(monkeypatch):
    assert blocks_of_stages({"pp": 5})[1] == [2, 5, 7, 9] and stage_blocks.__wrapped__(12, 5, "layers", 1.0) == (
        3,
        3,
        2,
        2,
        2,
    )
    monkeypatch.setattr(stage_sizes, "__code__", last_first.__code__)
    assert blocks_of_stages({"pp": 5})[1] == [1, 3, 5, 8] and stage_blocks.__wrapped__(12, 5, "layers", 1.0) == (
        2,
        2,
        2,
        3,
        3,
    )


STAGED = {"pp": 2, "dp": 1, "micro_batch": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"}


def order_that_runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PIPELINE_SCHEDULES, "1f1b", PIPELINE_SCHEDULES["gpipe"])
        training = Training(numerics.tiny("llama"), STAGED, torch.device("cpu"), rank=dist.get_rank(), world_size=2)
        training.passes()
    return type(training.model.pipeline.schedule).__name__


def test_pipeline_orders_mean_the_same_everywhere(two, monkeypatch):
    assert two.run(order_that_runs) == ["ScheduleGPipe"] * 2
    before = estimate(**STAGED).breakdown["memory.activations"]
    assert "pipeline_parallel_schedule 1F1B" in exported("torchtitan", **STAGED).text
    monkeypatch.setitem(PIPELINE_SCHEDULES, "1f1b", PIPELINE_SCHEDULES["gpipe"])
    assert estimate(**STAGED).breakdown["memory.activations"] > before
    assert "pipeline_parallel_schedule GPipe" in exported("torchtitan", **STAGED).text


def test_without_a_name_the_order_is_one_that_the_micro_batches_allow():
    for more, order in (({}, "1f1b"), ({"grad_accum": 1, "micro_batch": 8}, "gpipe")):
        config = {name: value for name, value in {**STAGED, **more}.items() if name != "pipeline_schedule"}
        assert pipeline_schedule_of(config, config["grad_accum"]) == order
        made_by = PIPELINE_SCHEDULES[order].made_by.removeprefix("Schedule")
        assert f"pipeline_parallel_schedule {made_by}" in exported("torchtitan", **config).text
    assert pipeline_schedule_of({"pp": 2, "virtual_stages": 2}, 4) == "interleaved"


def test_each_zero_stage_shards_one_more_kind_of_state():
    assert [len(each.cut) for each in EXCHANGES.values()] == [0, 1, 2, 3]


def test_buckets_are_of_one_size():
    # The language and the results are on the same floor, so neither may import the other.
    assert BUCKET_BYTES == BUCKET_MIB * 2**20 == TrainingSetup().bucket_mib * 2**20
