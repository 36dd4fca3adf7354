"""Sequences cut over ranks: whatever is in a batch, the pieces come to what a whole model computes."""

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from redline.errors import ScheduleError
from redline.pieces import Sharing
from redline.schedule import build, create_schedule
from redline.schedule.parallel import ring, ring_mask, sequences, ulysses
from redline.schedule.parallel.planned import PlannedMesh
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config, GPTNeoConfig, LlamaConfig

LENGTH, IGNORED = 16, -100
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "bos_token_id": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


NEO = GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]], num_heads=4, hidden_size=16)


def llama(attention="eager", heads=4, keys=2, **more):
    config = LlamaConfig(**{**SIZES, **more}, num_attention_heads=heads, num_key_value_heads=keys, use_cache=False)
    return made(AutoModelForCausalLM, config, attention)


def bert(attention="eager"):
    return made(AutoModelForMaskedLM, BertConfig(**SIZES, num_attention_heads=4, **NO_DROPOUT), attention)


def made(auto, config, attention):
    torch.manual_seed(3)
    return auto.from_config(config, attn_implementation=attention, dtype=torch.float64)


def plain():
    tokens = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens, "labels": tokens}


def unevenly_labelled():
    """All but one of the labels are in the second half."""
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
    """One sample of eleven tokens, so that the second half is in part no more than padding."""
    batch = plain()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 11:] = 0
    return {**batch, "labels": batch["labels"].where(mask > 0, IGNORED), "attention_mask": mask}


def hidden_in_one_half():
    """Tokens that no later one may look at, for which the second half has to know the mask of the first."""
    batch = plain()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 2:6] = 0
    return {**batch, "attention_mask": mask}


def packed():
    """Documents apart, one of which lies on both pieces."""
    positions = torch.cat([torch.arange(size) for size in (3, 9, 4)]).expand(2, -1).contiguous()
    return {**plain(), "position_ids": positions}


