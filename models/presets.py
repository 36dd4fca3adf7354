"""Named models: published shapes, and small ones of the same families."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .architecture import NAMES
from .data import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named model."""

    name: str
    model_type: str
    """The family, as transformers names it."""
    task: Task
    """`causal`, `masked`, `seq2seq` or `image`."""
    arguments: Mapping[str, Any]
    """Keyword arguments of the configuration, as published; the rest are the family's defaults."""
    parameters: int
    """Number of parameters, including the language-model head, tied ones counted once."""
    seq_len: int | None
    """Tokens of a sample: as in pre-training, or 64 for the tiny ones; None for images."""
    global_batch: int
    """Samples of one optimizer step: enough for a choice of micro-batches, few enough to be fast."""

    def shape(self) -> dict[str, int]:
        """`layers` (an encoder's and a decoder's together), `hidden`, `heads` and `vocabulary`; 0 if it does not apply."""
        found = {
            word: next((self.arguments[name] for name in NAMES[word] if name in self.arguments), 0)
            for word in ("layers", "hidden", "heads", "vocabulary")
        }
        if self.task == "seq2seq":
            found["layers"] *= 2
        if self.model_type == "wide_resnet":
            # Residual blocks, and channels of the last of them.
            found["layers"] = (self.arguments["depth"] - 4) // 2
            found["hidden"] = 64 * self.arguments["width"]
        return found


def _gpt2(layers: int, hidden: int, heads: int, vocabulary: int = 50257, **more: Any) -> dict[str, Any]:
    # Radford et al. 2019. Dropout is 0.1, the configuration's default.
    return {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocabulary, **more}


def _encoder(layers: int, hidden: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    # BERT (Devlin et al. 2018, uncased) and RoBERTa (Liu et al. 2019). Dropout is 0.1 too.
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary,
        **more,
    }


def _decoder(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    *,
    kv_heads: int,
    intermediate: int,
    positions: int,
    rope_theta: float = 10000.0,
    **more: Any,
) -> dict[str, Any]:
    # Llama (Touvron et al. 2023, Llama 3 2024), Qwen 3 (2025) and similar models. No dropout.
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        **more,
    }


def _latent(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    *,
    dense: int,
    intermediate: int,
    experts: int,
    chosen: int,
    width: int,
    groups: tuple[int, int],
    ranks: tuple[int, int],
    head_dims: tuple[int, int, int],
    **more: Any,
) -> dict[str, Any]:
    # DeepSeek-V3 (2024): `dense` blocks, then blocks with a shared expert and routed experts, chosen among those of
    # the best groups; queries, and keys with values, through latent vectors (MLA).
    return {
        **_decoder(layers, hidden, heads, vocabulary, kv_heads=heads, intermediate=intermediate, **more),
        "first_k_dense_replace": dense,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "n_group": groups[0],
        "topk_group": groups[1],
        "q_lora_rank": ranks[0],
        "kv_lora_rank": ranks[1],
        "qk_nope_head_dim": head_dims[0],
        "qk_rope_head_dim": head_dims[1],
        "v_head_dim": head_dims[2],
    }


def _gemma3(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, scalar: int
) -> dict[str, Any]:
    # Gemma team 2025, the language model: five blocks that attend to the last 1,024 tokens, then one to all.
    return {
        **_decoder(layers, hidden, heads, 262208, kv_heads=kv_heads, intermediate=intermediate, positions=131072),
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "sliding_window": 1024,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    # OpenAI 2025: every other block attends to the last 128 tokens, every block has experts, and each token uses 4 of them.
    return {
        "num_hidden_layers": layers,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
    }


def _modern_encoder(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    # ModernBERT (Warner et al. 2024): rotary positions; two blocks that attend to 128 tokens, then one to all.
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "vocab_size": 50368,
        "max_position_embeddings": 8192,
        "local_attention": 128,
    }


def _t5(layers: int, hidden: int, heads: int, width: int, feed_forward: int, vocabulary: int = 32128) -> dict[str, Any]:
    # Raffel et al. 2019: as many blocks in the encoder as in the decoder, embeddings tied. Dropout is 0.1.
    return {
        "num_layers": layers,
        "d_model": hidden,
        "num_heads": heads,
        "d_kv": width,
        "d_ff": feed_forward,
        "vocab_size": vocabulary,
        "decoder_start_token_id": 0,
    }


def _vit(layers: int, hidden: int, heads: int, *, image: int, patch: int, classes: int) -> dict[str, Any]:
    # Dosovitskiy et al. 2020. The configuration's default is no dropout.
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "image_size": image,
        "patch_size": patch,
        "num_labels": classes,
    }


_NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}

# Name, family, task, parameters, sequence length, global batch, configuration. The tiny ones keep their
# family's code path; widths are small and vocabularies large enough that a step of the global batch takes
# about half a second on two cores, while the largest micro-batch at twice the length needs more than 1 GiB.
_TABLE: tuple[tuple[str, str, Task, int, int | None, int, dict[str, Any]], ...] = (
    ("gpt2-tiny", "gpt2", "causal", 1_414_144, 64, 32, _gpt2(6, 64, 8, 16384, **_NO_SPECIAL_TOKENS)),
    ("bert-tiny", "bert", "masked", 1_102_784, 64, 32, _encoder(8, 64, 8, 10240)),
    (
        "llama-tiny", "llama", "causal", 2_786_368, 64, 32,
        _decoder(8, 64, 8, 16384, kv_heads=4, intermediate=384, positions=2048, **_NO_SPECIAL_TOKENS),
    ),
    ("t5-tiny", "t5", "seq2seq", 869_952, 64, 32, _t5(3, 64, 8, 8, 256, vocabulary=8192)),
    (
        "mixtral-tiny", "mixtral", "causal", 1_492_544, 64, 32,
        _decoder(4, 64, 8, 8192, kv_heads=4, intermediate=128, positions=2048, num_local_experts=4,
                 num_experts_per_tok=2, **_NO_SPECIAL_TOKENS),
    ),
    (
        "qwen3-moe-tiny", "qwen3_moe", "causal", 1_493_632, 64, 32,
        _decoder(4, 64, 8, 8192, kv_heads=4, intermediate=128, positions=2048, head_dim=8, num_experts=8,
                 num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, **_NO_SPECIAL_TOKENS),
    ),
    (
        "deepseek-v3-tiny", "deepseek_v3", "causal", 1_481_984, 64, 32,
        _latent(4, 64, 8, 8192, dense=1, intermediate=256, experts=8, chosen=2, width=64, groups=(4, 2), ranks=(32, 16),
                head_dims=(8, 4, 8), positions=2048, **_NO_SPECIAL_TOKENS),
    ),
    ("vit-tiny", "vit", "image", 323_108, None, 32, _vit(6, 64, 4, image=64, patch=8, classes=100)),
    ("wide-resnet-tiny", "wide_resnet", "image", 175_066, None, 32, {"depth": 16, "width": 1, "classes": 10}),
    ("gpt2", "gpt2", "causal", 124_439_808, 1024, 64, _gpt2(12, 768, 12)),
    ("gpt2-medium", "gpt2", "causal", 354_823_168, 1024, 64, _gpt2(24, 1024, 16)),
    ("gpt2-large", "gpt2", "causal", 774_030_080, 1024, 32, _gpt2(36, 1280, 20)),
    ("gpt2-xl", "gpt2", "causal", 1_557_611_200, 1024, 32, _gpt2(48, 1600, 25)),
    ("bert-base", "bert", "masked", 109_514_298, 512, 128, _encoder(12, 768, 12, 30522)),
    ("bert-large", "bert", "masked", 335_174_458, 512, 64, _encoder(24, 1024, 16, 30522)),
    (
        "roberta-large", "roberta", "masked", 355_412_057, 512, 64,
        _encoder(24, 1024, 16, 50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5),
    ),
    ("t5-base", "t5", "seq2seq", 222_903_552, 512, 128, _t5(12, 768, 12, 64, 3072)),
    ("t5-large", "t5", "seq2seq", 737_668_096, 512, 64, _t5(24, 1024, 16, 64, 4096)),
    ("vit-base", "vit", "image", 86_567_656, None, 256, _vit(12, 768, 12, image=224, patch=16, classes=1000)),
    ("vit-large", "vit", "image", 304_326_632, None, 128, _vit(24, 1024, 16, image=224, patch=16, classes=1000)),
    ("wide-resnet-28-10", "wide_resnet", "image", 36_479_194, None, 128, {"depth": 28, "width": 10, "classes": 10}),
    (
        # Zhang et al. 2022; the only OPT with a projection of its embeddings and norms after the sublayers.
        "opt-350m", "opt", "causal", 331_196_416, 2048, 32,
        {
            "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "ffn_dim": 4096,
            "word_embed_proj_dim": 512, "do_layer_norm_before": False, "max_position_embeddings": 2048,
            "vocab_size": 50272,
        },
    ),
    (
        # Black et al. 2021: every other block attends to the last 256 tokens only.
        "gpt-neo-1.3b", "gpt_neo", "causal", 1_315_575_808, 2048, 32,
        {
            "num_layers": 24, "hidden_size": 2048, "num_heads": 16, "vocab_size": 50257,
            "attention_types": [[["global", "local"], 12]], "window_size": 256,
            "max_position_embeddings": 2048,
        },
    ),
    (
        "qwen3-0.6b", "qwen3", "causal", 596_049_920, 4096, 32,
        _decoder(28, 1024, 16, 151936, kv_heads=8, intermediate=3072, positions=40960, rope_theta=1e6,
                 head_dim=128, tie_word_embeddings=True),
    ),
    (
        "qwen3-8b", "qwen3", "causal", 8_190_735_360, 4096, 16,
        _decoder(36, 4096, 32, 151936, kv_heads=8, intermediate=12288, positions=40960, rope_theta=1e6,
                 head_dim=128, tie_word_embeddings=False),
    ),
    (
        "qwen3-32b", "qwen3", "causal", 32_762_123_264, 4096, 16,
        _decoder(64, 5120, 64, 151936, kv_heads=8, intermediate=25600, positions=40960, rope_theta=1e6,
                 head_dim=128, tie_word_embeddings=False),
    ),
    (
        "qwen3-30b-a3b", "qwen3_moe", "causal", 30_532_122_624, 4096, 64,
        _decoder(48, 2048, 32, 151936, kv_heads=4, intermediate=6144, positions=40960, rope_theta=1e6, head_dim=128,
                 num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
                 tie_word_embeddings=False),
    ),
    ("gemma3-4b", "gemma3_text", "causal", 3_880_263_168, 8192, 16, _gemma3(34, 2560, 8, 4, 256, 10240, 256)),
    ("gemma3-12b", "gemma3_text", "causal", 11_766_034_176, 8192, 16, _gemma3(48, 3840, 16, 8, 256, 15360, 256)),
    ("gemma3-27b", "gemma3_text", "causal", 27_009_346_304, 8192, 16, _gemma3(62, 5376, 32, 16, 128, 21504, 168)),
    (
        # Mistral AI 2025.
        "mistral-small-24b", "mistral", "causal", 23_572_403_200, 8192, 16,
        _decoder(40, 5120, 32, 131072, kv_heads=8, intermediate=32768, positions=32768, rope_theta=1e8, head_dim=128,
                 rms_norm_eps=1e-5, sliding_window=None),
    ),
    (
        # Abdin et al. 2024; Phi-3's architecture, with a fused projection of queries, keys and values.
        "phi-4", "phi3", "causal", 14_659_507_200, 8192, 16,
        _decoder(40, 5120, 40, 100352, kv_heads=10, intermediate=17920, positions=16384, rope_theta=2.5e5,
                 rms_norm_eps=1e-5, original_max_position_embeddings=16384, bos_token_id=100257, eos_token_id=100265,
                 pad_token_id=100349),
    ),
    ("gpt-oss-20b", "gpt_oss", "causal", 20_914_757_184, 4096, 64, _gpt_oss(24, 32)),
    ("gpt-oss-120b", "gpt_oss", "causal", 116_829_156_672, 4096, 256, _gpt_oss(36, 128)),
    ("modernbert-base", "modernbert", "masked", 149_655_232, 1024, 128, _modern_encoder(22, 768, 12, 1152)),
    ("modernbert-large", "modernbert", "masked", 395_881_664, 1024, 64, _modern_encoder(28, 1024, 16, 2624)),
    (
        "qwen2-7b", "qwen2", "causal", 7_615_616_512, 4096, 16,
        _decoder(28, 3584, 28, 152064, kv_heads=4, intermediate=18944, positions=131072, rope_theta=1e6,
                 tie_word_embeddings=False),
    ),
    (
        # Jiang et al. 2023.
        "mistral-7b", "mistral", "causal", 7_241_732_096, 4096, 16,
        _decoder(32, 4096, 32, 32000, kv_heads=8, intermediate=14336, positions=32768, rms_norm_eps=1e-5,
                 sliding_window=4096),
    ),
    (
        # Jiang et al. 2024.
        "mixtral-8x7b", "mixtral", "causal", 46_702_792_704, 4096, 16,
        _decoder(32, 4096, 32, 32000, kv_heads=8, intermediate=14336, positions=32768, rope_theta=1e6,
                 rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2),
    ),
    (
        # Qwen team 2025.
        "qwen3-235b-a22b", "qwen3_moe", "causal", 235_093_634_560, 4096, 1024,
        _decoder(94, 4096, 64, 151936, kv_heads=4, intermediate=12288, positions=40960, rope_theta=1e6, head_dim=128,
                 num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
                 tie_word_embeddings=False),
    ),
    (
        # DeepSeek-AI 2024, without the module that predicts further tokens.
        "deepseek-v3", "deepseek_v3", "causal", 671_026_404_352, 4096, 15360,
        _latent(61, 7168, 128, 129280, dense=3, intermediate=18432, experts=256, chosen=8, width=2048, groups=(8, 4),
                ranks=(1536, 512), head_dims=(128, 64, 128), positions=4096),
    ),
    (
        # Black et al. 2022: a quarter of each head's features is rotated, both halves of a block in parallel.
        "gpt-neox-20b", "gpt_neox", "causal", 20_554_567_680, 2048, 16,
        {
            "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64, "intermediate_size": 24576,
            "vocab_size": 50432, "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    (
        "llama3.2-1b", "llama", "causal", 1_235_814_400, 4096, 32,
        _decoder(16, 2048, 32, 128256, kv_heads=8, intermediate=8192, positions=131072, rms_norm_eps=1e-5,
                 tie_word_embeddings=True, bos_token_id=128000, eos_token_id=128001,
                 rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    ),
    (
        "llama2-7b", "llama", "causal", 6_738_415_616, 4096, 16,
        _decoder(32, 4096, 32, 32000, kv_heads=32, intermediate=11008, positions=4096, rms_norm_eps=1e-5),
    ),
    (
        "llama2-13b", "llama", "causal", 13_015_864_320, 4096, 16,
        _decoder(40, 5120, 40, 32000, kv_heads=40, intermediate=13824, positions=4096, rms_norm_eps=1e-5),
    ),
    (
        "llama2-70b", "llama", "causal", 68_976_648_192, 4096, 16,
        _decoder(80, 8192, 64, 32000, kv_heads=8, intermediate=28672, positions=4096, rms_norm_eps=1e-5),
    ),
    (
        "llama3-8b", "llama", "causal", 8_030_261_248, 8192, 8,
        _decoder(32, 4096, 32, 128256, kv_heads=8, intermediate=14336, positions=8192, rope_theta=5e5,
                 rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001),
    ),
    (
        "llama3-70b", "llama", "causal", 70_553_706_496, 8192, 8,
        _decoder(80, 8192, 64, 128256, kv_heads=8, intermediate=28672, positions=8192, rope_theta=5e5,
                 rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001),
    ),
    (
        "llama3-405b", "llama", "causal", 405_853_388_800, 8192, 16,
        _decoder(126, 16384, 128, 128256, kv_heads=8, intermediate=53248, positions=131072, rope_theta=5e5,
                 rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001),
    ),
)  # fmt: skip

PRESETS: Mapping[str, Preset] = {
    name: Preset(
        name=name,
        model_type=model_type,
        task=task,
        parameters=parameters,
        seq_len=seq_len,
        global_batch=global_batch,
        arguments=arguments,
    )
    for name, model_type, task, parameters, seq_len, global_batch, arguments in _TABLE
}
"""All presets by name, the tiny ones first."""


_ENDINGS = re.compile(r"-(hf|instruct|thinking|chat|base|it|pretrain|v\d[\d.]*|sft|uncased|\d{4})$")


def preset_of(name: str) -> str | None:
    """The preset that a hub id or a recipe's name refers to; None if there is none.

    >>> preset_of("meta-llama/Meta-Llama-3-8B-Instruct"), preset_of("llama3_8b"), preset_of("deepseek_v3-671B")
    ('llama3-8b', 'llama3-8b', 'deepseek-v3')
    """
    text = name.lower().rpartition("/")[2].replace("_", "-").removeprefix("meta-")
    while text not in PRESETS and (shorter := _ENDINGS.sub("", text)) != text:
        text = shorter
    joined = re.sub(r"^([a-z]+)-(\d)", r"\1\2", text)
    # Llama 3.1 and 3.3 have the sizes of Llama 3.
    for each in (text, joined, re.sub(r"^llama3\.[13]-", "llama3-", joined)):
        if each in PRESETS:
            return each
    # A family of one size, which the name states.
    family, _, size = text.rpartition("-")
    named = PRESETS.get(family)
    return family if named is not None and size == f"{named.parameters / 1e9:.0f}b" else None


def list_presets() -> list[dict[str, Any]]:
    """A row per preset: name, family, parameters, layers, hidden, heads, vocabulary, seq_len, global_batch."""
    return [
        {
            "name": each.name,
            "family": each.model_type,
            "parameters": each.parameters,
            **each.shape(),
            "seq_len": each.seq_len,
            "global_batch": each.global_batch,
        }
        for each in PRESETS.values()
    ]
