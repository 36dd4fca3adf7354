"""Sequence and context parallelism: each rank's piece of a sample, and its part of the loss.

A transformer computes on each token separately, except for positions, masks and the loss, which are those of the whole
sequence, and for attention. In attention ranks exchange tokens for heads (`ulysses.py`), or keys and values circulate
among them (`ring.py`), or both, with a ring for the ranks of the same heads.

Notation, here and in those two modules:

| symbol | meaning |
|---|---|
| S, P | ranks that exchange heads (`sp`); ranks of a ring (`cp`) |
| B, T | samples of a micro-batch; tokens of a sample, of which a rank has T / (P S) |
| H, K | heads of queries, and of keys and values, on a tensor-parallel rank |
| D | features of a head |
"""

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...base._transformers import attends_by_name, change_attention
from ...base.errors import ScheduleError
from ...knobs.rules import sequence_refusal
from ...knobs.sequence import SequenceShards
from ..forward import Inner, Layer, add_layer, layers_of, named_arguments
from . import ring, ring_mask, ulysses
from .collectives import Axis, all_gather

IGNORED = -100
"""The label of tokens that the loss ignores."""
ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types of transformers' configurations that mix tokens only by attention."""

LOSSES_OF_TOKENS = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
"""Names of losses in transformers that are means over labelled tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    """Inputs of the current forward pass that concern whole samples."""

    documents: torch.Tensor | None
    """The index of each token's document, (B, T); None for one document per sample."""
    padding: torch.Tensor | None
    """The attention mask, 0 for padding tokens, (B, T); None without padding."""
    known: bool
    """True if the model got a mask, so that it does not make one itself."""


_whole: ContextVar[_Whole] = ContextVar("whole")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceAxes:
    """The ranks that share sequences in an attention module; None for none."""

    sp: Axis | None
    """Those with which this one exchanges heads."""
    cp: Axis | None
    """Those of its ring."""
    documents: bool = False
    """True if samples may have several documents that attention knows by positions alone: in a run of blocks, outside of
    which ranks have whole samples."""


def cut_sequence(model: Any, sharing: SequenceShards, sp: Axis | None, cp: Axis | None, tp: int) -> None:
    """Makes a transformers model, sharded over `tp` ranks, compute on this rank's piece of every sequence.

    Args:
        sharing: the assignment of pieces to ranks.
        sp, cp: the ranks with which this one exchanges heads, and those of its ring; None for none.
    """
    axes = tuple(each for each in (sp, cp) if each is not None)
    add_layer(model, CutSequence(sharing, _shifts(model), _first_position(model), axes))
    attend_together(model, model, SequenceAxes(sp=sp, cp=cp), tp)


def attend_together(model: Any, within: nn.Module, axes: SequenceAxes, tp: int) -> None:
    """Makes attention in a module of a transformers model exchange heads, or keys and values, among ranks.

    Args:
        within: the module, sharded over `tp` ranks; the axes replace those that it had.
    """
    for module in within.modules():
        module.__dict__["_sequence_axes"] = axes
        if hasattr(module, "num_key_value_groups"):
            # This is the number of query heads per key head; it is smaller where keys are repeated.
            groups = module.__dict__.setdefault("_key_value_groups", module.num_key_value_groups)
            heads = module.config.num_attention_heads // tp
            ranks = 1 if axes.sp is None else axes.sp.size
            module.num_key_value_groups = groups // ulysses.repeats(heads // groups, ranks)
    change_attention(model, partial(_registered, model=model))


def shards_of_model(model: nn.Module) -> SequenceShards | None:
    """Returns how ranks share all sequences of a model; None if they do not."""
    return next((each.sharing for each in layers_of(model, CutSequence)), None)


def heads_of(model: nn.Module) -> int | None:
    """Returns the number of attention heads of a transformers model's blocks; None if it is not one number."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    found = getattr(config.get_text_config(), "num_attention_heads", None)
    return found if isinstance(found, int) else None


def obstacle(model: nn.Module, sp: int, cp: int, tp: int = 1, blocks: bool = False) -> str:
    """Returns why sequences of a model cannot be cut over `sp * cp` ranks; empty if they can.

    Args:
        tp: ranks that each layer of the model is sharded over.
        blocks: they are cut in blocks alone, so that positions and the loss are those of whole samples.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return "ranks meet in the attention functions of transformers, and this is no model of it"
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return "samples are not made of tokens, so that there is no sequence to cut"
    if not attends_by_name(model):
        return f"{config.model_type} attends by code of its own, not by the attention functions of transformers"
    if reason := _mixes_tokens(model, config) or (ring.obstacle(model) if cp > 1 else ""):
        return f"{config.model_type} {reason}"
    if not blocks and (reason := _needs_whole_samples(model, config)):
        return reason
    heads = heads_of(model)
    if sp > 1 and (heads is None or heads % (sp * tp)):
        given = f"tp * sp, {tp} * {sp}," if tp > 1 else f"{sp} ranks"
        return f"{given} must divide the {heads} attention heads"
    return ""


