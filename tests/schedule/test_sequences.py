"""Sequences sharded over ranks: the pieces' results equal a whole model's for any batch."""

from math import prod

import pytest
import torch
import torch.distributed as dist
from ranks import mesh
from redline.base._torch import FakeTensorMode
from redline.base.errors import ScheduleError
from redline.knobs.meaning import SequenceShards
from redline.schedule import build, create_schedule
from redline.schedule.parallel import ring, ring_mask, sequences, sharing
from redline.schedule.parallel.collectives import PlannedMesh
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
)

LENGTH, IGNORED = 16, -100
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "bos_token_id": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


BERT = BertConfig(**SIZES, num_attention_heads=4, **NO_DROPOUT)
NEO = GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]], num_heads=4, hidden_size=16)


def llama(attention="eager", heads=4, keys=2, **more):
    config = LlamaConfig(**{**SIZES, **more}, num_attention_heads=heads, num_key_value_heads=keys, use_cache=False)
    return made(AutoModelForCausalLM, config, attention)


def bert(attention="eager"):
    return made(AutoModelForMaskedLM, BERT, attention)


def made(auto, config, attention):
    torch.manual_seed(3)
    return auto.from_config(config, attn_implementation=attention, dtype=torch.float64)


def plain():
    tokens = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens, "labels": tokens}


def unevenly_labelled():
    """All labels but one are in the second half."""
    batch = plain()
    labels = batch["labels"].clone()
    labels[:, 1 : LENGTH // 2] = IGNORED
    labels[1, 0] = IGNORED
    return {**batch, "labels": labels}


def labelled_in_one_half():
    batch = plain()
    labels = batch["labels"].clone()
    labels[:, : LENGTH // 2 + 1] = IGNORED
    return {**batch, "labels": labels}


def padded():
    """One sample has eleven tokens, so that part of the second half is padding."""
    batch = plain()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 11:] = 0
    return {**batch, "labels": batch["labels"].where(mask > 0, IGNORED), "attention_mask": mask}


def hidden_in_one_half():
    """Hidden tokens in the first half: the second half needs the first half's mask."""
    batch = plain()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 2:6] = 0
    return {**batch, "attention_mask": mask}


def packed():
    """Separate documents, one of which spans both pieces."""
    positions = torch.cat([torch.arange(size) for size in (3, 9, 4)]).expand(2, -1).contiguous()
    return {**plain(), "position_ids": positions}


