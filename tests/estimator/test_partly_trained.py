"""Trainings of some blocks, and optimizers of low rank: what is trained has gradients and states, the rest has weights."""

import pytest
from redline.estimator.estimator import Estimator
from redline.estimator.facts.derived import PartlyTrained, low_rank_share
from redline.estimator.facts.model_facts import ModelFacts
from redline.estimator.hardware import find_hardware
from redline.estimator.setup import TrainingSetup

MIB = 2.0**20
FACTS = ModelFacts.from_shape(layers=8, hidden=1024, heads=8, intermediate=4096, vocabulary=32000)
BLOCK = next(part for part in FACTS.parts if part.role == "block")


def terms(source, **setup):
    base = {"devices": 1, "seq_len": 1024, "precision": "bf16_pure"}
    estimator = Estimator(source, find_hardware("a100-80gb"), TrainingSetup(**{**base, **setup}))
    estimate = estimator({"micro_batch": 2})
    return {name.partition(".")[2]: value for name, value in estimate.breakdown.items() if name.startswith("memory.")}


@pytest.mark.parametrize(("blocks", "last"), [(2, True), (3, False), (8, True)])
def test_only_trained_blocks_have_gradients_and_states(blocks, last):
    found = terms(PartlyTrained(FACTS, blocks, last=last))
    trained = blocks * BLOCK.parameters
    assert found["parameters"] == pytest.approx(2 * FACTS.parameters / MIB)
    assert found["optimizer"] == pytest.approx(4 * trained / MIB)
    assert terms(PartlyTrained(FACTS, blocks, last=last), gradients_stay=True)["gradients"] == pytest.approx(
        2 * trained / MIB
    )


def test_blocks_before_the_trained_ones_keep_nothing_for_backward():
    everything, last, any_two = (
        terms(source)["activations"]
        for source in (FACTS, PartlyTrained(FACTS, 2, last=True), PartlyTrained(FACTS, 2, last=False))
    )
    assert last < 0.3 * everything and any_two == pytest.approx(everything)


def test_states_of_low_rank_are_those_of_the_longer_dimension_and_a_projection():
    rank = 64
    matrices = sum(item.k * item.n * item.count for item in BLOCK.matmuls)
    kept = sum(item.count * (rank * max(item.k, item.n) + rank * min(item.k, item.n) / 2) for item in BLOCK.matmuls)
    share = low_rank_share(FACTS, rank)
    assert share == pytest.approx(1 - 8 * (matrices - kept) / FACTS.parameters)
    assert low_rank_share(FACTS, 10**6) >= 1  # no projection makes anything smaller then
    full, low = terms(FACTS), terms(FACTS, state_share=share)
    assert low["optimizer"] == pytest.approx(share * full["optimizer"]) and low["parameters"] == full["parameters"]


HEAD = 32000 * 1024
"""Elements of the head's weight."""


@pytest.mark.parametrize(
    ("zero", "fused", "of_parameters", "of_head"),
    # Flattened and widened gradients, and the norm of the head's in fp64.
    [(0, True, 8, 0), (1, True, 6, 8), (1, False, 6, 8), (2, False, 6, 8)],
)
def test_deepspeed_widens_a_ranks_gradients_at_the_update(zero, fused, of_parameters, of_head):
    formats = {"master_weights": "fp32", "gradient_dtype": "bf16", "bucket_mib": 1.0}
    setup = {"devices": 4, "zero": zero, "fused_optimizer": fused, "seq_len": 1, "grad_accum": 2, **formats}
    share = FACTS.parameters / (4 if zero else 1)
    found = terms(FACTS, deepspeed_update=True, **setup)
    at_update = sum(
        found.get(name, 0.0) for name in ("activations", "checkpoints", "recomputation", "logits and loss", "buffers")
    )
    assert at_update == pytest.approx(max(of_parameters * share, of_head * min(HEAD, share)) / MIB, rel=1e-6)
    assert sum(terms(FACTS, deepspeed_update=True, **{**setup, "offload": "optimizer"}).values()) < sum(found.values())


def test_deepspeed_updates_so_many_elements_at_a_time_under_zero_3():
    facts = ModelFacts.from_shape(layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=32000)
    setup = {"devices": 4, "seq_len": 1, "grad_accum": 2, "master_weights": "fp32", "gradient_dtype": "bf16"}
    fused, looped, at_once = (
        terms(facts, deepspeed_update=True, fused_optimizer=is_fused, zero=zero, **setup)["buffers"]
        for zero, is_fused in ((3, True), (3, False), (2, True))
    )
    assert fused == pytest.approx(6 * 1e9 / MIB, rel=0.01)
    assert looped == pytest.approx(8 * 1e9 / MIB, rel=0.01)  # gradients stay while the optimizer loops
    assert at_once == pytest.approx(6 * facts.parameters / 4 / MIB, rel=0.01)