def _mixes_tokens(model: nn.Module, config: Any) -> str:
    """Returns what in a model, besides attention, mixes tokens or depends on a head's index; empty if nothing does."""
    if config.is_encoder_decoder:
        return "has an encoder beside its decoder"
    if getattr(config, "output_router_logits", False):
        return "balances its experts by a loss over all tokens (output_router_logits)"
    if type(model).__name__.startswith("Llama4") and config.get_text_config().attn_temperature_tuning:
        return "scales its queries by the place of a token among those of its rank (attn_temperature_tuning)"
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - ATTENTIONS
    if kinds:
        return f"has layers of {', '.join(sorted(kinds))}, which look at other tokens as well"
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return f"has a convolution ('{path}'), which looks at other tokens as well"
        if hasattr(module, "num_key_value_groups") and any(True for _ in module.parameters(recurse=False)):
            return f"has weights of each head in its attention ('{path}')"
    return ""


def _needs_whole_samples(model: Any, config: Any) -> str:
    """Returns what outside the blocks of a model depends on more tokens than those of a piece; empty if nothing does."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    types = {str(each.get("rope_type")) for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    if varying := sorted(each for each in types if "dynamic" in each or each == "longrope"):
        return f"{config.model_type} has rotary frequencies that depend on a sample's last position (rope_type {varying[0]})"
    parameters = inspect.signature(model.forward).parameters
    others = [name for name in parameters if name.endswith(("_label", "_labels", "start_positions"))]
    kind = getattr(model, "loss_type", None)
    of_tokens = kind in LOSSES_OF_TOKENS if kind is not None else model.get_output_embeddings() is not None
    if others or ("labels" in parameters and not of_tokens):
        return f"the loss of {type(model).__name__} is not a mean over tokens"
    return ""


def _shifts(model: Any) -> bool:
    """Returns True if the model's loss in transformers shifts labels: a token predicts the next one's label."""
    return getattr(model, "loss_type", None) in (None, "ForCausalLM")


def _first_position(model: nn.Module) -> int | None:
    """Returns the model's first position index; None if its forward takes no positions.

    RoBERTa's positions start after its padding index."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and "position" in path.rpartition(".")[2]
            and module.padding_idx is not None
        ):
            return module.padding_idx + 1
    return 0


_OVER = " over ranks of "
"""Follows the original name in the name of a registered attention function."""


def _registered(name: str, model: nn.Module) -> str:
    """Registers an attention function and its mask function with communication in transformers; returns their new name.

    They are registered again when further modules of a model share sequences."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name, place, shards = name.partition(_OVER)[0], type(model).__module__, shards_of_model(model)
    rings = sorted({axes_of(each).cp for each in model.modules()}, key=lambda axis: axis.group_name if axis else "")
    ranks = 1 if shards is None else shards.ranks
    made = f"{name}{_OVER}{place}, {ranks}, {', '.join(axis.group_name if axis else '' for axis in rings)}"
    # A family's own is in its module.
    attention = sys.modules[place].eager_attention_forward if name == "eager" else AttentionInterface()[name]
    around = torch.compiler.disable(ring.attend)  # the ring's communication is kept out of compiled graphs
    AttentionInterface.register(made, partial(attend, attention=attention, around=around, name=name))
    make = AttentionMaskInterface().get(name)
    if rings != [None]:
        make = partial(ring_mask.make_masks, rings=rings, plain=make)
    if make is not None:
        whole = make if shards is None else partial(whole_mask, make=make, ranks=ranks)
        AttentionMaskInterface.register(made, whole)
    return made


def axes_of(module: nn.Module) -> SequenceAxes:
    """Returns the ranks that share sequences in an attention module."""
    return getattr(module, "_sequence_axes", None) or SequenceAxes(sp=None, cp=None)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    attention: Callable[..., Any],
    around: Callable[..., Any],
    name: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Computes attention of this rank's tokens to whole sequences, with the ranks that share them in this module.

    Args:
        query, key, value: (B, heads, tokens of this rank, D).
        attention_mask: a mask of whole sequences, or several (`ring_mask.Masks`).
        attention: an attention function of transformers.
        around: `ring.attend`.
        name: transformers' name of `attention`.

    Returns:
        The output, (B, tokens of this rank, heads, D), and attention weights or None.
    """
    axes = axes_of(module)
    attention_mask = ring_mask.mask_of(attention_mask, axes.cp)
    if axes.cp is not None:
        attention = partial(around, axis=axes.cp, kernels=name != "eager")
    if axes.sp is None:
        return attention(module, query, key, value, attention_mask, **kwargs)
    if axes.documents and name.startswith("flash") and kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = all_gather(kwargs["position_ids"], -1, axes.sp)
    return ulysses.attend(module, query, key, value, attention_mask, attention=attention, axis=axes.sp, **kwargs)