def departure(make, batch, degrees, fault=None):
    """Largest departure from one process, of the loss and of gradients relative to the largest in their tensor."""
    whole = make()
    expected = whole(**batch).loss
    expected.backward()
    replicas = mesh(dp=dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        model, _ = build(create_schedule(make(), replicas).cut_sequence(**degrees))
        if fault is not None:
            fault(patch)
        output = model(**batch)
        output.loss.backward()
    assert output.logits.shape[1] == LENGTH // prod(degrees.values())
    found = mean(output.loss.detach())
    worst = float((found - expected.detach()).abs())
    # The gradient of the keys' bias is only rounding error.
    least = 1e-3 * max(float(param.grad.abs().max()) for param in whole.parameters())
    for name, param in whole.named_parameters():
        grad = mean(model.get_parameter(name).grad)
        worst = max(worst, float((grad - param.grad).abs().max()) / max(float(param.grad.abs().max()), least))
    return worst


def mean(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


# Softmax of eager attention runs in float32.
ROUNDING = 1e-5


BATCHES = [plain, unevenly_labelled, labelled_in_one_half, padded, hidden_in_one_half, packed]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_pieces_come_to_the_loss_and_the_gradients_of_whole_samples(two, axis, attention, batch):
    for found in two.run(departure, lambda: llama(attention), batch(), {axis: 2}):
        assert found < ROUNDING


@pytest.mark.parametrize("batch", BATCHES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("degrees", [{"cp": 4}, {"cp": 2, "sp": 2}], ids=str)
def test_rings_of_more_ranks_and_of_ranks_that_exchange_heads_do_so_too(four, degrees, batch):
    for found in four.run(departure, lambda: llama("sdpa"), batch(), degrees):
        assert found < ROUNDING


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_bidirectional_attention_sees_tokens_and_padding_of_all_shards(two, axis):
    for batch in (plain, hidden_in_one_half):
        for found in two.run(departure, lambda: bert("sdpa"), batch(), {axis: 2}):
            assert found < ROUNDING


def refusal_of_documents():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("maskless", AttentionInterface()["sdpa"])
    AttentionMaskInterface.register("maskless", flash_attention_mask)
    replicas = mesh(dp=2)
    model, _ = build(create_schedule(llama("maskless"), replicas).cut_sequence(sp=2))
    model(**plain())
    with pytest.raises(ScheduleError) as refused:
        model(**packed())
    return str(refused.value)


def test_an_attention_without_masks_of_pairs_refuses_several_documents(two):
    for message in two.run(refusal_of_documents):
        assert "the documents of a sample cannot be kept apart; use sdpa or eager" in message


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_a_window_slides_over_the_whole_sequence(two, axis):
    from transformers import MistralConfig

    def make():
        config = MistralConfig(
            **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=5, use_cache=False
        )
        return made(AutoModelForCausalLM, config, "sdpa")

    for found in two.run(departure, make, plain(), {axis: 2}):
        assert found < ROUNDING


# Rings


def dropped(degrees, seed):
    """This rank's logits and its keys' gradient, with attention dropout."""
    replicas = mesh(dp=2)
    model, _ = build(create_schedule(llama(attention_dropout=0.5), replicas).cut_sequence(**degrees))
    model.train()
    torch.manual_seed(seed)
    output = model(**plain())
    output.loss.backward()
    return output.logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad


def test_dropout_in_a_ring_follows_from_the_seed_and_drops(two):
    first, again, other = (two.run(dropped, {"cp": 2}, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for one, two_ in zip(first, again) for a, b in zip(one, two_))
    assert not torch.equal(first[0][0], other[0][0])


def test_gradients_of_a_block_with_dropout_are_those_of_what_it_computed():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 5, 3, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    pairs = torch.ones(5, 5, dtype=torch.bool).tril(-1).view(1, 1, 5, 5)
    how = ring.AttentionOptions(scale=0.4, pairs=pairs, dropout=0.3, seed=7)
    output, log_sum = ring.block_attention(query, key, value, how)
    assert output[:, :, 0].abs().max() == 0 and (log_sum[:, :, 0] == -torch.inf).all()  # it attends to nothing
    kept = next(ring._rows(query.detach(), key.detach(), how)).dropout_mask.flatten(1, 2)
    grad = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    keys, values = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = (query @ keys.mT * 0.4).masked_fill(~pairs, -torch.inf)
    expected = (torch.softmax(scores[:, :, 1:], -1) * kept[:, :, 1:]) @ values
    assert torch.allclose(output[:, :, 1:], expected, atol=1e-14)
    wanted = torch.autograd.grad(expected, (query, key, value), grad[:, :, 1:])
    mine = ring.Queries(*(each.detach() for each in (query, grad, output, log_sum)))
    mine = mine._replace(log_sum=mine.log_sum.masked_fill(mine.log_sum == -torch.inf, torch.inf))
    for found, right in zip(ring.block_gradients(mine, key.detach(), value.detach(), how), wanted):
        assert torch.allclose(found, right, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1 << 26, 40])
def test_a_kernel_and_plain_attention_compute_the_same(causal, rows, monkeypatch):
    monkeypatch.setattr(ring, "MOST_SCORES", rows)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(2, heads, 6, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    )
    found = []
    for kernels in (True, False):
        how = ring.AttentionOptions(scale=0.3, causal=causal, kernels=kernels)
        output, log_sum = ring.block_attention(query, key, value, how)
        mine = ring.Queries(query, grad, output, log_sum)
        found.append([output, log_sum, *ring.block_gradients(mine, key, value, how)])
    for one, other in zip(*found):
        assert torch.allclose(one, other, atol=1e-13)


def test_a_kernel_is_handed_a_contiguous_log_sum(monkeypatch):
    """Half of a rank's queries is strided, but CUDA's kernel ignores strides of log sums."""
    handed = []
    kernel = ring.flash_attention_on_cpu_backward

    def watched(grad, query, key, value, output, log_sum, *rest, **more):
        handed.append((tuple(log_sum.shape), log_sum.is_contiguous()))
        return kernel(grad, query, key, value, output, log_sum, *rest, **more)

    monkeypatch.setattr(ring, "flash_attention_on_cpu_backward", watched)
    query, grad, output = (torch.randn(2, 4, 6, 8) for _ in range(3))
    key, value = (torch.randn(2, 4, 3, 8) for _ in range(2))
    half = ring.Queries(*(each[:, :, 3:] for each in (query, grad, output, torch.zeros(2, 4, 6))))
    assert not half.log_sum.is_contiguous()
    ring.block_gradients(half, key, value, ring.AttentionOptions(scale=0.3))
    assert handed == [((2, 4, 3), True)]


@pytest.mark.parametrize(("capability", "there"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_flash_attention_is_asked_for_where_the_device_has_it(monkeypatch, capability, there):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        query = torch.empty(2, 4, 6, 8, dtype=torch.float16, device="cuda")
    assert ring._has_kernel(query, query, ring.AttentionOptions(scale=0.3)) == there


def kinds(text):
    names = {"n": "none", "f": "full", "c": "causal", "m": "masked"}
    return [[ring_mask.Kind(names[each]) for each in row] for row in text.split()]


@pytest.mark.parametrize(
    ("table", "blocks"),
    [
        ("cn fc", ["0:8 0:8 causal"]),
        ("fn fn", ["0:8 0:4 full"]),
        ("nn ff", ["4:8 0:8 full"]),
        ("ff ff", ["0:8 0:8 full"]),
        ("nn nn", []),
        ("mn fm", ["0:4 0:4 masked", "4:8 0:8 masked"]),
    ],
)
def test_pairs_of_stretches_are_computed_in_as_few_blocks_as_can_be(table, blocks):
    found = ring_mask.blocks_of(kinds(table), 4)
    written = [f"{b.queries.start}:{b.queries.stop} {b.keys.start}:{b.keys.stop} {b.kind.value}" for b in found]
    assert written == blocks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_a_ring_look_at_as_many_pairs_each_where_tokens_look_back(ranks):
    length, pairs = 64, []
    for rank in range(ranks):
        mask = ring_mask.RingMask(
            None, ring_mask.Kind.CAUSAL, batch=1, length=length, ranks=ranks, rank=rank, device=torch.device("cpu")
        )
        found = 0
        for source in range(ranks):
            for block in mask.blocks(source):
                queries, keys = (each.stop - each.start for each in (block.queries, block.keys))
                found += queries * (queries + 1) // 2 if block.kind is ring_mask.Kind.CAUSAL else queries * keys
        pairs.append(found)
    assert sum(pairs) == length * (length + 1) // 2
    assert len(set(pairs)) == 1


def test_blocks_outside_the_window_are_not_computed():
    def near(sample, head, query, key):
        return (key <= query) & (key > query - 4)

    mask = ring_mask.RingMask(
        near, ring_mask.Kind.MASKED, batch=1, length=64, ranks=4, rank=0, device=torch.device("cpu")
    )
    assert [len(mask.blocks(source)) for source in range(4)] == [2, 1, 0, 0]


# Blocks whose ranks share samples, in a model whose ranks share sequences


def departure_of_blocks(make, batch, everywhere):
    """Largest departure from one process, as above, of a model whose blocks are sharded over one of two `tp` ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = make()
    expected = whole(**batch).loss
    expected.backward()
    sch = create_schedule(make(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))).cut_sequence(
        **everywhere
    )
    sch["model.layers.0"].share_samples(leaves=False)
    sch["model.layers.1"].share_samples(enters=False)
    model, _ = build(sch.shard_data())
    output = model(**batch)
    output.loss.backward()
    found = mean(output.loss.detach())
    worst = float((found - expected.detach()).abs())
    for name, param in whole.named_parameters():
        grad = model.get_parameter(name).grad
        worst = max(worst, float((grad - param.grad).abs().max()) / float(param.grad.abs().max()))
    return worst


@pytest.mark.parametrize("batch", [padded, packed], ids=lambda each: each.__name__)
@pytest.mark.parametrize("everywhere", [{"sp": 2}, {"cp": 2}], ids=str)
def test_blocks_that_share_samples_compute_the_same_where_all_ranks_share_sequences(four, everywhere, batch):
    for found in four.run(departure_of_blocks, lambda: llama("sdpa"), batch(), everywhere):
        assert found < ROUNDING


# Refusals


def test_sequences_of_the_model_are_cut_before_samples_of_blocks_are_shared():
    sch = create_schedule(llama(), PlannedMesh(dp=2, tp=2))
    sch["model.layers.0"].share_samples()
    with pytest.raises(ScheduleError, match="it must come before share_samples"):
        sch.cut_sequence(sp=2)


def test_samples_that_ranks_cannot_share_are_refused_with_their_number():
    module = nn.Linear(4, 4)
    layer = sharing.SharedSamples(sharing.sharing_axes(PlannedMesh(tp=2), 1), True, True, False)
    with pytest.raises(ScheduleError, match="2 ranks share the samples of a block, .* a micro-batch, which has 5"):
        layer(module, module.forward, (torch.zeros(5, 4),), {})


def cut(model, sp=1, cp=1, **axes):
    return create_schedule(model, PlannedMesh(**(axes or {"dp": sp * cp}))).cut_sequence(sp=sp, cp=cp)


def named(family, **more):
    config = AutoConfig.for_model(family, **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **more)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def rotary(kind, **more):
    return llama(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more})


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
MIXED = {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: cut(llama(), 3), "sp: 3 ranks must divide the 4 attention heads"),
        (lambda: cut(llama(), 2, dp=3), r"the mesh's dp axis must be of groups .* but has 3 ranks and cp \* sp is 1 \* 2"),
        (lambda: cut(llama(), 2, tp=2), r"but there is none and cp \* sp is 1 \* 2"),
        (lambda: cut(llama(), 4, dp=4, tp=2), r"sp: tp \* sp, 2 \* 4, must divide the 4 attention heads"),
        (lambda: cut(llama(), 2).cut_sequence(cp=2), "sequences are cut already"),
        (lambda: cut(llama(), 1, 0), "cp must be a whole number of at least 1, but is 0"),
        (lambda: cut(llama()), r"two or more, but has 1 ranks and cp \* sp is 1 \* 1"),
        (lambda: cut(nn.Linear(2, 2), 2), "which this model does not use"),
        (lambda: cut(named("gemma2"), cp=2), r"cp: gemma2 bounds the scores of its attention \(attn_logit_softcapping is 50.0\)"),
        (
            lambda: cut(AutoModelForCausalLM.from_config(NEO), 2),
            "sp: gpt_neo has attention code of its own instead of the attention functions of transformers",
        ),
        (lambda: cut(rotary("dynamic"), 2), r"rotary frequencies that depend on a sample's last position .*dynamic"),
        (lambda: cut(rotary("longrope", **LONG), cp=2), r"cp: llama has rotary .* \(rope_type longrope\)"),
        (lambda: cut(named("gemma3_text", rope_parameters=MIXED), 2), r"sp: gemma3_text has rotary .* \(rope_type dynamic"),
        (lambda: cut(named("llama4_text"), cp=2), r"scales its queries by the index .* \(attn_temperature_tuning\)"),
        (lambda: cut(BertForQuestionAnswering(BERT), 2), "sp: the loss of BertForQuestionAnswering is not a mean over tokens"),
        (lambda: cut(BertForPreTraining(BERT), cp=2), "cp: the loss of BertForPreTraining is not a mean over tokens"),
    ],
)  # fmt: skip
def test_indivisible_sequences_are_refused_with_the_numbers(refused, message):
    with pytest.raises(ScheduleError, match=message):
        refused()


def test_tokens_that_the_ranks_do_not_divide_are_refused():
    model = GPT2Config(n_layer=1, n_embd=8, n_head=4, vocab_size=20)
    model = cut(AutoModelForCausalLM.from_config(model), 4).module
    with pytest.raises(
        ScheduleError, match=r"sequences cut over ranks: sp \* cp must divide the 10 tokens of a sample"
    ):
        model(input_ids=torch.zeros(1, 10, dtype=torch.long))
    model = cut(llama(), cp=2).module
    with pytest.raises(ScheduleError, match=r"sequences cut over ranks: 2 \* cp must divide the 10 tokens of a sample"):
        model(input_ids=torch.zeros(1, 10, dtype=torch.long))


def test_roberta_counts_positions_from_behind_its_padding():
    from transformers import RobertaConfig

    model = AutoModelForMaskedLM.from_config(RobertaConfig(**SIZES, num_attention_heads=4, pad_token_id=1))
    layer = sequences.CutSequence(SequenceShards(sp=2, rank=1), False, sequences._first_position(model))
    given = {}
    layer._positions(given, torch.zeros(1, 6))
    assert given["position_ids"].tolist() == [[2, 3, 4, 5, 6, 7]]
