"""Sequence and context parallelism: each rank's sequence shard of a sample, and its contribution to the loss.

A transformer computes on each token separately, except for positions, masks and the loss, which depend on the full
sequence, and for attention. In attention ranks exchange tokens for heads by two all-to-alls, or keys and values circulate
among them (`ring.py`), or both, with a ring for the ranks of the same heads.

Notation, here and in `ring.py`:

| symbol | meaning |
|---|---|
| S, P | ranks that exchange heads (`sp`); ranks of a ring (`cp`) |
| B, T | samples of a micro-batch; tokens of a sample; a rank has T / (P S) of them |
| H, K | heads of queries, and of keys and values, on a tensor-parallel rank |
| D | features of a head |

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509), on the exchange of heads.
"""

import inspect
import math
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
from ...knobs.meaning import SequenceShards
from ...knobs.rules import sequence_refusal
from ..collectives import all_to_all
from ..forward import Inner, Layer, add_layer, layers_of, named_arguments
from . import ring, ring_mask
from .collectives import Axis

IGNORED = -100
"""The label of tokens that the loss ignores."""
ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types of transformers' configurations that mix tokens only by attention."""

LOSSES_OF_TOKENS = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
"""Names of losses in transformers that are means over labelled tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _FullSamples:
    """Properties of the full samples of the current forward pass, which attention masks depend on."""

    documents: torch.Tensor | None
    """The index of each token's document, (B, T); None for one document per sample."""
    padding: torch.Tensor | None
    """The attention mask, 0 for padding tokens, (B, T); None without padding."""
    has_mask: bool
    """True if the model got a mask, so that it does not derive one."""


