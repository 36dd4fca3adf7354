"""Adapters: the trained parameters, their cost, and the unchanged space."""

import numeric
import pytest
import torch
import torch.distributed as dist
from redline.base.errors import WorkloadError
from redline.models import Workload
from redline.models.lora import Lora, with_lora
from redline.training import Training
from tiers import tiered

pytest.importorskip("peft")
CPU = torch.device("cpu")


def trained(model):
    return {name for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_only_adapters_have_gradients_and_optimizer_state(small, family):
    training = Training(with_lora(small(family), Lora(r=4)), {"micro_batch": 4}, CPU)
    names = trained(training.model)
    assert names and all(".lora_" in name for name in names)
    training.passes()
    held = {name for name, each in training.model.named_parameters() if each.grad is not None}
    assert held == names
    training.optimizer.step()
    size = sum(each.numel() for each in training.model.parameters() if each.requires_grad)
    state = [v for s in training.optimizer.state.values() for v in s.values() if v.dim()]
    assert sum(each.numel() for each in state) == 2 * size
    assert size < 0.2 * sum(each.numel() for each in training.model.parameters())


def test_adapters_start_as_nothing_and_then_train(small):
    adapted = Training(with_lora(small("llama"), Lora(r=4, alpha=64)), {"micro_batch": 8}, CPU)
    before = {name: each.detach().clone() for name, each in adapted.model.named_parameters()}
    assert all(not each.any() for name, each in before.items() if ".lora_B." in name)
    assert all(each.any() for name, each in before.items() if ".lora_A." in name)
    for _ in range(2):  # an adapter's inner half has a gradient only once its outer half is not zero
        adapted.step()
    after = dict(adapted.model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == trained(adapted.model)


@pytest.mark.parametrize(
    ("family", "config"),
    tiered(
        [
            ("llama", {"zero": 3}),
            ("bert", {"tp": 2, "sequence_parallel": True}),
        ],
        [
            ("llama", {"pp": 2}),
            ("gpt2", {"tp": 2}),
            ("llama", {"zero": 0}),
            ("llama", {"zero": 1}),
            ("llama", {"tp": 2}),
            ("llama", {"tp": 2, "sequence_parallel": True}),
        ],
    ),
    ids=str,
)
def test_adapters_train_alike_on_two_ranks(two, small, seed, family, config):
    made = with_lora(small(family), Lora(r=4, alpha=64, target=("all-linear",)))
    for found in two.run(numeric.departure, made, {"micro_batch": 2, **config}, seed):
        numeric.hold(found)


def with_frozen_gradients(made):
    rank = Training(made, {"pp": 2, "micro_batch": 2}, CPU, rank=dist.get_rank(), world_size=2)
    rank.passes()
    held = {name for name, each in rank.model.named_parameters() if each.grad is not None}
    return held - trained(rank.model), bool(held)


def test_frozen_weights_that_stages_share_have_no_gradient(two, small):
    """GPT-2's embedding is tied to its head, in the other stage."""
    assert two.run(with_frozen_gradients, with_lora(small("gpt2"), Lora(r=4))) == [(set(), True)] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=16", Lora(r=16)),
        ("r=8,alpha=32,target=q_proj+v_proj", Lora(r=8, alpha=32.0, target=("q_proj", "v_proj"))),
        ("target=all-linear, r=4,dropout=0.05", Lora(r=4, target=("all-linear",), dropout=0.05)),
    ],
)
def test_adapters_are_read_and_written_as_text(text, expected):
    assert Lora.parse(text) == expected
    assert Lora.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "lora must look like r=16, or .*but got '16'"),
        ("rank=16", "unknown part of lora 'rank'"),
        ("r=0", "r of at least 1.*but got 'r=0'"),
        ("r=4,r=8", "names r twice"),
        ("r=x", "must look like"),
        ("alpha=2", "must look like"),
        ("r=4,dropout=1", "dropout from 0 to below 1"),
    ],
)
def test_invalid_adapters_are_refused(text, message):
    with pytest.raises(WorkloadError, match=message):
        Lora.parse(text)


def test_a_model_of_ones_own_code_brings_its_own_adapters():
    made = Workload(
        model=lambda: torch.nn.Linear(4, 4),
        batch=lambda size, seed: torch.ones(size, 4),
        loss=lambda output, batch: output.mean(),
    )
    with pytest.raises(WorkloadError, match="lora adapts Hugging Face models"):
        with_lora(made, Lora(r=4))
