"""Sequences cut over ranks, which exchange them for heads around attention.

Notation:

| symbol | meaning |
|---|---|
| P | ranks of the axis |
| B, T | samples of a micro-batch; tokens of a sample, of which each rank has T / P in a row |
| H, K | heads of queries, and of keys and values, on a tensor-parallel rank |
| D | features of a head |

Attention has queries of shape (B, H, T / P, D), and an all-to-all makes (B, H / P, T, D) of them: all tokens, a part of
the heads. What comes out of it goes the way back. All else in a transformer is by token, but for positions, masks
and the loss, which are those of the whole sequence.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509).
"""

import inspect
import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..._transformers import attends_by_name, change_attention
from ...errors import ScheduleError
from ..collectives import all_to_all
from ..forward import Layer, add_layer
from . import collectives
from .collectives import Axis

IGNORED = -100
"""The label of what is not predicted."""
ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, as transformers' configurations call them, that look at other tokens by attention alone."""
_documents: ContextVar[torch.Tensor | None] = ContextVar("documents", default=None)
"""Of the forward pass that runs: the number of each token's document, (B, T), where samples hold several."""


def cut_sequence(model: Any, axis: Axis, tp: int) -> None:
    """Has a model of transformers, cut over `tp` ranks, compute on this rank's piece of every sequence it is given."""
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            # So many queries share a key, and fewer do where keys are repeated.
            heads = module.config.num_attention_heads // tp
            module.num_key_value_groups //= repeats(heads // module.num_key_value_groups, axis.size)
    change_attention(model, partial(_registered, axis=axis, model=model))
    add_layer(model, CutSequence(axis, _shifts(model), _first_position(model)))