_full_samples: ContextVar[_FullSamples] = ContextVar("full_samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceAxes:
    """The ranks that share sequences in an attention module; None for none."""

    sp: Axis | None
    """The ranks that exchange heads."""
    cp: Axis | None
    """The ranks of a ring."""


def cut_sequence(model: Any, sharing: SequenceShards, sp: Axis | None, cp: Axis | None, tp: int) -> None:
    """Makes a transformers model, sharded over `tp` ranks, compute on this rank's shard of every sequence.

    Args:
        sharing: the assignment of sequence shards to ranks.
        sp, cp: the ranks that exchange heads, and the ranks of a ring; None for none.
    """
    axes = tuple(axis for axis in (sp, cp) if axis is not None)
    # A loss of transformers that shifts labels: a token predicts the next one's label.
    shifts = getattr(model, "loss_type", None) in (None, "ForCausalLM")
    add_layer(model, CutSequence(sharing, shifts, _first_position(model), axes))
    attend_together(model, model, SequenceAxes(sp=sp, cp=cp), tp)


def attend_together(model: Any, within: nn.Module, axes: SequenceAxes, tp: int) -> None:
    """Makes attention in a module of a transformers model exchange heads, or keys and values, among ranks.

    Args:
        within: the module, sharded over `tp` ranks.
    """
    for module in within.modules():
        module.__dict__["_sequence_axes"] = axes
        if hasattr(module, "num_key_value_groups"):
            # The number of query heads per key head, which is smaller if keys are repeated.
            groups = module.__dict__.setdefault("_key_value_groups", module.num_key_value_groups)
            heads = module.config.num_attention_heads // tp
            ranks = 1 if axes.sp is None else axes.sp.size
            module.num_key_value_groups = groups // repeats(heads // groups, ranks)
    change_attention(model, partial(_registered, model=model))


def _heads_of(model: nn.Module) -> int | None:
    """Returns the number of attention heads of a transformers model's blocks; None if it is not one number."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def obstacle(model: nn.Module, sp: int, cp: int, tp: int = 1) -> str | None:
    """Returns why sequences of a model cannot be cut over `sp * cp` ranks; None if they can.

    Args:
        tp: number of ranks that shard each layer of the model.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return "ranks communicate in the attention functions of transformers, which this model does not use"
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return "samples do not consist of tokens, so that there is no sequence to cut"
    if not attends_by_name(model):
        return f"{config.model_type} has attention code of its own instead of the attention functions of transformers"
    if reason := _mixes_tokens(model, config) or (ring.obstacle(model) if cp > 1 else None):
        return f"{config.model_type} {reason}"
    if reason := _needs_whole_samples(model, config):
        return reason
    heads = _heads_of(model)
    if sp > 1 and (heads is None or heads % (sp * tp)):
        degrees = f"tp * sp, {tp} * {sp}," if tp > 1 else f"{sp} ranks"
        return f"{degrees} must divide the {heads} attention heads"
    return None


def _mixes_tokens(model: nn.Module, config: Any) -> str | None:
    """Returns what in a model, besides attention, mixes tokens or depends on a head's index; None if nothing does."""
    if config.is_encoder_decoder:
        return "has an encoder beside its decoder"
    if getattr(config, "output_router_logits", False):
        return "balances its experts by a loss over all tokens (output_router_logits)"
    if type(model).__name__.startswith("Llama4") and config.get_text_config().attn_temperature_tuning:
        return "scales its queries by the index of a token among those of its rank (attn_temperature_tuning)"
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - ATTENTIONS
    if kinds:
        return f"has layers of {', '.join(sorted(kinds))}, which look at other tokens as well"
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return f"has a convolution ('{path}'), which looks at other tokens as well"
        if hasattr(module, "num_key_value_groups") and any(True for _ in module.parameters(recurse=False)):
            return f"has weights of each head in its attention ('{path}')"
    return None


def _needs_whole_samples(model: Any, config: Any) -> str | None:
    """Returns what outside the blocks of a model depends on tokens of other shards; None if nothing does."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    types = {
        str(parameters.get("rope_type")) for parameters in (ropes, *ropes.values()) if isinstance(parameters, dict)
    }
    if varying := sorted(rope_type for rope_type in types if "dynamic" in rope_type or rope_type == "longrope"):
        return f"{config.model_type} has rotary frequencies that depend on a sample's last position (rope_type {varying[0]})"
    parameters = inspect.signature(model.forward).parameters
    other_targets = [name for name in parameters if name.endswith(("_label", "_labels", "start_positions"))]
    kind = getattr(model, "loss_type", None)
    of_tokens = kind in LOSSES_OF_TOKENS if kind is not None else model.get_output_embeddings() is not None
    if other_targets or ("labels" in parameters and not of_tokens):
        return f"the loss of {type(model).__name__} is not a mean over tokens"
    return None


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
"""Separates the original name and the ranks in the name of a registered attention function."""


def _registered(name: str, model: nn.Module) -> str:
    """Registers an attention function and its mask function with communication in transformers; returns their new name.

    They are registered again when further modules of a model share sequences.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name, model_module, ring_axis = name.partition(_OVER)[0], type(model).__module__, axes_of(model).cp
    ranks = layers_of(model, CutSequence)[0].sharing.ranks
    new_name = f"{name}{_OVER}{model_module}, {ranks}, {'' if ring_axis is None else ring_axis.group_name}"
    # Each family has its eager attention in its own module; the interface has the others.
    attention = sys.modules[model_module].eager_attention_forward if name == "eager" else AttentionInterface()[name]
    ring_attend = torch.compiler.disable(ring.attend)  # the ring's communication is kept out of compiled graphs
    AttentionInterface.register(new_name, partial(attend, attention=attention, ring_attend=ring_attend, name=name))
    make_plain = AttentionMaskInterface().get(name)
    if ring_axis is not None:
        make_plain = partial(ring_mask.make_mask, axis=ring_axis)
    if make_plain is not None:
        AttentionMaskInterface.register(new_name, partial(whole_mask, make=make_plain, ranks=ranks))
    return new_name


def axes_of(module: nn.Module) -> SequenceAxes:
    """Returns the ranks that share sequences in an attention module."""
    return getattr(module, "_sequence_axes", None) or SequenceAxes(sp=None, cp=None)


def repeats(heads: int, ranks: int) -> int:
    """Returns the fewest copies of `heads` heads whose total number `ranks` divides.

    >>> repeats(8, 4), repeats(2, 4), repeats(6, 4)
    (1, 2, 2)
    """
    return math.lcm(heads, ranks) // heads


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    attention: Callable[..., Any],
    ring_attend: Callable[..., Any],
    name: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Computes attention of this rank's tokens to full sequences, with the ranks that share them in this module.

    Args:
        query, key, value: (B, heads, tokens of this rank, D).
        attention_mask: a mask of full sequences.
        attention: an attention function of transformers.
        ring_attend: `ring.attend`.
        name: transformers' name of `attention`.

    Returns:
        The output, (B, tokens of this rank, heads, D), and attention weights or None.
    """
    axes = axes_of(module)
    if axes.cp is not None:
        attention = partial(ring_attend, axis=axes.cp, kernels=name != "eager")
    if axes.sp is None:
        return attention(module, query, key, value, attention_mask, **kwargs)
    # Tokens for heads, and back: (B, H, T / S, D) becomes (B, H / S, T, D). Dimension 1 is heads before attention, and tokens
    # in its output.
    if (copies := repeats(key.shape[1], axes.sp.size)) > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    query, key, value = (all_to_all(tensor, 1, 2, axes.sp) for tensor in (query, key, value))
    output, _ = attention(module, query, key, value, attention_mask, **kwargs)
    return all_to_all(output, 1, 2, axes.sp), None


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
    """Returns the mask of full sequences, when transformers requests that of this rank's shard.

    Args:
        make: one of transformers' mask functions, or `ring_mask.make_mask`.
        ranks: the number of ranks that share a sequence.
        q_length, kv_length: tokens of the shard.
        mask_function: returns True if a token may attend to another, from their positions in the sequence.
        attention_mask: 0 for the shard's padding tokens.

    Raises:
        ScheduleError: samples have several documents, and this attention does not support a mask that separates them; or
            the model derived padding itself.
    """
    samples = _full_samples.get()
    if attention_mask is not None and not samples.has_mask and not attention_mask.all():
        raise ScheduleError(
            "sequences cut over ranks: the model derives padding from tokens, but has only those of this rank; pass it an "
            "attention_mask"
        )
    if samples.documents is not None:
        from transformers.masking_utils import and_masks, packed_sequence_mask_function

        mask_function = and_masks(packed_sequence_mask_function(samples.documents), mask_function)
    mask = make(
        q_length=q_length * ranks,
        kv_length=kv_length * ranks,
        mask_function=mask_function,
        attention_mask=None if samples.padding is None else samples.padding.bool(),
        allow_is_causal_skip=allow_is_causal_skip and samples.documents is None,
        **kwargs,
    )
    if samples.documents is not None and (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() < 4)):
        # transformers' flash attention derives documents from positions, here those of this rank's shard only.
        raise ScheduleError(
            "sequences cut over ranks: this attention takes no mask of pairs, so that the documents of a sample cannot be "
            "kept apart; use sdpa or eager, or samples of one document"
        )
    return mask


class CutSequence(Layer):
    """Wraps a model, which gets full samples, computes on a shard of each, and returns the shard's logits and loss.

    The mean of the ranks' losses is the loss of the samples.
    """

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
            # Without a mask transformers derives documents from positions, here those of this rank's shard only.
            kwargs["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        pieces = {name: self._piece(argument, length) for name, argument in kwargs.items()}
        makes_mask = padding is None and kwargs.get("attention_mask") is not None
        token = _full_samples.set(
            _FullSamples(documents=documents, padding=padding, has_mask=padding is not None or makes_mask)
        )
        try:
            output = inner(**pieces)
        finally:
            _full_samples.reset(token)
        if labels is not None:
            output.loss = self._loss(output.logits, labels)
        return output

    def _piece(self, value: Any, length: int) -> Any:
        """Returns this rank's shard of a tensor with an entry for every token, and any other value unchanged."""
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        return self.sharing.piece(value, 1)

    def _positions(self, kwargs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor | None:
        """Adds default positions to `kwargs` if it has none; otherwise returns the document indices that they imply."""
        if self.first_position is None:
            return None
        positions = kwargs.get("position_ids")
        if positions is None:
            default_positions = torch.arange(tokens.shape[1], device=tokens.device) + self.first_position
            kwargs["position_ids"] = default_positions.unsqueeze(0)
            return None
        from transformers.masking_utils import find_packed_sequence_indices

        if kwargs.get("attention_mask") is not None:
            return None
        return find_packed_sequence_indices(positions.expand(tokens.shape[:2]))

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the mean loss over all labels that are not ignored, times the number of ranks."""
        if self.shifts:  # before the cut: the last token of a shard predicts the first of the next
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        count = (labels != IGNORED).sum()
        piece = self._piece(labels, labels.shape[1])
        losses = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), piece.reshape(-1), reduction="sum")
        return losses * (self.sharing.ranks / count)
