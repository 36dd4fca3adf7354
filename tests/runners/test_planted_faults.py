"""Every planted fault is found, one at a time, and no correct configuration is called wrong."""

import sys

import cloudpickle
import faults
import pytest
import redline
import torch
import torch.distributed as dist
from redline.runners.trial.numerics_check import numerics_mismatch, together
from redline.training import Training
from redline.training.probe import first_step, take
from tiers import tiered

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(faults)
CPU = torch.device("cpu")
MODELS = ("gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny")

EVERYWHERE = (
    faults.attention_is_zeroed,
    faults.attention_of_one_block_is_zeroed,
    faults.one_block_is_skipped,
    faults.one_head_is_lost,
    faults.a_norm_is_left_out,
    faults.the_residual_is_scaled,
    faults.weights_differ,
    faults.gradients_are_scaled,
    faults.gradients_of_one_block_are_scaled,
    faults.loss_is_not_averaged_over_micro_batches,
    faults.one_micro_batch_is_left_out,
    faults.labels_are_shifted,
    faults.weights_of_one_block_are_not_updated,
)
"""Faults on a single process."""
# Llama has no dropout, BERT no causal mask. Only Llama and BERT have buffers, and neither has a boolean one:
# tests/training/test_probe.py tests that with its own model.
OWN = {
    "gpt2-tiny": (faults.causal_mask_is_dropped, faults.dropout_is_off, faults.dropout_is_twice_as_strong),
    "llama-tiny": (faults.causal_mask_is_dropped, faults.a_dropout_is_added, faults.a_buffer_is_zeroed),
    "bert-tiny": (
        faults.a_causal_mask_is_added,
        faults.dropout_is_off,
        faults.dropout_is_twice_as_strong,
        faults.a_buffer_is_zeroed,
    ),
    "t5-tiny": (faults.causal_mask_is_dropped, faults.dropout_is_off, faults.dropout_is_twice_as_strong),
}
UNFORMED = (
    faults.every_other_chunk_gives_no_gradient,
    faults.losses_of_a_chunk_are_of_one_token,
    faults.the_heads_gradient_is_of_one_chunk,
    faults.attention_of_one_block_is_zeroed,
    faults.one_head_is_lost,
    faults.labels_are_shifted,
    faults.loss_is_not_averaged_over_micro_batches,
)
"""Faults with `kernels`, whose logits the probe computes itself."""
DP, PP = {"dp": 2, "micro_batch": 8, "grad_accum": 2}, {"pp": 2, "micro_batch": 8, "grad_accum": 4}
TP = {"tp": 2, "micro_batch": 8, "grad_accum": 4}
ON_TWO = (
    (faults.one_gradient_is_not_reduced, DP),
    (faults.partial_sums_are_not_added, TP),
    (faults.bias_is_added_on_every_rank, TP),  # Llama and T5 have none
    (faults.ranks_disagree, {**TP, "sequence_parallel": True}),
    (faults.pipeline_does_not_average_the_loss, PP),
    (faults.a_stage_is_not_updated, PP),
)
MORE_ON_TWO = (
    (faults.gradients_are_not_reduced, DP),
    (faults.attention_of_one_block_is_zeroed, {**DP, "zero": 3}),
    (faults.one_block_is_skipped, PP),
    (faults.labels_are_shifted, PP),
    (faults.partial_sums_are_not_added, {**TP, "kernels": True}),
    (faults.pipeline_does_not_average_the_loss, {**PP, "kernels": True}),
)
"""Faults larger than those of `ON_TWO`, and single-process faults on two ranks."""


def workload(name, seq_len=32):
    return redline.workload(name, seq_len=seq_len)


def verdict(probe, reference):
    return numerics_mismatch(probe, reference, loss=1.0, last_loss=1.0)


def one(name, seq_len=32):
    return Training(workload(name, seq_len), {"micro_batch": 8, "grad_accum": 4}, CPU)