def departure(make, batch, degrees, fault=None):
    """By how much loss, or gradients relative to the largest in their tensor, depart from those of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = make()
    expected = whole(**batch).loss
    expected.backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with pytest.MonkeyPatch.context() as patch:
        model, _ = build(create_schedule(make(), mesh).cut_sequence(**degrees))
        if fault is not None:
            fault(patch)
        output = model(**batch)
        output.loss.backward()
    assert output.logits.shape[1] == LENGTH // prod(degrees.values())
    found = mean(output.loss.detach())
    worst = float((found - expected.detach()).abs())
    # The bias of keys has a gradient of nothing but rounding.
    least = 1e-3 * max(float(param.grad.abs().max()) for param in whole.parameters())
    for name, param in whole.named_parameters():
        grad = mean(model.get_parameter(name).grad)
        worst = max(worst, float((grad - param.grad).abs().max()) / max(float(param.grad.abs().max()), least))
    return worst


def mean(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


# Softmax of eager attention is in float32.
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
def test_what_looks_both_ways_sees_tokens_and_padding_of_all_pieces(two, axis):
    for batch in (plain, hidden_in_one_half):
        for found in two.run(departure, lambda: bert("sdpa"), batch(), {axis: 2}):
            assert found < ROUNDING


def refusal_of_documents():
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("maskless", AttentionInterface()["sdpa"])
    AttentionMaskInterface.register("maskless", flash_attention_mask)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, _ = build(create_schedule(llama("maskless"), mesh).cut_sequence(sp=2))
    model(**plain())
    with pytest.raises(ScheduleError) as refused:
        model(**packed())
    return str(refused.value)


def test_an_attention_without_masks_of_pairs_refuses_several_documents(two):
    for said in two.run(refusal_of_documents):
        assert "the documents of a sample cannot be kept apart; use sdpa or eager" in said


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


@pytest.mark.parametrize(("heads", "keys"), [(4, 1), (4, 2), (12, 6), (12, 3)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_keys_of_fewer_heads_than_ranks_are_repeated(four, attention, heads, keys):
    for found in four.run(departure, lambda: llama(attention, heads, keys, hidden_size=8 * heads), plain(), {"sp": 4}):
        assert found < ROUNDING


# Faults, planted in both ranks, and seen


def labels_shifted_behind_the_cut(patch):
    def loss(self, logits, labels):
        piece = self._piece(labels, labels.shape[1])
        return right(self, logits, nn.functional.pad(piece, (1, 0)).repeat(1, 2)[:, : labels.shape[1]])

    right = sequences.CutSequence._loss
    patch.setattr(sequences.CutSequence, "_loss", loss)


def a_mean_over_the_labels_of_the_piece(patch):
    def loss(self, logits, labels):
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        piece = self._piece(labels, labels.shape[1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), piece.flatten())

    patch.setattr(sequences.CutSequence, "_loss", loss)


def heads_in_another_order(patch):
    right = ulysses.all_to_all
    # Of keys alone, which are fewer than queries.
    patch.setattr(ulysses, "all_to_all", lambda t, *at: right(t.flip(1) if t.shape[1] == 2 else t, *at))


def a_mask_of_the_first_half_in_the_place_of_all(patch):
    right = sequences._Whole

    def whole(padding, **given):
        return right(padding=padding[:, : LENGTH // 2].repeat(1, 2), **given)

    patch.setattr(sequences, "_Whole", whole)


def positions_of_each_piece_from_zero(patch):
    def count(self, kwargs, tokens):
        kwargs["position_ids"] = torch.arange(tokens.shape[1]).remainder(tokens.shape[1] // 2).unsqueeze(0)

    patch.setattr(sequences.CutSequence, "_positions", count)


def documents_that_nobody_tells_apart(patch):
    def ignore(self, kwargs, tokens):
        kwargs["attention_mask"] = torch.ones_like(tokens)

    patch.setattr(sequences.CutSequence, "_positions", ignore)


def blocks_weighed_alike(patch):
    def merged(one, other):
        output, total = right(one, other)
        seen = (one[1] > -torch.inf).unsqueeze(-1)
        return torch.where(seen, (one[0] + other[0]) / 2, output), total

    right = ring.merged
    patch.setattr(ring, "merged", merged)


def a_piece_ahead_looked_at(patch):
    right = ring_mask._by_place
    patch.setattr(ring_mask, "_by_place", lambda kind, row, column: right(kind, row + (row == 0 < column), column))


def gradients_of_keys_that_stay_away_from_home(patch):
    class Kept(ring.PassedOn):
        def received(self):
            arrived = super().received()
            return self._sent if self._sent.dtype == torch.float64 and self.tag == 1 else arrived

        def __init__(self, tensor, axis, tag=0):
            self.tag = tag
            super().__init__(tensor, axis, tag)

    patch.setattr(ring, "PassedOn", Kept)


def labels_in_a_row_where_tokens_are_not(patch):
    def loss(self, logits, labels):
        before, self.sharing = self.sharing, replace(self.sharing, sp=2, cp=1)
        try:
            return right(self, logits, labels)
        finally:
            self.sharing = before

    right = sequences.CutSequence._loss
    patch.setattr(sequences.CutSequence, "_loss", loss)


def positions_in_a_row_where_tokens_are_not(patch):
    def piece(self, value, length):
        if isinstance(value, torch.Tensor) and value.shape[0] == 1:  # positions are those of every sample
            return replace(self.sharing, sp=2, cp=1).piece(value, 1)
        return right(self, value, length)

    right = sequences.CutSequence._piece
    patch.setattr(sequences.CutSequence, "_piece", piece)


@pytest.mark.parametrize(
    ("axis", "fault", "batch"),
    [
        ("sp", labels_shifted_behind_the_cut, plain),
        ("sp", a_mean_over_the_labels_of_the_piece, unevenly_labelled),
        ("sp", heads_in_another_order, plain),
        ("sp", a_mask_of_the_first_half_in_the_place_of_all, hidden_in_one_half),
        ("sp", positions_of_each_piece_from_zero, plain),
        ("sp", documents_that_nobody_tells_apart, packed),
        ("cp", blocks_weighed_alike, plain),
        ("cp", a_piece_ahead_looked_at, plain),
        ("cp", gradients_of_keys_that_stay_away_from_home, plain),
        ("cp", labels_in_a_row_where_tokens_are_not, plain),
        ("cp", positions_in_a_row_where_tokens_are_not, plain),
        ("cp", a_mask_of_the_first_half_in_the_place_of_all, hidden_in_one_half),
        ("cp", documents_that_nobody_tells_apart, packed),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_planted_fault_is_seen(two, axis, fault, batch):
    for found in two.run(departure, llama, batch(), {axis: 2}, fault):
        assert found > 100 * ROUNDING


# What is refused


def cut(model, sp=1, cp=1, **axes):
    return create_schedule(model, PlannedMesh(**(axes or {"dp": sp * cp}))).cut_sequence(sp=sp, cp=cp)


def gemma2():
    from transformers import Gemma2Config

    config = Gemma2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: cut(llama(), 3), "sp: 3 ranks must divide the 4 attention heads"),
        (lambda: cut(llama(), 2, dp=3), r"the mesh's dp axis must be of groups .* but has 3 ranks and cp \* sp is 1 \* 2"),
        (lambda: cut(llama(), 2, tp=2), r"but there is none and cp \* sp is 1 \* 2"),
        (lambda: cut(llama(), 4, dp=4, tp=2), r"sp: tp \* sp, 2 \* 4, must divide the 4 attention heads"),
        (lambda: cut(llama(), 2).cut_sequence(cp=2), "sequences are cut once, and they already are"),
        (lambda: cut(llama(), 1, 0), "cp must be a whole number of at least 1, but is 0"),
        (lambda: cut(llama()), r"two or more, but has 1 ranks and cp \* sp is 1 \* 1"),
        (lambda: cut(nn.Linear(2, 2), 2), "this is no model of it"),
        (lambda: cut(gemma2(), cp=2), r"cp: gemma2 bounds the scores of its attention \(attn_logit_softcapping is 50.0\)"),
        (
            lambda: cut(AutoModelForCausalLM.from_config(NEO), 2),
            "sp: gpt_neo attends by code of its own, not by the attention functions of transformers",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_the_numbers(refused, said):
    with pytest.raises(ScheduleError, match=said):
        refused()


def test_a_refused_call_leaves_the_model_as_it_was():
    model = llama()
    with pytest.raises(ScheduleError):
        cut(model, 3)
    assert model.config._attn_implementation == "eager" and "forward" not in model.__dict__


def test_tokens_that_the_ranks_do_not_divide_are_refused():
    model = GPT2Config(n_layer=1, n_embd=8, n_head=4, vocab_size=20)
    model = cut(AutoModelForCausalLM.from_config(model), 4).module
    with pytest.raises(ScheduleError, match="sequences cut over ranks: sp must divide the 10 tokens of a sample"):
        model(input_ids=torch.zeros(1, 10, dtype=torch.long))
    model = cut(llama(), cp=2).module
    with pytest.raises(
        ScheduleError, match=r"sequences cut over ranks: 2 \* cp, 4, must divide the 10 tokens of a sample"
    ):
        model(input_ids=torch.zeros(1, 10, dtype=torch.long))


def test_roberta_counts_positions_from_behind_its_padding():
    from transformers import RobertaConfig

    model = AutoModelForMaskedLM.from_config(RobertaConfig(**SIZES, num_attention_heads=4, pad_token_id=1))
    layer = sequences.CutSequence(Sharing(sp=2, rank=1), False, sequences._first_position(model))
    given = {}
    layer._positions(given, torch.zeros(1, 6))
    assert given["position_ids"].tolist() == [[2, 3, 4, 5, 6, 7]]
