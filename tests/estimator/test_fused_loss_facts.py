"""Estimates with `kernels`: memory of a chunk's logits, time of all products."""

import copy

import pytest
import redline as rl
import torch
from live import Live
from redline.estimator import Constants, Estimator, TrainingSetup
from redline.estimator.facts.derived import unformed
from redline.estimator.facts.traced import TracedFacts, trace_facts
from redline.schedule.primitives.fused_loss import most_chunk
from torch.nn import functional as F


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("facts")


def both(folder, precision="fp32", name="gpt2-tiny"):
    made = rl.workload(name)
    plain = trace_facts(made, precision=precision, folder=folder)
    return plain, unformed(plain)


def part(facts, role):
    return next(each for each in facts.parts if each.role == role)


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny", "t5-tiny"])
def test_products_and_parameters_are_the_same_and_logits_are_not_kept(folder, name):
    plain, fused = both(folder, name=name)
    assert (plain.kernels, fused.kernels) == (False, True)
    assert fused.parameters == plain.parameters and fused.model_flops(64) == plain.model_flops(64)
    assert [each.matmuls for each in fused.parts] == [each.matmuls for each in plain.parts]
    logits = 4.0 * plain.vocabulary
    assert part(plain, "loss").saved.sharded >= logits
    assert part(fused, "loss").saved.sharded == part(fused, "loss").saved.sequence == 0
    assert [a for a, b in zip(plain.parts, fused.parts) if a != b] == [
        each for each in plain.parts if each.role in ("head", "loss") and each != part(fused, each.role)
    ]


def test_facts_with_kernels_follow_from_those_without_and_are_not_traced_again(folder, monkeypatch):
    source = TracedFacts(rl.workload("gpt2-tiny"), folder=folder)
    plain = source.facts(precision="fp32", attention="sdpa", fusion=False)
    monkeypatch.setattr("redline.estimator.facts.traced._trace", None)
    fused = source.facts(precision="fp32", attention="sdpa", fusion=False, kernels=True)
    assert fused.kernels and part(fused, "block") == part(plain, "block")


def test_a_model_without_a_vocabulary_says_that_nothing_changes(folder):
    plain, fused = both(folder, name="vit-tiny")
    assert fused.parts == plain.parts and "no head onto a vocabulary" in fused.notes[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_of_the_loss_is_what_its_tensors_take(folder, precision):
    """The head alone with 512 tokens: gradients of the hidden states and of the weight, and a chunk's tensors."""
    hidden, vocabulary, tokens = 64, 16384, 512
    head = torch.nn.Linear(hidden, vocabulary, bias=False)
    sch = rl.create_schedule(torch.nn.Sequential(copy.deepcopy(head)))
    sch["0"].fused_loss()
    model, _ = rl.build(sch)
    states, target = torch.randn(tokens, hidden, requires_grad=True), torch.randint(vocabulary, (tokens,))
    with Live() as live, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        F.cross_entropy(model(states), target)
    loss = part(both(folder, precision)[1], "loss")
    assert loss.chunk == most_chunk(hidden) == 128
    copies = vocabulary * hidden * 2 if precision == "bf16" else 0  # counted with the copies of all weights
    expected = loss.transient.sharded * loss.chunk + loss.transient_fixed + tokens * hidden * 4 + copies
    assert live.peak == pytest.approx(expected, rel=0.02)


def memory(estimator, **knobs):
    table = estimator.table([{"precision": "fp32", "fused_optimizer": True, **knobs}])
    return {name.removeprefix("memory."): float(value[0]) for name, value in table.breakdown.items()}


def test_memory_and_time_of_the_loss(folder):
    setup, unlimited = TrainingSetup(devices=1, global_batch=32), Constants(limited_rate=1.0)
    estimator = Estimator(rl.workload("gpt2-tiny"), "h100", setup, constants=unlimited)
    term, logits = "logits and loss", 16384 * 4 * 64 / 2**20  # per sample, MiB
    small, large = ({k: memory(estimator, micro_batch=m, kernels=k) for k in (False, True)} for m in (8, 32))
    # Without kernels: kept, and two temporary copies. With kernels: a chunk of 128 tokens for any micro-batch.
    assert large[False][term] - small[False][term] == pytest.approx(24 * 3 * logits, rel=0.01)
    # Gradients of the hidden states and labels are added.
    chunk, gradient, states = 2 * logits, 4.0, 64 * (64 * 4 + 8) / 2**20
    assert large[True][term] == pytest.approx(chunk + 32 * states, rel=0.01)
    # Between micro-batches the head's new gradient exists beside the old one.
    assert small[True][term] == pytest.approx(chunk + gradient + 8 * states, rel=0.01)
    tiny = memory(estimator, micro_batch=1, kernels=True)
    assert tiny[term] == pytest.approx(logits / 2 + gradient + states, rel=0.01)
    assert large[True]["time.matmul"] == large[False]["time.matmul"]
    assert large[True]["activations"] == large[False]["activations"]
    assert large[True]["time.recomputation"] == 0.0