@pytest.fixture(scope="module")
def subject():
    """A candidate of a model, built once, and its numbers without a fault."""
    made = {}

    def get(name, seq_len=32):
        if (name, seq_len) not in made:
            training = one(name, seq_len)
            made[name, seq_len] = training, together([take(training)])
        return made[name, seq_len]

    return get


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, id=f"{name}-{fault.__name__}", marks=[pytest.mark.slow] * (name != MODELS[0]))
        for name in MODELS
        for fault in (*EVERYWHERE, *OWN[name])
    ],
)
def test_a_planted_fault_is_found(subject, name, fault):
    # Twice the dropout changes the logits up to 1.5 times as much, and less if they are mostly noise: the tolerance, which
    # shrinks with the number of tokens, must be below that.
    training, expected = subject(name, 128 if fault is faults.dropout_is_twice_as_strong else 32)
    if fault is faults.weights_of_one_block_are_not_updated:
        training = one(name)  # this fault needs a training that takes a step
        with fault(training):
            found = together([take(training)], [first_step(training)[1]])
        assert verdict(found, expected) is not None
        return
    with fault(training):
        assert verdict(together([take(training)]), expected) is not None
    # It is the planted fault that was found.
    if fault in (EVERYWHERE[0], EVERYWHERE[-3], OWN[name][0], OWN[name][-1]):
        assert verdict(together([take(training)]), expected) is None


@pytest.fixture(scope="module")
def unformed():
    made = {}

    def get(name):
        if name not in made:
            made[name] = Training(workload(name), {"micro_batch": 8, "grad_accum": 4, "kernels": True}, CPU)
        return made[name]

    return get


@pytest.mark.parametrize(
    ("name", "fault"),
    [*(("gpt2-tiny", fault) for fault in UNFORMED), ("bert-tiny", faults.the_heads_bias_is_forgotten)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_is_found_without_all_logits(subject, unformed, name, fault):
    _, expected = subject(name)
    training = unformed(name)
    with fault(training):
        assert verdict(together([take(training)]), expected) is not None
    assert verdict(together([take(training)]), expected) is None


def part_with(name, knobs, fault):
    """This rank's part with a fault. A step is taken if the fault appears only in one."""
    training = Training(workload(name), knobs, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    with fault(training):
        part = take(training)
        return part, first_step(training)[1] if "updated" in fault.__name__ else None


def no_fault(training):
    return faults.hooks()


def on_ranks(pool, name, knobs, fault=no_fault):
    found = pool.run(part_with, name, knobs, fault, timeout=300)
    return together([part for part, _ in found], [step for _, step in found])


@pytest.fixture(scope="module")
def two_as_they_should_be(two):
    made = {}

    def get(name):
        if name not in made:
            made[name] = on_ranks(two, name, DP)
        return made[name]

    return get


def hold_on_two(two, expected, name, fault, knobs):
    assert verdict(on_ranks(two, name, knobs, fault), expected) is not None
    if fault in (faults.partial_sums_are_not_added, faults.ranks_disagree, faults.a_stage_is_not_updated):
        assert verdict(on_ranks(two, name, knobs), expected) is None


@pytest.mark.parametrize(
    ("fault", "knobs"), tiered(ON_TWO, MORE_ON_TWO), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_that_takes_two_ranks_is_found(two, two_as_they_should_be, fault, knobs):
    hold_on_two(two, two_as_they_should_be("gpt2-tiny"), "gpt2-tiny", fault, knobs)


# Correct configurations


def part_of(made, knobs):
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    training = Training(made, knobs, CPU, rank=rank, world_size=world)
    return take(training), first_step(training)[1]


def run(pool, made, knobs):
    found = [part_of(made, knobs)] if pool is None else pool.run(part_of, made, knobs, timeout=600)
    return together([part for part, _ in found], [step for _, step in found])


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in MODELS[1:])])
@pytest.mark.parametrize(
    "knobs",
    [
        {"precision": "bf16", "micro_batch": 4},
        {"precision": "bf16_pure", "micro_batch": 32, "attention": "eager"},
        {"micro_batch": 1, "checkpoint_ratio": 0.5, "attention": "eager"},
        {"micro_batch": 8, "kernels": True},
        {"micro_batch": 16, "kernels": True, "precision": "bf16", "checkpoint_ratio": 0.5},
        {"micro_batch": 32, "kernels": True, "precision": "bf16_pure"},
    ],
    ids=str,
)
def test_a_sound_candidate_is_not_wrong(subject, name, knobs):
    found = run(None, workload(name), knobs)
    _, expected = subject(name)
    assert verdict(found, expected) is None, found
    assert verdict(expected, found) is None
