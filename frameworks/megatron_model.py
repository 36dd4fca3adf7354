"""Converts between a model and its Megatron-LM flags: sizes and the parts of its family."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from .export_input import ExportInput
from .framework import SettingsReader, number, settings_of

# Megatron's llama3 rule and its factor; neither can be set by a flag.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MEGATRON_FACTOR = 8


def model_flags(setup: ExportInput) -> list[str]:
    """Flags of the model itself; settings left to the user become notes."""
    shape = setup.shape
    if not shape:
        setup.note(
            "the model itself: --num-layers, --hidden-size, --num-attention-heads, "
            "--max-position-embeddings, the tokenizer, the data and the learning rate are yours"
        )
        return []
    setup.note(
        "the tokenizer, the data and the learning rate are yours; --vocab-size is the model's, which "
        "Megatron pads to a multiple of 128 x tp; if a tokenizer is given, its size counts instead"
    )
    _note_uneven_stages(setup)
    return _sizes(setup) + _family(setup) + _dropout(shape)


def _note_uneven_stages(setup: ExportInput) -> None:
    if setup.shape["layers"] % setup.pp and not setup.has("stage_blocks"):
        setup.note(
            f"pp={setup.pp}: {setup.shape['layers']} layers are not a multiple of the stages, which Megatron "
            "refuses without --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )


def _flag(name: str, value: object) -> str:
    """A flag with its value, quoted for a shell: the sizes come from the folder of a run."""
    return f"--{name} {shlex.quote(str(value))}"


def _sizes(setup: ExportInput) -> list[str]:
    shape = setup.shape
    heads, kv_heads = shape["heads"], shape.get("kv_heads") or shape["heads"]
    sizes = [
        _flag("num-layers", shape["layers"]),
        _flag("hidden-size", shape["hidden"]),
        _flag("ffn-hidden-size", shape["intermediate"]),
        _flag("num-attention-heads", heads),
    ]
    if shape.get("kv_lora_rank"):
        sizes += _latent(shape)
    else:
        if kv_heads != heads:
            sizes += ["--group-query-attention", _flag("num-query-groups", kv_heads)]
        if shape.get("head_dim", shape["hidden"] // heads) * heads != shape["hidden"]:
            sizes.append(_flag("kv-channels", shape["head_dim"]))
    sizes.append(_flag("max-position-embeddings", max(shape.get("positions") or 0, setup.seq_len or 0)))
    sizes.append(_flag("vocab-size", shape["vocabulary"]))
    if not shape.get("tied", True):
        sizes.append("--untie-embeddings-and-output-weights")
    if shape.get("experts"):
        if setup.tp > 1 and not setup.knob("sequence_parallel"):
            setup.note(f"tp={setup.tp} with experts: Megatron trains that with --sequence-parallel only")
        sizes += [_flag("num-experts", shape["experts"]), _flag("moe-router-topk", shape.get("experts_per_token", 2))]
        if width := shape.get("expert_intermediate"):
            sizes.append(_flag("moe-ffn-hidden-size", width))
            if shared := shape.get("shared_experts"):
                sizes.append(_flag("moe-shared-expert-intermediate-size", shared * width))
        if dense := shape.get("dense_layers"):
            sizes.append(_flag("moe-layer-freq", f"([0]*{dense}+[1]*{shape['layers'] - dense})"))
    return sizes


def _latent(shape: Mapping[str, Any]) -> list[str]:
    """Sizes of multi-head latent attention (arXiv:2405.04434)."""
    sizes = {"kv-lora-rank": "kv_lora_rank", "q-lora-rank": "q_lora_rank", "qk-head-dim": "head_dim"}
    sizes |= {"qk-pos-emb-head-dim": "rope_head_dim", "v-head-dim": "v_head_dim"}
    # Without a rank, queries are not compressed; heads without positions have 0 of them.
    present = [flag for flag, name in sizes.items() if name in shape and (shape[name] or name != "q_lora_rank")]
    return ["--multi-latent-attention", *(_flag(flag, shape[sizes[flag]]) for flag in present)]


def _family(setup: ExportInput) -> list[str]:
    shape = setup.shape
    family, activation, families = shape["family"], shape.get("activation"), settings_of("megatron")["families"]
    if family not in families:
        setup.note(
            f"this export knows only the sizes of the family {family}: its norm, activation, biases and positions are "
            "yours, if Megatron has them"
        )
        return []
    flags, activations = families[family]["flags"], families[family]["activations"]
    if activation not in activations:
        setup.note(f"the activation {activation} is yours: this export knows {family} with {' or '.join(activations)}")
    elif activation == "silu":
        flags = [*flags, "--swiglu"]
    biased = [name for name in ("attention_bias", "mlp_bias") if shape.get(name)]
    if biased and "--disable-bias-linear" in flags:
        setup.note(f"{' and '.join(biased)}: Megatron has biases in all linear layers or in none, so all are there")
        flags = [flag for flag in flags if flag != "--disable-bias-linear"]
    if family == "deepseek_v3":
        setup.note("the router's groups and scaling factor, and prediction of several tokens, are yours")
    if shape.get("parallel_residual"):
        setup.note("attention and MLP of a block run one after the other: Megatron has no parallel residual")
    arguments = [*flags]
    if "norm_eps" in shape:
        arguments.append(f"--norm-epsilon {shape['norm_eps']:g}")
    return arguments + _positions(setup) + _window(setup)


def _positions(setup: ExportInput) -> list[str]:
    rope: Mapping[str, Any] = setup.shape.get("rope") or {}
    arguments: list[str] = []
    if "rope_theta" in rope:
        arguments.append(f"--rotary-base {round(rope['rope_theta'])}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        arguments.append(f"--rotary-percent {rope['partial_rotary_factor']:g}")
    kind = rope.get("rope_type", "default")
    if kind == "llama3" and all(rope.get(name) == value for name, value in _LLAMA3_ROPE.items()):
        arguments.append("--use-rope-scaling")
        if rope["factor"] != _MEGATRON_FACTOR:
            setup.note(
                f"rotary positions stretched by a factor of {rope['factor']:g}: Megatron parses "
                f"--rope-scaling-factor, but builds its GPT with {_MEGATRON_FACTOR}; set "
                "rope_scaling_factor of its GPTModelConfig yourself"
            )
    elif kind != "default":
        setup.note(f"rotary positions of the type {kind} are yours: with these flags they are plain ones")
    return arguments


def _window(setup: ExportInput) -> list[str]:
    window = setup.shape.get("window")
    if not window or (setup.seq_len or 0) <= window:
        return []
    # Megatron counts the keys before a query; transformers also counts the query's own.
    return [f"--window-size {window - 1},0"]


def _dropout(shape: Mapping[str, Any]) -> list[str]:
    # Megatron's default is 0.1; without a value in the configuration there is no dropout.
    return [
        f"--hidden-dropout {shape.get('dropout', 0.0):g}",
        f"--attention-dropout {shape.get('attention_dropout', 0.0):g}",
    ]


_NOT_IN_GPT2 = (
    *("num-experts", "group-query-attention", "multi-latent-attention", "untie-embeddings-and-output-weights"),
    "kv-channels",
)
"""Settings that GPT-2's blocks do not have."""
VOCABULARY = 50_304
"""Assumed vocabulary size of a model given only by its tokenizer: GPT-2's 50,257, padded to a multiple of 128."""


