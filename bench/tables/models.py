"""Shapes of models named in tables that are not among redline's presets."""

import re
from collections.abc import Mapping
from dataclasses import replace

from redline.estimator import Shape
from redline.estimator.trainers import numbers_of
from redline.models import workload
from redline.models.architecture import shape_of
from redline.models.presets import PRESETS, preset_of

from .form import Left


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int = 50304, **more: object) -> dict[str, object]:
    """GPT-3's block: learned positions, LayerNorm, GELU, biases, and the dropout of pre-training."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "gated": False, "tied": True,
            "biases": True, "positions": 2048, **more}  # fmt: skip


def _llama(
    layers: int, hidden: int, heads: int, kv: int, inner: int, vocabulary: int, **more: object
) -> dict[str, object]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv, "intermediate": inner,
            "vocabulary": vocabulary, **more}  # fmt: skip


def _latent(layers: int, hidden: int, heads: int, vocabulary: int, *, dense: int, experts: int) -> dict[str, object]:
    """DeepSeek-V3's block: latent attention, and 8 of many experts beside one of every token."""
    return {**_llama(layers, hidden, heads, heads, 18432, vocabulary), "dense_layers": dense, "experts": experts,
            "experts_per_token": 8, "expert_intermediate": 2048, "shared_intermediate": 2048, "head_dim": 128,
            "rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}  # fmt: skip


SHAPES: Mapping[str, Mapping[str, object]] = {
    # NVIDIA NeMo's GPT-3 recipes (sequence 2048, tokenizer of 51,200), Brown et al. 2020 for 175B.
    "gpt3-5b": _gpt(24, 4096, 32, 51200),
    "gpt3-20b": _gpt(44, 6144, 48, 51200),
    "gpt3-175b": _gpt(96, 12288, 96, 51200),
    # Nemotron-3 8B, -4 22B and 340B: squared ReLU, no biases, rotary positions, tokenizer of 256,000.
    "nemotron-8b": _llama(32, 4096, 32, 32, 16384, 256000, gated=False),
    "nemotron-22b": _llama(40, 6144, 48, 48, 24576, 256000, gated=False),
    "nemotron-15b": _llama(32, 6144, 48, 8, 24576, 256000, gated=False),
    "nemotron-340b": _llama(96, 18432, 96, 8, 73728, 256000, gated=False),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "llama3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, tied=True),
    "llama2-34b": _llama(48, 8192, 64, 8, 22016, 32000),
    "llama-30b": _llama(60, 6656, 52, 52, 17920, 32000),
    "llama-65b": _llama(80, 8192, 64, 64, 22016, 32000),
    "powerlm-3b": _llama(40, 2304, 36, 36, 9216, 49152, tied=True),
    # BigCode's gpt_bigcode: one key and value head.
    "gpt-bigcode-santacoder": _gpt(24, 2048, 16, 49280, kv_heads=1, dropout=True),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-14b": _llama(40, 5120, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-4b": _llama(36, 2560, 32, 8, 9728, 151936, head_dim=128, tied=True),
    "qwen3-1.7b": _llama(28, 2048, 16, 8, 6144, 151936, head_dim=128, tied=True),
    # Qwen of 2023, one head of keys and values for each of queries.
    "qwen-1.8b": _llama(24, 2048, 16, 16, 5504, 151936),
    "qwen-7b": _llama(32, 4096, 32, 32, 11008, 151936),
    "qwen-14b": _llama(40, 5120, 40, 40, 13696, 152064),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _llama(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064),
    "gemma-7b": _llama(28, 3072, 16, 16, 24576, 256000, head_dim=256, tied=True),
    "mistral-small-24b": _llama(40, 5120, 32, 8, 32768, 131072, head_dim=128),
    "phi-4": _llama(40, 5120, 40, 10, 17920, 100352),
    "bert-base": _gpt(12, 768, 12, 30522, positions=512, causal=False, dropout=True),
    "bert-large": _gpt(24, 1024, 16, 30522, positions=512, causal=False, dropout=True),
    # Mixtures: experts, experts of a token, inner size of each.
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 6144, 151936, head_dim=128, experts=128, experts_per_token=8,
                            expert_intermediate=768),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 4, 12288, 151936, head_dim=128, experts=128, experts_per_token=8,
                              expert_intermediate=1536),
    "deepseek-v3": _latent(61, 7168, 128, 129280, dense=3, experts=256),
    "kimi-k2": _latent(61, 7168, 64, 163840, dense=1, experts=384),
    # xAI's release of Grok-1; Llama 4 Maverick has experts in every second block, here in the second half.
    "grok1": _llama(64, 6144, 48, 8, 32768, 131072, experts=8, experts_per_token=2),
    "maverick": _llama(48, 5120, 40, 8, 16384, 202048, head_dim=128, experts=128, experts_per_token=1,
                       expert_intermediate=8192, shared_intermediate=8192, dense_layers=24),
    # Its products have biases, those of experts too.
    "gpt-oss-120b": _llama(36, 2880, 64, 8, 2880, 201088, head_dim=64, experts=128, experts_per_token=4, biases=True),
}  # fmt: skip
"""Shapes by the name that `key` returns."""

