"""DeepSpeed's engine of a scheduled model trains on real ranks as one process does; unsupported schedules are refused."""

import json
import os

import numeric
import numerics_table as numerics
import pytest
import torch
import torch.distributed as dist
from redline.base.errors import ScheduleError
from redline.models.families import schedule_of
from redline.schedule import build, create_schedule
from redline.schedule.comparison import Numbers, allowance, weights_of
from torch import nn
from torch.nn import functional as F

slow = pytest.mark.slow
"""DeepSpeed takes seconds to import, and minutes for the first compilation of its shared-memory exchange."""
SIZE = {"train_micro_batch_size_per_gpu": 4}


def mesh(**axes):
    from torch.distributed.device_mesh import init_device_mesh

    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun sets it
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def pool(of, size):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    made = type(of)(size, of.threads, of.forks)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def pair(two):
    """Two separate ranks: DeepSpeed keeps the first settings for the whole process."""
    yield from pool(two, 2)


def language(seed):
    """A batch of eight sentences with some masked tokens."""
    tokens = torch.randint(3, 96, (8, 16), generator=torch.Generator().manual_seed(1 + seed))
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens, "use_cache": False}


def part(batch, count, index):
    return {name: each.chunk(count)[index] if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


def share(batch, mesh):
    """This replica's part of the batch."""
    if "dp" not in mesh.mesh_dim_names:
        return batch
    return part(batch, mesh.get_group("dp").size(), mesh.get_local_rank("dp"))


def mean(loss, mesh):
    total = torch.tensor(float(loss))
    if "dp" in mesh.mesh_dim_names:
        dist.all_reduce(total, group=mesh.get_group("dp"))
        total /= mesh.get_group("dp").size()
    return float(total)


def hold(make, name, seed, batch, model, passes):
    """Asserts that an engine's model has one process's weights after some steps. `passes` runs a step."""
    plain, optimizer = build(create_schedule(make(name)), optimizer=numerics.adamw, seed=seed)
    losses = []

    def alone():
        loss = plain(**batch).loss
        loss.backward()
        losses.append(float(loss))
        return loss

    expected = numeric.trained(plain, optimizer, alone)
    found = [passes() for _ in losses]
    weights = weights_of(model)
    # The engine does not expose its gradients; the updated weights suffice.
    gradients = {each: expected.gradients[each] for each in weights}
    numbers = Numbers(loss=found[0], gradients=gradients, weights=weights)
    numeric.hold(numerics.compare(expected, numbers, allowance(plain, 8 * 16), 8 * 16))
    assert found == pytest.approx(losses, rel=1e-4) and losses[0] - losses[-1] > 1e-3
    return sorted(weights)


# Replicas


def check_replicas(make, axes, zero, accumulate, seed):
    sch = create_schedule(make("gpt2"), mesh(**axes))
    if "tp" in axes:
        schedule_of("gpt2")(sch, {"tp": axes["tp"]})
    for block in sch.select("transformer.h.*"):
        block.checkpoint()
    if "dp" in axes:
        sch.shard_data(zero=zero)
    config = {**SIZE, "gradient_accumulation_steps": accumulate}
    engine, _ = build(sch, optimizer=numerics.adamw, seed=seed, target="deepspeed", config=config)
    assert int(engine.zero_optimization_stage()) == zero and engine.gradient_clipping() == 0.0
    batch = language(seed)
    del batch["attention_mask"]  # otherwise replicas would average over different numbers of tokens

    def step():
        total = 0.0
        for index in range(accumulate):
            loss = engine(**part(share(batch, sch.mesh), accumulate, index)).loss
            engine.backward(loss)
            engine.step()
            total += float(loss) / accumulate
        return mean(total, sch.mesh)

    hold(make, "gpt2", seed, batch, engine.module, step)


@slow
@pytest.mark.parametrize(("zero", "accumulate"), [(0, 1), (1, 2), (2, 2)])
def test_replicas_in_the_engine_train_as_one_process(pair, make_transformer, seed, zero, accumulate):
    pair.run(check_replicas, make_transformer, {"dp": 2}, zero, accumulate, seed, timeout=900)


@slow
def test_a_cut_model_in_the_engine_trains_as_one_process(pair, make_transformer, seed):
    pair.run(check_replicas, make_transformer, {"tp": 2}, 0, 1, seed, timeout=900)


# Pipelines


def check_stages(make, name, axes, zero, cuts, layers, seed):
    def deep(name):
        return make(name, layers=layers)

    sch = create_schedule(deep(name), mesh(**axes))
    if "tp" in axes:
        schedule_of(name)(sch, {"tp": axes["tp"]})
    for index in cuts:
        schedule_of(name).blocks(sch)[index].cut_pipeline_stage()
    if "dp" in axes:
        sch.shard_data(zero=zero)
    sch.pipeline("1f1b", 4 // axes.get("dp", 1))
    config = {"train_micro_batch_size_per_gpu": 2}
    engine, _ = build(sch, optimizer=numerics.adamw, seed=seed, target="deepspeed", config=config)
    batch = language(seed)
    if "dp" in axes:
        del batch["attention_mask"]
    mine = share(batch, sch.mesh)
    count = engine.gradient_accumulation_steps()
    assert count == 4 // axes.get("dp", 1)

    def step():
        return float(engine.train_batch(iter([part(mine, count, index) for index in range(count)])))

    return hold(deep, name, seed, batch, engine.module.model, step)


@slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_two_stages_in_the_engine_with_their_ties_train_as_one_process(pair, make_transformer, seed, name):
    first, last = pair.run(check_stages, make_transformer, name, {"pp": 2}, 0, [0], 2, seed, timeout=900)
    assert not set(first) & set(last) or name == "gpt2"


# Errors that need no DeepSpeed


class Experts(nn.Module):
    """Experts of a form that can be spread over ranks."""

    def __init__(self):
        super().__init__()
        self.num_experts = 2
        self.up_proj, self.down_proj = (nn.Parameter(torch.randn(2, 8, 8)) for _ in range(2))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("never called")


def check_refusals(make, folder):
    def refused(message, axes, config=SIZE, schedule=lambda sch: None, model=make, **given):
        sch = create_schedule(model(), mesh(**axes))
        schedule(sch)
        steps = len(sch.tree.steps)
        with pytest.raises(ScheduleError, match=message):
            build(sch, target="deepspeed", config=config, **given)
        build(sch.copy())  # the schedule is unchanged
        assert len(sch.tree.steps) == steps

    torch.manual_seed(0)  # earlier tests may leave the ranks' random states unequal
    dp, pp, tp = {"dp": 2}, {"pp": 2}, {"tp": 2}
    refused("config must be DeepSpeed's configuration or the path of its JSON file, but got None", dp, None)
    refused("must set train_micro_batch_size_per_gpu.*, but has bf16", dp, {"bf16": {"enabled": False}})
    refused("cannot be read: .*no.json", dp, f"{folder}/no.json")
    refused("has an optimizer, too", dp, {**SIZE, "optimizer": {"type": "AdamW"}}, optimizer=torch.optim.AdamW)
    three = {**SIZE, "zero_optimization": {"stage": 3}}
    refused("ZeRO stage 1, but zero_optimization.stage is 3", dp, three, lambda sch: sch.shard_data(zero=1))
    halved = {**SIZE, "communication_data_type": "fp16"}
    refused("communication_data_type is fp16", dp, halved, lambda sch: sch.shard_data(reduce_dtype=torch.bfloat16))
    refused(
        r"shard_data\(stages=\{'fc1': 1\}\) has no counterpart", dp, SIZE,
        lambda sch: sch.shard_data(zero=3, stages={"fc1": 1}),
    )  # fmt: skip
    refused(
        "param_dtype=torch.bfloat16. is bf16: {enabled: true}", dp, SIZE,
        lambda sch: sch.shard_data(zero=2, param_dtype=torch.bfloat16),
    )  # fmt: skip
    refused("offload_optimizer in its configuration", dp, SIZE, lambda sch: sch.offload("optimizer"))
    refused("shard_experts leaves each expert to some", dp, SIZE, lambda sch: sch.shard_experts(2), Experts)
    refused("ranks share samples in 'fc1'", tp, SIZE, lambda sch: sch["fc1"].share_samples(1))
    refused("over 2 ranks, but tensor_parallel.autotp_size is 4", tp, {**SIZE, "tensor_parallel": {"autotp_size": 4}})
    refused("1f1b with one stage a rank, but there are 1 stages on 2 ranks", pp)
    cut = {"loss": F.mse_loss, "schedule": lambda sch: sch["fc1"].cut_pipeline_stage()}
    refused("another number of stages", pp, {**SIZE, "pipeline": {"stages": 4}}, **cut)
    refused("take ZeRO 0 and 1", pp, {**SIZE, "zero_optimization": {"stage": 2}}, **cut)
    cut["schedule"] = lambda sch: sch["fc1"].cut_pipeline_stage() and sch.pipeline("gpipe", 2)
    refused("in the order gpipe", pp, **cut)
    cut["schedule"] = lambda sch: sch["fc1"].cut_pipeline_stage() and sch.pipeline("1f1b", 2)
    refused("pipeline has 2 micro-batches, but gradient_accumulation_steps is 4", pp,
            {**SIZE, "gradient_accumulation_steps": 4}, **cut)  # fmt: skip

    plain = create_schedule(make())
    with pytest.raises(ScheduleError, match="all 2 ranks, so the mesh must have them in their order, but has 0"):
        build(plain, target="deepspeed", config=SIZE)
    with pytest.raises(ScheduleError, match="unknown target 'deepsped'; did you mean 'deepspeed'"):
        build(plain, target="deepsped")
    with pytest.raises(ScheduleError, match="config= is the configuration of an engine; pass target="):
        build(plain, config=SIZE)
    del os.environ["LOCAL_RANK"]
    with pytest.raises(ScheduleError, match="start by torchrun"):
        build(plain, target="deepspeed", config=SIZE)


def test_unsupported_schedules_are_refused_and_unchanged(two, mlp, tmp_path):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    two.run(check_refusals, type(mlp), str(tmp_path))


def test_a_configuration_is_not_changed_by_what_the_schedule_writes_in_it(two, mlp):
    assert two.run(check_untouched, type(mlp)) == [True, True]


def check_untouched(make):
    from redline.schedule.deepspeed import settings_of

    given = {**SIZE, "zero_optimization": {"reduce_bucket_size": 1000}, "tensor_parallel": {"autotp_size": 1}}
    text = json.dumps(given)
    sch = create_schedule(make(), mesh(dp=2)).shard_data(zero=2)
    made = settings_of(sch, given, optimizer=False)
    assert made["zero_optimization"] == {"reduce_bucket_size": 1000, "stage": 2} and "tensor_parallel" not in made
    return json.dumps(given) == text
