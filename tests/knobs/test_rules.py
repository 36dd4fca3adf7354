"""Each rule gives the same verdict for a strategy, a space, columns of configurations and a training."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from redline.base.errors import UsageError, WorkloadError
from redline.estimator.knob_arrays import knob_arrays
from redline.estimator.setup import TrainingSetup
from redline.knobs.rules import GENERAL, RULES, RuleContext, refusal
from redline.knobs.strategy import STANDARD, Strategy
from redline.models import workload
from redline.models.spaces import require_rules
from redline.space import Space
from redline.training.training import checked_strategy

OWN_LOSS = ("own loss of sequences", "sharded head")
DENSE = ("experts of a dense model", "capacity of a dense model", "tensor parallelism of a dense model")
LATTICE = {
    "tp": (1, 2, 3), "sp": (1, 2, 5), "cp": (1, 2, 4, 8), "pp": (1, 2), "dp": (1, 2, 4), "zero": (0, 1, 2, 3),
    "hsdp": (1, 2, 3), "ep": (1, 2, 3, 4), "etp": (0, 1, 2, 3), "capacity_factor": (0, 1.25),
    "sequence_parallel": (False, True), "micro_batch": (1, 4), "grad_accum": (1, 2, 3, 4),
    "pipeline_schedule": ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"), "virtual_stages": (1, 2, 4),
    "checkpoint_ratio": (0.0, 0.5), "fusion": (False, True), "kernels": (False, True), "offload": ("none", "optimizer"),
    "precision": ("fp32", "bf16", "fp16"), "attention": ("eager", "sdpa", "flash_attention_2"),
    "stage_blocks": ("1,3", "2,2", "1,1,1,1", "1,1,1", "2,3"),
    "strategy": ("0-3:-", "0-3:tp1", "0-2:tp2 3:ckpt", "0-3:zero3", "0-4:-"),
}  # fmt: skip
by_name = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "_"))


def context_of(rule, devices=4):
    if rule.name == "sequences of tokens":
        return RuleContext(devices=devices, tokens=False)
    return RuleContext(
        devices=devices,
        global_batch=16 if rule.name == "global batch" else None,
        seq_len=24,
        own_loss=rule.name in OWN_LOSS,
        blocks=4 if {"strategy", "stage_blocks"} & set(rule.knobs) else None,
        no_stage_blocks="its decoder is in one stage" if rule.name == "stages of a model" else "",
        no_runs="they meet elsewhere" if rule.name == "runs of a model" else "",
        experts=() if rule.name in DENSE else (4,),
    )


def combinations(rule):
    names = rule.knobs
    return [dict(zip(names, values)) for values in itertools.product(*(LATTICE[name] for name in names))]


@by_name
def test_a_rule_agrees_for_a_strategy_a_space_and_columns(rule):
    found, context = combinations(rule), context_of(rule)
    broken = [bool(rule.broken(Strategy(**each), context)) for each in found]
    assert True in broken and False in broken

    space = Space()
    for name in rule.knobs:
        space.choice(name, LATTICE[name])
    require_rules(space, context, [rule])
    (constraint,) = space.constraints
    assert constraint.reason == rule.reason(context)
    assert [each not in space for each in found] == broken
    reason = space.explain(found[broken.index(True)])
    assert rule.reason(context) in reason

    columns = {name: np.array([each[name] for each in found], object) for name in rule.knobs}
    numbers = {n: c if isinstance(c[0], str) else np.array(c.tolist()) for n, c in columns.items()}
    neutral = {name: np.full(len(found), knob.neutral) for name, knob in STANDARD.items()}
    arrays = type("Arrays", (), {**neutral, **numbers})
    assert np.broadcast_to(rule.broken(arrays, context), len(found)).tolist() == broken


@by_name
def test_a_rule_reads_the_knobs_that_it_names_and_asks_nothing_of_neutral_ones(rule):
    read = set()

    class Recorder:
        def __getattr__(self, name):
            read.add(name)
            return STANDARD[name].neutral

    rule.broken(Recorder(), context_of(rule))
    assert read <= set(rule.knobs)
    if rule.name not in ("devices", "global batch"):
        assert not rule.broken(Strategy(), context_of(rule))


@by_name
def test_a_training_refuses_by_the_same_rule_in_the_same_words(rule):
    """The training refuses before anything is built and without a process group."""
    mixture = {"ep", "etp", "strategy", "stage_blocks"} & set(rule.knobs) and rule.name not in DENSE
    family = "mixtral-tiny" if mixture else "llama-tiny"
    made = workload(family, seq_len=24, global_batch=16)
    task = {
        **dict.fromkeys(OWN_LOSS, replace(made, loss=lambda output, batch: output.loss)),
        "sequences of tokens": replace(made, seq_len=None, unit="samples/s"),
        "runs of a model": replace(made, schedule=replace(made.schedule, no_runs="they meet elsewhere")),
        "stages of a model": replace(
            made, schedule=replace(made.schedule, no_stage_blocks="its decoder is in one stage")
        ),
    }.get(rule.name, made)
    if rule.name == "global batch":  # omitted knobs follow it; two given knobs determine it
        with pytest.raises(WorkloadError, match="must divide a replica's samples, 16, but is 3"):
            checked_strategy(task, {"micro_batch": 3})
        return
    refused = set()
    for each in combinations(rule):
        pp, zero = (2 if {"pipeline_schedule", "stage_blocks"} & set(each) else 1), (3 if "hsdp" in each else 0)
        dp = 12 if "hsdp" in each and {"ep", "strategy"} & set(each) else 2
        micro = 6 if "strategy" in rule.knobs else 1
        beside = {"micro_batch": micro, "grad_accum": 4, "dp": dp, "pp": pp, "zero": zero, "precision": "bf16"}
        config = {**beside, **each}
        strategy = Strategy.of(config)
        context = context_of(rule, devices=3 if rule.name == "devices" else strategy.devices)
        if rule.broken(strategy, context):
            with pytest.raises(WorkloadError) as caught:
                checked_strategy(task, config, context.devices)
            assert str(caught.value) == refusal(strategy, context)
            refused.add(str(caught.value).partition(": ")[2])
    assert rule.reason(context) in refused


GENERALLY_BROKEN = {
    "devices": {"tp": 3},
    "global batch": {"micro_batch": 3, "dp": 4},
    "hsdp needs sharding": {"hsdp": 2, "zero": 1},
    "hsdp groups": {"hsdp": 3, "zero": 3},
    "tokens of a ring": {"cp": 4},
    "tokens of a shard": {"sp": 4},
    "tokens of sequence_parallel": {"tp": 4, "sequence_parallel": True},
}


@pytest.mark.parametrize("rule", GENERAL, ids=lambda rule: rule.name.replace(" ", "_"))
def test_an_estimate_refuses_what_no_trainer_can_do(rule):
    if rule.name == "sequences of tokens":
        pytest.skip("the estimator takes a sample without tokens for one token, which several ranks cannot share")
    if rule.knobs == ("ep",):
        pytest.skip("refused where the facts of the model are known, see below")
    setup = TrainingSetup(seq_len=18, global_batch=16, devices=4)
    knob_arrays([{"micro_batch": 1}], setup)
    with pytest.raises(UsageError) as caught:
        knob_arrays([{"micro_batch": 1, **GENERALLY_BROKEN[rule.name]}], setup)
    own = {"devices": "must divide the devices, 4", "global batch": "must divide the global batch, 16"}
    context = RuleContext(devices=4, global_batch=16, seq_len=18)
    assert own.get(rule.name, rule.reason(context)) in str(caught.value)


def test_values_that_a_knob_cannot_have_are_refused_with_those_that_it_can():
    for config, message in (
        ({"tp": 2.0}, r"tp must be a whole number of at least 1, but is 2\.0"),
        ({"zero": True}, "zero must be a stage from 0 to 3, but is True"),
        ({"checkpoint_ratio": 1.5}, r"checkpoint_ratio must be a number from 0 to 1, but is 1\.5"),
        ({"stage_blocks": "3,,1"}, "stage_blocks has the number of blocks of each stage, .* but in '3,,1' is ''"),
        ({"stage_blocks": "3,0"}, "in '3,0' is '0'"),
        ({"stage_blocks": "3,1.5"}, r"in '3,1\.5' is '1\.5'"),
        ({"stage_blocks": 4}, "stage_blocks must be the number of blocks of each stage, such as 7,8,8,9, but is 4"),
        ({"capacity_factor": -1.0}, r"capacity_factor must be a number from 0 on, but is -1\.0"),
        ({"capacity_factor": float("inf")}, "capacity_factor must be a number from 0 on, but is inf"),
        ({"precision": "bf61"}, "precision must be one of fp32.*bf16.*but is 'bf61'"),
        ({"fusion": 1}, "fusion must be true or false, but is 1"),
    ):
        with pytest.raises(UsageError, match=message):
            Strategy.of(config)


def test_a_strategy_takes_from_devices_and_global_batch_what_is_no_knob():
    found = Strategy.of({"tp": 2, "sp": 2, "micro_batch": 2}, devices=8, global_batch=16)
    assert (found.dp, found.replicas, found.devices, found.grad_accum) == (2, 4, 8, 4)
    assert Strategy.of({"grad_accum": 2}, global_batch=16).micro_batch == 8
    assert Strategy.of({"pp": 2, "virtual_stages": 2}).pipeline_schedule == "interleaved"
    assert Strategy.of({"pipeline_schedule": "zbv", "zero": 3, "sequence_parallel": True, "etp": 1}) == Strategy()
    assert Strategy.of({"pp": 2, "stage_blocks": " 3, 1"}).stage_blocks == "3,1"
    # Without a pipeline, or if it states the default division, it has no effect.
    assert Strategy.of({"stage_blocks": "3,1"}).stage_blocks is None
    assert Strategy.of({"pp": 2, "stage_blocks": "3,2"}).stage_blocks is None
    assert Strategy.of({"tp": 2, "etp": 2}).etp == 0 and Strategy.of({"tp": 2, "etp": 1}).etp == 1
    with pytest.raises(UsageError, match="the global batch must be a multiple of dp, 3, but is 16"):
        Strategy.of({"dp": 3}, global_batch=16)
    with pytest.raises(UsageError, match="grad_accum must divide a replica's samples, 16, but is 3"):
        Strategy.of({"grad_accum": 3}, global_batch=16)