# Mosaic's MPT: layers, width, heads.
MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip

_MIXTURES = re.compile(
    r"mixtral|deepseek|moe|kimi|gpt-?oss|qwen3-\d+b-a\d|granite-[34]|nemotron-3-(nano|super|ultra)|x\d+b"
)


def key(name: str) -> str:
    """Returns a model's name for lookup: lower case, without owner, family and version in one word.

    >>> key("NousResearch/Llama-2-70b-hf"), key("LLAMA3.1_405B"), key("Llama 3.1 8B"), key("DeepSeekV3 (w/o MTP)")
    ('llama2-70b', 'llama3-405b', 'llama3-8b', 'deepseek-v3')
    """
    text = name.lower().removesuffix(" (w/o mtp)")
    text = re.sub(r"[\s_]+", "-", text.rpartition("/")[2]).removeprefix("meta-")
    text = re.sub(r"(-hf|-v\d[\d.]*|-gptq|-instruct|-base|-chat)+$", "", text.replace("nous-hermes-", ""))
    text = re.sub(r"^(llama|qwen)-(\d)", r"\1\2", text)
    return (
        re.sub(r"^llama3\.[13]-(8|70|405)b", r"llama3-\1b", text)
        .replace("deepseekv3", "deepseek-v3")
        .replace("dsv3", "deepseek-v3")
    )


def model_of(name: str) -> Shape:
    """Returns the shape of a model by its name.

    Raises:
        Left: it is unknown, or a mixture of experts, whose shape is not listed here.
    """
    text = key(name)
    if name in SHAPES:
        text = name
    elif re.sub(r"^(qwen)(\d)", r"\1-\2", text) in SHAPES:
        text = re.sub(r"^(qwen)(\d)", r"\1-\2", text)
    if text in SHAPES:
        return Shape(name=text, **SHAPES[text])  # type: ignore[arg-type]
    if _MIXTURES.search(text):
        raise Left(f"'{name}' is a mixture of experts whose shape is not listed")
    preset = preset_of(text)
    sizes = shape_of(workload(preset).model) if preset in PRESETS else None
    shape = None if sizes is None or sizes["family"] == "gpt2" else numbers_of(sizes)
    if preset is None or shape is None:
        raise Left(f"the model '{name}' is not known")
    return replace(shape, name=preset)


def mpt(name: str, seq_len: int) -> Shape:
    """Returns a size of Mosaic's MPT: their parameter counts include biases and learned positions.

    Raises:
        Left: the size does not exist.
    """
    size = name.lower().removeprefix("mpt").strip("-_ ")
    if size not in MPT:
        raise Left(f"MPT has no size '{name}'")
    layers, hidden, heads = MPT[size]
    made = Shape(name=f"mpt-{size}", **_gpt(layers, hidden, heads, 50368, positions=seq_len))  # type: ignore[arg-type]
    return replace(made, kv_heads=None)
