"""Tensor and sequence parallelism on real ranks: values, gradients, training steps, refusals and pitfalls."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from redline.models.families import schedule_of
from redline.schedule import (
    build,
    create_schedule,
    full_state_dict,
    verify,
)
from redline.schedule.parallel.exchange import PartialEmbedding
from redline.schedule.parallel.sharding import whole
from torch import nn


def plan(sch, name, sequence_parallel=False):
    schedule_of(name)(sch, {"tp": 2, "sequence_parallel": sequence_parallel})


# Sizes that change with a cut


def check_counts(make):
    sch = create_schedule(make("gpt2"), mesh(tp=2))
    plan(sch, "gpt2")
    attention, mlp = sch["transformer.h.0.attn"].module, sch["transformer.h.0.mlp"].module
    assert (attention.c_attn.nf, attention.c_attn.nx) == (48, 32)
    # Input and output have the same size here; only the cut side changes.
    assert (attention.c_proj.nf, attention.c_proj.nx) == (32, 16)
    assert (attention.num_heads, attention.split_size, attention.head_dim) == (2, 16, 8)
    assert (mlp.c_fc.nf, mlp.c_proj.nx, mlp.c_proj.nf) == (64, 64, 32)
    wte, head = sch["transformer.wte"].module, sch["lm_head"].module
    assert (wte.num_embeddings, wte.embedding_dim) == (48, 32)
    assert (head.out_features, head.in_features) == (48, 32)
    assert wte.weight is head.weight and wte.weight.shape == (48, 32) and wte.weight.is_meta
    bert = create_schedule(make("bert"), mesh(tp=2))
    plan(bert, "bert")
    attention = bert["bert.encoder.layer.0.attention.self"].module
    assert (attention.num_attention_heads, attention.all_head_size, attention.attention_head_size) == (
        2,
        16,
        8,
    )
    decoder = bert["cls.predictions.decoder"].module
    assert decoder.bias is bert["cls.predictions"].module.bias and decoder.bias.shape == (48,)


def test_counts_follow_on_the_side_that_is_cut_and_ties_hold(two, make_transformer):
    two.run(check_counts, make_transformer)


def check_fused(make):
    torch.manual_seed(0)
    model = make("gpt2", device="cpu")
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    sch = create_schedule(model, mesh(tp=2))
    sch["transformer.h.0.attn.c_attn"].shard("weight", axis=1, parts=3).shard("bias", axis=0, parts=3)
    module, rank = model.transformer.h[0].attn.c_attn, dist.get_rank()
    q, k, v = weight.split(32, 1)
    mine = slice(16 * rank, 16 * rank + 16)
    assert torch.equal(module.weight, torch.cat([q[:, mine], k[:, mine], v[:, mine]], 1))
    assert torch.equal(whole(module, "weight", module.weight), weight)


def test_fused_projections_are_cut_part_by_part_and_join_again(two, make_transformer):
    two.run(check_fused, make_transformer)


class Masked(nn.Module):
    """A buffer that is cut along with the features that it masks."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.register_buffer("mask", torch.arange(16) % 3 > 0)
        self.register_buffer("scale", torch.linspace(1, 2, 16))
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)) * self.mask * self.scale)


def cut_mlp(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    sch["fc1"].sync("bwd_post", "all_reduce")


def check_buffers(seed):
    torch.manual_seed(seed)
    sch = create_schedule(Masked(), mesh(tp=2))
    with verify(sch, torch.randn(4, 8)):
        cut_mlp(sch)
        sch.shard(["mask", "scale"], axis=0)
    built, _ = build(sch)
    assert built.mask.shape == built.scale.shape == (8,)
    assert torch.equal(full_state_dict(built)["mask"], torch.arange(16) % 3 > 0)


def test_buffers_are_cut_as_parameters_are(two, seed):
    two.run(check_buffers, seed)


class Images(nn.Module):
    """Convolutions, and an embedding cut along its features."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv1 = nn.Conv1d(8, 12, 3, padding=1)
        self.conv2 = nn.Conv1d(12, 4, 3)

    def forward(self, tokens):
        return self.conv2(torch.relu(self.conv1(self.embed(tokens).transpose(1, 2))))


def check_convolutions(seed):
    torch.manual_seed(seed)
    sch = create_schedule(Images(), mesh(tp=2))
    with verify(sch, torch.arange(14).reshape(2, 7) % 10):
        sch["embed"].shard("weight", axis=1).sync("fwd_post", "all_gather", axis=-1)
        sch["conv1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch["conv2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    assert (sch["conv1"].module.out_channels, sch["conv2"].module.in_channels) == (6, 6)
    assert sch["embed"].module.embedding_dim == 4 and sch["embed"].module.num_embeddings == 10


def test_convolutions_and_embeddings_are_cut_along_features(two, seed):
    two.run(check_convolutions, seed)


# Dropout


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.region = SubgraphCall()

    def forward(self, x):
        return torch.stack([self.drop(x), *self.region(x), self.drop(x)])


class SubgraphCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Dropout(0.5)
        self.whole = nn.Dropout(0.5)

    def forward(self, x):
        return [self.cut(x), self.whole(x), self.cut(x)]


def check_dropout(checkpoint):
    sch = create_schedule(Whole(), mesh(tp=2))
    sch["region"].fork_rng()
    sch["region.whole"].fork_rng(differ=False)
    if checkpoint:
        sch.checkpoint()
    built, _ = build(sch)
    torch.manual_seed(3)
    x = torch.ones(1000, requires_grad=True)
    out = built(x)
    (out * torch.arange(1.0, 6).unsqueeze(1)).sum().backward()
    masks, following = out.detach() > 0, torch.rand(4)
    # The recomputed masks equal those of the forward pass: the gradient is the weighted sum of the masks.
    expected = (masks * 2.0 * torch.arange(1.0, 6).unsqueeze(1)).sum(0)
    assert torch.equal(x.grad, expected)
    return masks, following


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_differs_where_cut_and_agrees_where_whole(two, checkpoint):
    (one, next_one), (other, next_other) = two.run(check_dropout, checkpoint)
    same = [(a == b).float().mean().item() for a, b in zip(one, other)]
    assert same[0] == same[2] == same[4] == 1
    # Independent masks agree at half of 1000 positions, plus or minus 16.
    assert 0.4 < same[1] < 0.6 and 0.4 < same[3] < 0.6
    assert torch.equal(next_one, next_other)
    assert len({tuple(mask.tolist()) for mask in one}) == 5


class ScaledEmbedding(nn.Embedding):
    """An embedding that scales its rows, as Gemma's does."""

    def forward(self, tokens):
        return 3.0 * super().forward(tokens)


@pytest.mark.parametrize("made", [nn.Embedding, ScaledEmbedding, partial(nn.Embedding, max_norm=0.5)])
def test_parts_of_a_vocabulary_compute_what_the_whole_embedding_does(made):
    whole = made(8, 4, padding_idx=5)
    tokens = torch.tensor([[0, 5, 7, 3]])
    found = torch.zeros(1, 4, 4)
    for rank, rows in enumerate(whole.weight.detach().clone().chunk(2)):
        part = made(8, 4, padding_idx=5)
        part.weight = nn.Parameter(rows)
        layer = PartialEmbedding(SimpleNamespace(size=2, rank=rank), 8)
        found += layer(part, part.forward, (tokens,), {}).detach()
        assert part.padding_idx == 5
    torch.testing.assert_close(found, whole(tokens).detach())