def obstacle(model: nn.Module, ranks: int, tp: int = 1) -> str:
    """Why a model, each layer of which is cut over `tp` ranks, cannot exchange heads among so many; empty where it can."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return "heads are exchanged by the attention functions of transformers, and this is no model of it"
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return "samples are not made of tokens, so that there is no sequence to cut"
    if not attends_by_name(model):
        return f"{config.model_type} attends by code of its own, not by the attention functions of transformers"
    if why := _mixes_tokens(model, config):
        return f"{config.model_type} {why}"
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if not isinstance(heads, int) or heads % (ranks * tp):
        given = f"tp * sp, {tp} * {ranks}," if tp > 1 else f"{ranks} ranks"
        return f"{given} must divide the {heads} attention heads"
    return ""


def _mixes_tokens(model: nn.Module, config: Any) -> str:
    """What of a model, beside attention, looks at other tokens or at a head by its number; empty where nothing does."""
    if config.is_encoder_decoder:
        return "has an encoder beside its decoder"
    if getattr(config, "output_router_logits", False):
        return "balances its experts by a loss over all tokens (output_router_logits)"
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - ATTENTIONS
    if kinds:
        return f"has layers of {', '.join(sorted(kinds))}, which look at other tokens as well"
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return f"has a convolution ('{path}'), which looks at other tokens as well"
        if hasattr(module, "num_key_value_groups") and any(True for _ in module.parameters(recurse=False)):
            return f"has weights of each head in its attention ('{path}')"
    return ""


def repeats(heads: int, ranks: int) -> int:
    """The fewest copies of so many heads that so many ranks divide.

    >>> repeats(8, 4), repeats(2, 4), repeats(6, 4)
    (1, 2, 2)
    """
    return math.lcm(heads, ranks) // heads


def _shifts(model: Any) -> bool:
    """Whether a token's label is the token behind it, as transformers' loss of the model has it."""
    return getattr(model, "loss_type", None) in (None, "ForCausalLM")


def _first_position(model: nn.Module) -> int | None:
    """The number of the first position; None where the model takes none. RoBERTa counts from behind its padding."""
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


def _registered(name: str, axis: Axis, model: nn.Module) -> str:
    """The name under which transformers finds an attention by its name, and its masks, with the exchange around it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    made = f"{name} of {type(model).__module__} over {axis.group_name}"
    if name == "eager":  # each family's own
        attention = sys.modules[type(model).__module__].eager_attention_forward
    else:
        attention = AttentionInterface()[name]
    AttentionInterface.register(made, partial(attend, attention=attention, axis=axis))
    masks = AttentionMaskInterface()
    if name in masks:
        AttentionMaskInterface.register(made, partial(whole_mask, make=masks[name], axis=axis))
    return made


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    attention: Callable[..., Any],
    axis: Axis,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over whole sequences, of this rank's heads.

    Args:
        module: that attends.
        query: (B, H, T / P, D).
        key, value: (B, K, T / P, D).
        attention_mask: of whole sequences.
        attention: one of transformers.
        axis: the ranks that have a piece of the sequence each.

    Returns:
        (B, T / P, H, D), and no weights.
    """
    if (copies := repeats(key.shape[1], axis.size)) > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
    query, key, value = (all_to_all(each, 1, 2, axis) for each in (query, key, value))
    output, _ = attention(module, query, key, value, attention_mask, **kwargs)
    return all_to_all(output, 1, 2, axis), None


def whole_mask(
    *,
    make: Callable[..., Any],
    axis: Axis,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """The mask of whole sequences, where transformers asks for that of this rank's piece.

    Args:
        make: one of transformers' mask functions.
        axis: the ranks.
        q_length, kv_length: tokens of the piece.
        mask_function: which token may look at which, by their places in the sequence.
        attention_mask: the piece's tokens that are no padding, (B, T / P).

    Raises:
        ScheduleError: samples hold several documents, and this attention takes no mask that keeps them apart.
    """
    if attention_mask is not None:
        attention_mask = collectives.all_gather(attention_mask.to(torch.uint8), -1, axis).to(attention_mask.dtype)
    documents = _documents.get()
    if documents is not None:
        from transformers.masking_utils import and_masks, packed_sequence_mask_function

        mask_function = and_masks(packed_sequence_mask_function(documents), mask_function)
    mask = make(
        q_length=q_length * axis.size,
        kv_length=kv_length * axis.size,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and documents is None,
        **kwargs,
    )
    if documents is not None and (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() < 4)):
        # transformers' flash attention finds documents by positions, and would find a piece's.
        raise ScheduleError(
            "ulysses: this attention takes no mask of pairs, so that the documents of a sample cannot be kept apart; use "
            "sdpa or eager, or samples of one document"
        )
    return mask


class CutSequence(Layer):
    """Around a whole model: it is given whole samples, computes on a piece of each, and returns the piece's logits and its
    part of the loss. The mean of that over the ranks is the loss of the samples."""

    order = 60
    divisible = True

    def __init__(self, axis: Axis, shifts: bool, first_position: int | None) -> None:
        self.axis, self.shifts, self.first_position = axis, shifts, first_position

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        kwargs = {**dict(zip(names, args)), **kwargs}
        tokens = kwargs["inputs_embeds" if kwargs.get("input_ids") is None else "input_ids"]
        length = tokens.shape[1]
        if length % self.axis.size:
            raise ScheduleError(f"ulysses: {self.axis.size} ranks must divide the {length} tokens of a sample")
        labels, documents = kwargs.pop("labels", None), self._positions(module, kwargs, tokens)
        pieces = {name: self._piece(each, length) for name, each in kwargs.items()}
        before = _documents.set(documents)
        try:
            output = inner(**pieces)
        finally:
            _documents.reset(before)
        if labels is not None:
            output.loss = self._loss(output.logits, labels)
        return output

    def _piece(self, value: Any, length: int) -> Any:
        """This rank's of what has a place for every token."""
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        return value.chunk(self.axis.size, 1)[self.axis.rank].contiguous()

    def _positions(self, module: nn.Module, kwargs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor | None:
        """Puts in the positions that the model would count itself; returns the documents that given ones tell apart."""
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
        documents = find_packed_sequence_indices(positions.expand(tokens.shape[:2]))
        if documents is not None:
            # transformers looks for documents where there is no mask, and would find this piece's alone.
            kwargs["attention_mask"] = torch.ones_like(documents)
        return documents

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over all labels that are not ignored, times the ranks."""
        if self.shifts:  # before they are cut: the last token of a piece predicts the first of the next
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        count = (labels != IGNORED).sum()
        piece = self._piece(labels, labels.shape[1])
        losses = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), piece.reshape(-1), reduction="sum")
        return losses * (self.axis.size / count)
