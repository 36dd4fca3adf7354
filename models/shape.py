"""The shape of a language model, as other frameworks ask for it."""

from collections.abc import Mapping
from typing import Any

from .architecture import Architecture

# The words of run.yaml, and what the families call it; the first that a configuration has counts.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings",),
    "tied": ("tie_word_embeddings",),
    "activation": ("hidden_act", "activation_function"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "dropout": ("hidden_dropout", "resid_pdrop", "hidden_dropout_prob"),
    "attention_dropout": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    "attention_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
    "rope": ("rope_parameters",),
    "window": ("sliding_window",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_intermediate": ("moe_intermediate_size",),
    "experts_per_token": ("num_experts_per_tok",),
    "parallel_residual": ("use_parallel_residual",),
}


def shape_of(model: Any) -> dict[str, Any] | None:
    """What run.yaml keeps of a model's shape: its `family` and, where its configuration has them, `layers`,
    `hidden`, `heads`, `kv_heads`, `head_dim`, `intermediate`, `vocabulary`, `positions`, `tied` and the like.

    None of what is no single stack of blocks over tokens: an encoder with a decoder, images, one's own model.
    """
    if not isinstance(model, Architecture) or model.task not in ("causal", "masked"):
        return None
    configuration = model.configuration().get_text_config()
    found: dict[str, Any] = {"family": model.model_type}
    for word, names in _NAMES.items():
        values = (getattr(configuration, name, None) for name in names)
        value = next((each for each in values if each is not None), None)
        if value is not None:
            found[word] = dict(value) if isinstance(value, Mapping) else value
    # GPT-2, GPT-Neo and others leave it open.
    found.setdefault("intermediate", 4 * found["hidden"])
    return found