def whole_mask(
    *,
    make: Callable[..., Any],
    ranks: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """Returns the mask of whole sequences, when transformers requests that of this rank's piece.

    Args:
        make: one of transformers' mask functions, or `ring.make_mask`.
        ranks: the number of ranks that share a sequence.
        q_length, kv_length: tokens of the piece.
        mask_function: returns True if a token may attend to another, from their positions in the sequence.
        attention_mask: 0 for the piece's padding tokens.

    Raises:
        ScheduleError: samples have several documents, and this attention does not support a mask that separates them; or
            the model derived padding itself.
    """
    whole = _whole.get()
    if attention_mask is not None and not whole.known and not attention_mask.all():
        raise ScheduleError(
            "sequences cut over ranks: the model has found padding by itself, which is known of this rank's piece alone; "
            "give it an attention_mask"
        )
    if whole.documents is not None:
        from transformers.masking_utils import and_masks, packed_sequence_mask_function

        mask_function = and_masks(packed_sequence_mask_function(whole.documents), mask_function)
    mask = make(
        q_length=q_length * ranks,
        kv_length=kv_length * ranks,
        mask_function=mask_function,
        attention_mask=None if whole.padding is None else whole.padding.bool(),
        allow_is_causal_skip=allow_is_causal_skip and whole.documents is None,
        **kwargs,
    )
    if whole.documents is not None and (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() < 4)):
        # transformers' flash attention derives documents from positions, and would derive them from this piece alone.
        raise ScheduleError(
            "sequences cut over ranks: this attention takes no mask of pairs, so that the documents of a sample cannot be "
            "kept apart; use sdpa or eager, or samples of one document"
        )
    return mask


class CutSequence(Layer):
    """Wraps a whole model, which gets whole samples, computes on a piece of each, and returns the piece's logits and loss.

    The mean of the pieces' losses over the ranks is the loss of the samples."""

    order = 60
    divisible = True

    def __init__(
        self, sharing: SequenceShards, shifts: bool, first_position: int | None, axes: tuple[Axis, ...] = ()
    ) -> None:
        self.sharing, self.shifts, self.first_position = sharing, shifts, first_position
        self.axes = axes
        """The axes of the ranks that get the same samples as this one."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = named_arguments(module, args, kwargs)
        tokens = kwargs["inputs_embeds" if kwargs.get("input_ids") is None else "input_ids"]
        length = tokens.shape[1]
        if reason := sequence_refusal(length, self.sharing.sp, self.sharing.cp):
            raise ScheduleError(f"sequences cut over ranks: {reason}")
        labels, documents = kwargs.pop("labels", None), self._positions(kwargs, tokens)
        padding = kwargs.get("attention_mask")
        if padding is None and (documents is not None or self.sharing.cp > 1):
            # Without a mask transformers derives documents from positions, and would derive them from this piece alone.
            kwargs["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        pieces = {name: self._piece(each, length) for name, each in kwargs.items()}
        own = padding is None and kwargs.get("attention_mask") is not None
        before = _whole.set(_Whole(documents=documents, padding=padding, known=padding is not None or own))
        try:
            output = inner(**pieces)
        finally:
            _whole.reset(before)
        if labels is not None:
            output.loss = self._loss(output.logits, labels)
        return output

    def _piece(self, value: Any, length: int) -> Any:
        """Returns this rank's piece of a tensor with an entry for every token; any other value unchanged."""
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        return self.sharing.piece(value, 1)

    def _positions(self, kwargs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor | None:
        """Adds default positions to `kwargs` if there are none; returns the document indices that given positions imply."""
        if self.first_position is None:
            return None
        positions = kwargs.get("position_ids")
        if positions is None:
            ahead = torch.arange(tokens.shape[1], device=tokens.device) + self.first_position
            kwargs["position_ids"] = ahead.unsqueeze(0)
            return None
        from transformers.masking_utils import find_packed_sequence_indices

        if kwargs.get("attention_mask") is not None:
            return None
        return find_packed_sequence_indices(positions.expand(tokens.shape[:2]))

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the mean loss over all labels that are not ignored, times the number of ranks."""
        if self.shifts:  # before the cut: the last token of a piece predicts the first of the next
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        count = (labels != IGNORED).sum()
        piece = self._piece(labels, labels.shape[1])
        losses = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), piece.reshape(-1), reduction="sum")
        return losses * (self.sharing.ranks / count)
