"""Tensor and sequence parallelism on real ranks: values, gradients, training steps, refusals and pitfalls."""

import copy
from functools import partial
from types import SimpleNamespace

import numeric
import numerics_table as numerics
import pytest
import torch
import torch.distributed as dist
from ranks import device, mesh
from redline.base.errors import ScheduleError
from redline.models.families import schedule_of
from redline.schedule import (
    build,
    create_schedule,
    full_state_dict,
    load_full_state_dict,
    verify,
)
from redline.schedule.comparison import allowance
from redline.schedule.parallel.partial import PartialEmbedding
from redline.schedule.parallel.sharding import shards_of, whole
from torch import nn
from torch.nn import functional as F


def plan(sch, name, sequence_parallel=False):
    schedule_of(name)(sch, {"tp": 2, "sequence_parallel": sequence_parallel})


def batch(seed=0):
    tokens = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(1 + seed))
    labels = tokens.clone()
    labels[:, ::5] = -100
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    return {
        "input_ids": tokens.to(device()),
        "labels": labels.to(device()),
        "attention_mask": mask.to(device()),
        "use_cache": False,
    }


def check_transformer(make, name, sequence_parallel, checkpoint, axes, seed):
    sch, data = create_schedule(make(name), mesh(**axes)), batch(seed)
    with verify(sch, data, device=device(), seed=seed):
        plan(sch, name, sequence_parallel)
        if checkpoint:
            for block in schedule_of(name).blocks(sch)[::2]:
                block.checkpoint()
        if "dp" in axes:
            sch.shard_data(zero=0)
    cut, optimizer = build(sch, optimizer=numerics.adamw, device=device(), seed=seed)
    alone = create_schedule(make(name))
    plain, reference = build(alone, optimizer=numerics.adamw, device=device(), seed=seed)
    assert list(cut.state_dict()) == list(plain.state_dict())
    before = full_state_dict(cut)
    assert all(torch.equal(before[key], value) for key, value in plain.state_dict().items())

    def passes(model):
        loss = model(**data).loss
        loss.backward()
        return loss

    expected = numeric.trained(plain, reference, lambda: passes(plain))
    found = numeric.trained(cut, optimizer, lambda: passes(cut))
    tokens = data["input_ids"].numel()
    numeric.hold(numerics.compare(expected, found, allowance(plain, tokens), tokens))
    return True


@pytest.mark.parametrize(("name", "sequence_parallel"), [("gpt2", False), ("llama", True)])
def test_transformers_train_as_one_process_does(two, make_transformer, seed, name, sequence_parallel):
    two.run(check_transformer, make_transformer, name, sequence_parallel, True, {"tp": 2}, seed)


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


def check_state(make, seed):
    torch.manual_seed(5 + seed)
    original = make()
    sch = create_schedule(make(), mesh(tp=2))
    cut_mlp(sch)
    built, _ = build(sch)
    load_full_state_dict(built, original.state_dict())
    x = torch.randn(3, 8)
    numeric.same(built(x), original(x), allowance(original, x.numel()))
    again = make()
    again.load_state_dict(full_state_dict(built))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), original.parameters()))


def test_checkpoints_of_either_load_into_the_other(two, mlp, seed):
    two.run(check_state, type(mlp), seed)


# sync


