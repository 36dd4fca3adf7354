"""Counterparts of Slapo's multi-rank tests: sharding, exchanges, weights, stages; one section per file of Slapo's.

SLAPO.md lists all of Slapo's tests; the other counterparts are among the other tests of this folder.
"""

import copy

import numeric
import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, full_state_dict, verify
from redline.schedule.comparison import allowance
from redline.schedule.parallel.sharding import shards_of
from torch import nn
from torch.nn import functional as F


class Pair(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8, bias=bias)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def columns_then_rows(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


# test_annotate.py


def check_annotated():
    with torch.device("meta"):
        sch = create_schedule(Pair(), mesh(tp=2))
    columns_then_rows(sch)
    sch["fc1"].annotate("weight", "kind", "wide")
    model, _ = build(sch)
    assert model.fc1.weight.kind == "wide" and not hasattr(model.fc2.weight, "kind")
    return [
        (name, tuple(shards_of(each)["weight"].shape), tuple(each.weight.shape))
        for name, each in model.named_children()
    ]


def test_a_shard_keeps_annotations_and_knows_the_whole_shape(two):
    assert two.run(check_annotated) == [[("fc1", (16, 8), (8, 8)), ("fc2", (8, 16), (8, 8))]] * 2


# test_consolidation.py


def check_pieces():
    torch.manual_seed(3)
    model = Pair()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    sch = create_schedule(model, mesh(tp=2))
    columns_then_rows(sch)
    built, _ = build(sch)
    rank = dist.get_rank()
    for name, dim in (("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)):
        assert torch.equal(built.state_dict()[name], whole[name].chunk(2, dim)[rank])
    assert torch.equal(built.fc2.bias, whole["fc2.bias"])


def test_each_rank_keeps_its_shard_of_real_weights(two):
    two.run(check_pieces)


def ones(module):
    for each in module.parameters(recurse=False):
        nn.init.ones_(each)
    return True


def check_rule(cut):
    with torch.device("meta"):
        model = Pair()
    assert all(each.is_meta for each in model.parameters())
    sch = create_schedule(model, mesh(tp=2) if cut else None)
    if cut:
        columns_then_rows(sch)
    built, _ = build(sch, init=ones)
    assert all(torch.equal(each, torch.ones_like(each)) for each in built.parameters())
    return sum(each.numel() for each in built.parameters())


def test_a_rule_of_ones_own_gives_weights_on_one_rank_and_on_several(two):
    assert check_rule(cut=False) == 8 * 16 * 2 + 16 + 8
    assert two.run(check_rule, True) == [8 * 16 + 8 + 8] * 2


# test_shard.py


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


def check_scattered(seed):
    torch.manual_seed(seed)
    sch = create_schedule(nn.Sequential(Pair(), nn.ReLU()), mesh(tp=2))
    with verify(sch, torch.randn(3, 6, 8)):
        columns = sch["0"]
        columns["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        columns["fc2"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
        sch.sync("fwd_post", "all_gather", axis=1)
    with pytest.raises(ScheduleError, match="nothing adds them up"):
        unsummed = create_schedule(Pair(), mesh(tp=2))
        unsummed["fc2"].shard("weight", axis=1)
        build(unsummed)


def test_sums_are_scattered_along_the_sequence_and_gathered_at_the_end_of_the_model(two, seed):
    two.run(check_scattered, seed)


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


# test_reshard.py


def rows_of(sch, *names):
    """Sums these modules' gradients over ranks, as each rank has a part of the batch."""
    for name in names:
        sch[name].sync("bwd_post", "all_reduce", on="parameters")


def features_to_rows(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc1"].sync("fwd_post", "all_to_all", axis=0, join=-1)
    rows_of(sch, "fc2")
    sch["fc2"].sync("fwd_post", "all_gather", axis=0)


def features_to_rows_and_back(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["fc1"].sync("fwd_post", "all_to_all", axis=0, join=-1).sync("fwd_post", "all_to_all", axis=-1, join=0)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def gathered_behind_each(sch):
    for name in ("fc1", "fc2"):
        sch[name].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch[name].sync("fwd_post", "all_gather", axis=-1)


def whole_to_features(sch):
    sch["fc1"].sync("fwd_post", "scatter", axis=-1)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def whole_to_rows(sch):
    sch["fc1"].sync("fwd_post", "scatter", axis=0)
    rows_of(sch, "fc2")
    sch["fc2"].sync("fwd_post", "all_gather", axis=0)


def rows_throughout(sch):
    sch["fc1"].sync("fwd_pre", "scatter", axis=0)
    rows_of(sch, "fc1", "fc2")
    sch["fc2"].sync("fwd_post", "all_gather", axis=0)


SCHEMES = (
    lambda sch: None, features_to_rows, features_to_rows_and_back, columns_then_rows, gathered_behind_each,
    whole_to_features, whole_to_rows, rows_throughout,
)  # fmt: skip


def check_schemes(seed):
    for scheme in SCHEMES:
        torch.manual_seed(seed)
        sch = create_schedule(Pair(), mesh(tp=2))
        with verify(sch, torch.randn(4, 6, 8)):
            scheme(sch)
    # Gradients of modules that see a part of the batch are partial, and nothing sums them here.
    torch.manual_seed(seed)
    wrong = create_schedule(Pair(), mesh(tp=2))
    with pytest.raises(ScheduleError, match="gradient of fc"), verify(wrong, torch.randn(4, 6, 8)):
        wrong["fc1"].sync("fwd_pre", "scatter", axis=0)
        wrong["fc2"].sync("fwd_post", "all_gather", axis=0)


def test_two_layers_are_computed_in_eight_ways_of_cutting_what_is_between_them(two, seed):
    two.run(check_schemes, seed)


# autoshard/test_bert.py and test_gpt.py


def gathering(block, regions):
    """Cuts weights along their outputs; each layer's input is whole."""
    for name in ("query", "key", "value"):
        block[f"attention.self.{name}"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    block["attention.output.dense"].sync("fwd_pre", "all_gather", axis=-1)
    for name in ("attention.output.dense", "intermediate.dense", "output.dense"):
        dense = block[name].shard(["weight", "bias"], axis=0).sync("fwd_post", "all_gather", axis=-1)
        if name != "attention.output.dense":  # the gradient of its gathered input is reduce-scattered
            dense.sync("bwd_post", "all_reduce")


def scattering(block, regions):
    """Ranks hold pieces of the sequence between the cut layers."""
    for name in ("query", "key", "value"):
        block[f"attention.self.{name}"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    block["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    for name in ("attention.output", "output"):
        dense = block[f"{name}.dense"].shard("weight", axis=1)
        dense.sync("fwd_post", "reduce_scatter", axis=1).sync("fwd_post", "all_gather", axis=1)


def check_block(make, seed):
    tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(seed))
    for scheme in (gathering, scattering):
        torch.manual_seed(seed)
        sch = create_schedule(make("bert", device="cpu"), mesh(tp=2))
        with verify(sch, {"input_ids": tokens, "labels": tokens}):
            for block in sch.select("bert.encoder.layer.*"):
                scheme(block, None)
        assert sch["bert.encoder.layer.0.attention.self"].module.num_attention_heads == 2


def test_a_whole_bert_is_cut_by_schemes_of_ones_own(two, make_transformer, seed):
    two.run(check_block, make_transformer, seed)


# test_pipeline_partition.py


def neo():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}
    kinds = {"attention_types": [[["global", "local"], 2]], "window_size": 8, "bos_token_id": 1, "eos_token_id": 2}
    return GPTNeoForCausalLM(
        GPTNeoConfig(**sizes, **kinds, resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0)
    )


def check_neo(cuts, seed):
    tokens = torch.randint(3, 96, (8, 16), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens, "use_cache": False}
    torch.manual_seed(seed)
    sch = create_schedule(neo(), mesh(pp=len(cuts) + 1))
    with verify(sch, batch):
        for index in cuts:
            sch[f"transformer.h.{index}"].cut_pipeline_stage()
    model, _ = build(sch)
    model.pipeline.step(**batch)
    size = 8 // model.pipeline.micro_batches
    # Each stage computes masks, positions and shapes from the batch: only the blocks' outputs cross.
    leaves = [[shape for shape, _, tensor in form.leaves if tensor] for form in model.pipeline.board.forms]
    assert leaves == [[(size, 16, 32), (size, 4, 16, 16)]] * len(cuts)
    return sorted({name.split(".h.")[1][0] for name in model.state_dict() if ".h." in name})


def test_stages_of_gpt_neo_exchange_what_its_blocks_return(two, seed):
    assert two.run(check_neo, [1], seed) == [["0", "1"], ["2", "3"]]


def test_four_stages_of_gpt_neo_have_a_block_each(four, seed):
    assert four.run(check_neo, [0, 1, 2], seed) == [["0"], ["1"], ["2"], ["3"]]


class Looking(nn.Module):
    """Branches on its input, so it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if x.sum() > -1e9 else x


class Chain(nn.Module):
    def __init__(self, kind):
        super().__init__()
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.pre = Looking()
        self.layers = kind(layers) if kind is nn.ModuleList else kind(*layers)
        self.post = nn.Linear(8, 8)

    def forward(self, x):
        x = self.pre(x)
        for layer in self.layers:
            x = layer(x)
        return self.post(x)


def check_chain(kind, seed):
    torch.manual_seed(seed)
    sch = create_schedule(Chain(kind), mesh(pp=2))
    with verify(sch, torch.randn(4, 8), loss=lambda out: out.pow(2).mean()):
        sch["layers.0"].cut_pipeline_stage()
    model, _ = build(sch, loss=lambda out, target: F.mse_loss(out, target))
    return list(model.state_dict())[::2]


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
def test_untraceable_modules_are_cut_into_stages(two, seed, kind):
    assert two.run(check_chain, kind, seed) == [
        ["pre.linear.weight", "layers.0.weight"],
        ["layers.1.weight", "post.weight"],
    ]


# test_checkpoint.py


def check_recomputed(seed):
    torch.manual_seed(seed)
    sch = create_schedule(nn.Sequential(Pair(), Pair()), mesh(tp=2))
    plain = copy.deepcopy(sch.module)
    with verify(sch, torch.randn(4, 8)):
        for each in sch:
            columns_then_rows(each)
        sch["0"].checkpoint()
    built, _ = build(sch)
    calls = []
    built[0].fc1.register_forward_hook(lambda *_: calls.append("0"))
    built[1].fc1.register_forward_hook(lambda *_: calls.append("1"))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    for each in (built, plain):
        each(x).sum().backward()
    numeric.same(numeric.gradients(built), numeric.gradients(plain), allowance(plain, x.numel()))
    return calls


def test_a_cut_module_is_recomputed_with_its_exchanges(two, seed):
    assert two.run(check_recomputed, seed) == [["0", "1", "0"]] * 2
