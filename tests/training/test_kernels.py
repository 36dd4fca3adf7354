"""The knob kernels: default spaces that have it, reasons why others do not, and combinations that are refused."""

from dataclasses import replace

import numerics_table as numerics
import pytest
import redline as rl
import torch
from redline.models import workload
from redline.models.families.standard import head_of
from redline.models.kernels import kernels_obstacle
from redline.models.skeleton import skeleton
from redline.models.spaces import default_space
from redline.schedule import create_schedule
from torch import nn
from torch.nn import functional as F

V, H = 128, 16


class Blocks(nn.Module):
    """A user's own language model with a head of `size`."""

    def __init__(self, size=V):
        super().__init__()
        self.embed = nn.Embedding(V, H)
        layer = lambda: nn.Sequential(nn.Linear(H, 2 * H), nn.ReLU(), nn.Linear(2 * H, H))  # noqa: E731
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.norm, self.out = nn.LayerNorm(H), nn.Linear(H, size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(self.norm(x))


def batch(size, seed):
    tokens = torch.randint(V, (size, 8), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens.roll(-1, 1)


def fused(output, batch):
    return F.cross_entropy(output[:, :-1].reshape(-1, V), batch[1][:, :-1].reshape(-1))


def own(loss=fused, **more):
    return rl.Workload(**{"model": Blocks, "batch": batch, "loss": loss, "global_batch": 8, "seq_len": 8, **more})


HEADS = {
    "gpt2-tiny": "lm_head", "bert-tiny": "cls.predictions.decoder", "t5-tiny": "lm_head",
    "llama-tiny": "lm_head", "mixtral-tiny": "lm_head",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_language_model_has_it_off_by_default(cpu, name):
    made = workload(name)
    assert kernels_obstacle(made) is None
    space = default_space(made, cpu)
    assert space["kernels"].values == (False, True) and space.default()["kernels"] is False
    sch = create_schedule(skeleton(made))
    assert head_of(sch, made.schedule.blocks(sch)).path == HEADS[name]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (workload("vit-tiny"), "no projection to a vocabulary"),
        (workload("wide-resnet-tiny"), "no projection to a vocabulary"),
        (
            own(model=lambda: nn.Sequential(nn.Embedding(V, H), nn.Linear(H, V))),
            "no projection to a vocabulary",
        ),
        (
            own(model=lambda: Blocks(32), loss=lambda output, batch: fused(F.pad(output, (0, V - 32)), batch)),
            "32 logits a token are too few",
        ),
        (
            own(loss=lambda output, batch: F.cross_entropy(output.transpose(1, 2), batch[1])),
            "takes logits by transpose",
        ),
        (
            own(loss=lambda output, batch: -output.log_softmax(-1)[..., 0].mean()),
            "takes logits by log_softmax",
        ),
        (own(loss=lambda output, batch: output.argmax().item()), "cannot be observed without running"),
        (own(schedule=lambda sch, config: config.get("fusion")), "own schedule does not look at it"),
    ],
    ids=["vit", "resnet", "no blocks", "small", "transpose", "log_softmax", "item", "schedule"],
)
def test_missing_kernels_have_a_reason(cpu, made, reason):
    assert reason in kernels_obstacle(made)
    assert "kernels" not in default_space(made, cpu).by_name


@pytest.mark.parametrize(
    "knobs", [{"precision": "bf16"}, {"precision": "bf16_pure"}, {"checkpoint_ratio": 1.0}], ids=str
)
def test_training_with_kernels_equals_training_without(seed, knobs):
    made = numerics.tiny("gpt2")
    assert numerics.departure(made, {**knobs, "kernels": True, "grad_accum": 2}, seed).holds


def on_ranks(knobs, loss):
    import torch.distributed as dist

    assert dist.is_initialized()
    return numerics.departure(own(loss=loss), knobs)


@pytest.mark.parametrize(
    "knobs",
    [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2, "grad_accum": 2}],
    ids=str,
)
def test_a_loss_outside_of_the_model_works_on_replicas(two, knobs):
    for found in two.run(on_ranks, {**knobs, "kernels": True}, fused):
        assert found.holds and found.of("weights"), found


def in_stages(loss):
    made = replace(numerics.tiny("gpt2"), loss=loss, identity=None)
    return numerics.departure(made, {"pp": 2, "grad_accum": 4, "kernels": True})


def of_logits(output, batch):
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def test_a_loss_outside_of_the_model_works_behind_a_pipeline(two):
    for found in two.run(in_stages, of_logits):
        assert found.holds and found.of("weights"), found