def architecture_of(reader: SettingsReader) -> dict[str, Any] | None:
    """Returns the model that flags describe, as a Hugging Face config.json: blocks of DeepSeek-V3, Mixtral, Llama or
    GPT-2.

    None if the flags do not contain its sizes.
    """
    layers = reader.whole("num-layers", "encoder-num-layers")
    hidden, heads = reader.whole("hidden-size"), reader.whole("num-attention-heads")
    if layers is None or hidden is None or heads is None:
        return None
    vocabulary = reader.whole("padded-vocab-size", "vocab-size")
    if vocabulary is None:
        reader.note(f"the vocabulary is not in the flags: {VOCABULARY:,} tokens are assumed; add --vocab-size N")
        vocabulary = VOCABULARY
    positions = reader.whole("max-position-embeddings", "seq-length") or 2048
    inner = reader.whole("ffn-hidden-size")
    gated = reader.flag("swiglu")
    if not gated and not any(reader.has(name) and reader.flag(name) is not False for name in _NOT_IN_GPT2):
        return {
            "model_type": "gpt2",
            "n_layer": layers,
            "n_embd": hidden,
            "n_head": heads,
            "vocab_size": vocabulary,
            "n_positions": positions,
            "n_inner": inner or 4 * hidden,
            **_dropout_of(reader),
        }
    if not gated:
        reader.note(
            "the MLP has no gate (no --swiglu): it is taken for one with a gate and two thirds of its width, which has as many "
            "parameters"
        )

    def width(size: int | None) -> int | None:
        return size if gated or size is None else max(1, size * 2 // 3)

    reader.ignore("hidden-dropout", 0)
    groups = reader.whole("num-query-groups") or 1 if reader.flag("group-query-attention") else heads
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        # As in Megatron-LM: the same number of parameters as without a gate, in multiples of 64.
        "intermediate_size": width(inner) or hidden * 8 // 3 // 64 * 64,
        "head_dim": reader.whole("kv-channels") or hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": not reader.flag("untie-embeddings-and-output-weights"),
    }
    experts = reader.whole("num-experts")
    wide = width(reader.whole("moe-ffn-hidden-size")) or config["intermediate_size"]
    if experts and reader.flag("multi-latent-attention"):
        shared = width(reader.whole("moe-shared-expert-intermediate-size")) or 0
        return {**config, **_latent_architecture(reader, experts, wide), "n_shared_experts": round(shared / wide)}
    if reader.flag("multi-latent-attention"):
        reader.note("multi-latent-attention is taken for plain attention, as there are no experts (num-experts)")
    if experts:
        if _dense_layers(reader) != 0:
            reader.note(f"moe-layer-freq = {reader.get('moe-layer-freq')}: all layers are taken to have experts")
        reader.ignore("moe-shared-expert-intermediate-size")
        config |= {
            "model_type": "mixtral",
            "intermediate_size": wide,
            "num_local_experts": experts,
            "num_experts_per_tok": reader.whole("moe-router-topk") or 2,
        }
    return config