def check_syncs(make, seed):
    axis = mesh(tp=2)
    torch.manual_seed(seed)
    model = make()

    def schedule(fill):
        sch = create_schedule(copy.deepcopy(model), axis)
        with verify(sch, torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))):
            fill(sch)

    def gather_features(sch):
        sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch["fc1"].sync("fwd_post", "all_gather", axis=-1)

    def scatter_features(sch):
        sch["fc2"].shard("weight", axis=1).sync("fwd_pre", "scatter", axis=-1).sync("fwd_post", "all_reduce")

    def functions(sch):
        def add(tensor):
            out = tensor.clone()
            dist.all_reduce(out)
            return out

        sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", add)
        sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")

    def samples(sch):
        # Each rank processes half of the batch; parameters are whole and their gradients are partial.
        sch["fc1"].sync("fwd_pre", "scatter", axis=0).sync("bwd_post", "all_reduce", on="parameters")
        sch["fc2"].sync("fwd_post", "all_gather", axis=0).sync("bwd_post", "all_reduce", on="parameters")

    for each in (gather_features, scatter_features, functions, samples):
        schedule(each)

    wrong = create_schedule(copy.deepcopy(model), axis)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(ScheduleError, match=r"the gradient of .* departs"), verify(wrong, x):
        wrong["fc1"].sync("fwd_pre", "scatter", axis=0)
        wrong["fc2"].sync("fwd_post", "all_gather", axis=0)


def test_every_exchange_has_its_gradient_and_a_forgotten_one_is_found(two, mlp, seed):
    two.run(check_syncs, type(mlp), seed)


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


def check_dropout_in_a_transformer(make, name, seed):
    sch = create_schedule(make(name, dropout=0.3), mesh(tp=2))
    plan(sch, name)
    built, _ = build(sch, seed=seed)
    torch.manual_seed(seed)
    loss = built(**batch(seed)).loss
    loss.backward()
    kept = {}
    for path, module in built.named_modules():
        for own, param in module._parameters.items():
            if param is not None and own not in shards_of(module):
                kept[f"{path}.{own}"] = param.grad
    return loss.item(), kept


def test_with_dropout_whole_parameters_keep_equal_gradients_on_all_ranks(two, make_transformer, seed):
    one, other = two.run(check_dropout_in_a_transformer, make_transformer, "bert", seed)
    assert one[0] == other[0] and one[1].keys() == other[1].keys() and len(one[1]) > 4
    numeric.same(one[1], other[1], allowance(make_transformer("bert"), 4 * 16))


# Recipes and compilation


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


class Bottleneck(nn.Module):
    """Convolutions with batch norms, as in a residual network."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.bn3(self.conv3(F.relu(y)))


def check_bottleneck(seed):
    torch.manual_seed(seed)
    x = torch.randn(4, 4, 6, 6)
    sch = create_schedule(Bottleneck(), mesh(tp=2))
    plain, norm = sch.copy().module, ["weight", "bias", "running_mean", "running_var"]
    with verify(sch, x):
        sch["conv1"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        sch["bn1"].shard(norm, axis=0)
        sch["conv2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch["conv3"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        sch["bn3"].shard(norm, axis=0).sync("fwd_post", "all_gather", axis=1)
    built, _ = build(sch)
    assert [len(each.running_var) for each in (built.bn1, built.bn2, built.bn3)] == [4, 8, 8]
    plain(x), built(x)
    found, expected = full_state_dict(built), plain.state_dict()
    assert found.keys() == expected.keys()
    numeric.same({name: value.float() for name, value in found.items()}, expected, allowance(plain, x.numel()))


def test_convolutions_are_cut_with_their_norms_and_running_statistics(two, seed):
    two.run(check_bottleneck, seed)


class Thrice(nn.Module):
    """One weight in three places."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.first.weight = self.second.weight = self.embed.weight

    def forward(self, tokens):
        return self.second(F.relu(self.first(self.embed(tokens))))


def check_thrice(seed):
    torch.manual_seed(seed)
    sch = create_schedule(Thrice(), mesh(tp=2))
    with pytest.raises(ScheduleError, match="tied"):
        sch["embed"].shard("weight", axis=0)
    with verify(sch, torch.arange(8).reshape(2, 4)):
        sch["embed"].shard("weight", axis=0, tied=True).sync("fwd_post", "all_reduce")
        for name in ("first", "second"):
            sch[name].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    built, _ = build(sch)
    assert built.embed.weight is built.first.weight is built.second.weight and built.embed.weight.shape == (4, 8)


def test_a_weight_in_three_places_is_cut_at_all_of_them(two, seed):
    two.run(check_thrice, seed)