def _dropout_of(reader: SettingsReader) -> dict[str, float]:
    """Dropout that the flags state, which keeps masks; both are 0.1 in Megatron and in GPT-2."""
    hidden, attention = number(reader.get("hidden-dropout")), number(reader.get("attention-dropout"))
    shares = {"resid_pdrop": hidden, "embd_pdrop": hidden, "attn_pdrop": attention}
    return {name: float(share) for name, share in shares.items() if isinstance(share, int | float)}


def _dense_layers(reader: SettingsReader) -> int | None:
    """Number of first layers without experts; None if `moe-layer-freq` has another order."""
    pattern = re.sub(r"\s", "", str(reader.get("moe-layer-freq") or "1"))
    match = re.fullmatch(r"1|\(?(\[0\](?:\*(\d+))?\+)?\[1\]\*\d+\)?", pattern)
    return None if match is None else int(match[2] or 1) if match[1] else 0


def _latent_architecture(reader: SettingsReader, experts: int, width: int) -> dict[str, Any]:
    """Returns the settings of DeepSeek-V3's kind that flags describe; Megatron-LM's defaults for those that are missing."""
    positions = reader.whole("qk-pos-emb-head-dim") or 64
    dense = _dense_layers(reader)
    if dense is None:
        reader.note(f"moe-layer-freq = {reader.get('moe-layer-freq')}: all layers are taken to have experts")
    return {
        "model_type": "deepseek_v3",
        "num_key_value_heads": reader.whole("num-attention-heads"),
        "n_routed_experts": experts,
        "num_experts_per_tok": reader.whole("moe-router-topk") or 2,
        "moe_intermediate_size": width,
        "first_k_dense_replace": dense or 0,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": reader.whole("q-lora-rank"),
        "kv_lora_rank": reader.whole("kv-lora-rank") or 32,
        "qk_nope_head_dim": reader.whole("qk-head-dim") or 128,
        "qk_rope_head_dim": positions,
        "head_dim": positions,
        "v_head_dim": reader.whole("v-head-dim") or 128,
    }
