"""A table of families and parallel configurations.

A cell is a family at a tiny size and a combination of knobs. It passes if it computes the same as one process
(`redline.testing.numerics`). For a combination that a family does not support there is a reason.
"""

from math import prod

from redline.knobs.rules import RuleContext, refusal as broken_rule
from redline.knobs.strategy import Strategy
from redline.models.architecture import Architecture
from redline.models.families.standard import StandardSchedule
from redline.models.huggingface import hugging_face_workload
from redline.models.skeleton import experts_of, skeleton
from redline.models.spaces import runs_of
from redline.models.wide_resnet import wide_resnet
from redline.schedule import create_schedule
from redline.testing.numerics import (
    EPSILON,
    LEARNING_RATE,
    STEPS,
    Reference,
    adamw,
    compare,
    departure,
    for_one_process,
    reference,
    trained,
)

__all__ = [
    "COMBINATIONS",
    "EPSILON",
    "FAMILIES",
    "LEARNING_RATE",
    "SAMPLES",
    "STEPS",
    "Reference",
    "adamw",
    "compare",
    "compare_cell",
    "departure",
    "for_one_process",
    "is_deep",
    "obstacle",
    "ranks",
    "reference",
    "refusal",
    "tiny",
    "trained",
]

SAMPLES = 8
"""Global batch."""

COMBINATIONS = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2, "micro_batch": 2},
    "zero1": {"dp": 2, "zero": 1, "micro_batch": 2},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp2 gpipe": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "gpipe"},
    "pp2 1f1b": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "pp2 interleaved": {"pp": 2, "virtual_stages": 2, "grad_accum": 4, "pipeline_schedule": "interleaved"},
    "pp2 zero bubble": {"pp": 2, "virtual_stages": 2, "grad_accum": 4, "pipeline_schedule": "zero_bubble"},
    "pp2 zbv": {"pp": 2, "virtual_stages": 2, "grad_accum": 4, "pipeline_schedule": "zbv"},
    "pp2 uneven": {"pp": 2, "grad_accum": 4, "stage_blocks": "1,3", "checkpoint_ratio": 0.5},
    "pp2+ckpt": {"pp": 2, "grad_accum": 4, "checkpoint_ratio": 0.5},
    "zero3+fusion": {"dp": 2, "zero": 3, "fusion": True},
    "tp2·dp2+zero3": {"tp": 2, "dp": 2, "zero": 3},
    "hsdp2+zero2": {"dp": 4, "hsdp": 2, "zero": 2, "micro_batch": 1},
    "hsdp2+zero3": {"dp": 4, "hsdp": 2, "zero": 3, "micro_batch": 1},
    "tp2·pp2": {"tp": 2, "pp": 2, "grad_accum": 4},
    "pp2·dp2": {"pp": 2, "dp": 2, "grad_accum": 2},
    "pp2·dp2+zero1": {"pp": 2, "dp": 2, "zero": 1, "grad_accum": 2},
    "pp2·dp2+zero2": {"pp": 2, "dp": 2, "zero": 2, "grad_accum": 2},
    "sp2": {"sp": 2, "grad_accum": 2},
    "sp4": {"sp": 4, "zero": 3},
    "sp2·tp2": {"sp": 2, "tp": 2, "sequence_parallel": True},
    "sp2·dp2+zero3": {"sp": 2, "dp": 2, "zero": 3},
    "pp2·sp2": {"pp": 2, "sp": 2, "grad_accum": 2, "checkpoint_ratio": 0.5},
    "cp2": {"cp": 2, "grad_accum": 2},
    "cp4": {"cp": 4},
    "cp2+zero3": {"cp": 2, "zero": 3, "attention": "sdpa"},
    "cp2·tp2": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2·sp2": {"cp": 2, "sp": 2, "zero": 2},
    "pp2·cp2": {"pp": 2, "cp": 2, "grad_accum": 2, "checkpoint_ratio": 0.5},
    "ep2": {"dp": 2, "ep": 2, "grad_accum": 2},
    "ep4": {"dp": 4, "ep": 4, "checkpoint_ratio": 0.5},
    "ep2+zero1": {"dp": 2, "ep": 2, "zero": 1, "grad_accum": 2},
    "ep2+zero2": {"dp": 2, "ep": 2, "zero": 2, "grad_accum": 2},
    "ep2+zero3": {"dp": 2, "ep": 2, "zero": 3, "grad_accum": 2},
    "ep2·dp2": {"dp": 4, "ep": 2, "micro_batch": 1},
    "ep2·dp2+zero1": {"dp": 4, "ep": 2, "zero": 1, "micro_batch": 1},
    "ep2·dp2+zero2": {"dp": 4, "ep": 2, "zero": 2, "micro_batch": 1},
    "ep2·dp2+zero3": {"dp": 4, "ep": 2, "zero": 3, "micro_batch": 2},
    "ep2·tp2": {"dp": 2, "ep": 2, "tp": 2},
    "ep2·tp2+sp": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "zero": 3},
    "tp2 etp1": {"tp": 2, "etp": 1},
    "ep2·tp2 etp1": {"tp": 2, "ep": 2, "etp": 1, "grad_accum": 2},
    "ep2·tp2 etp1+sp": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "ep2·tp2·dp2 etp1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "zero": 1, "micro_batch": 2},
    "ep2·tp2·dp2 etp1+zero3": {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "zero": 3, "micro_batch": 2},
    "ep4·tp2 etp1": {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "micro_batch": 2},
    "ep4·tp2 etp1+sp": {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "zero": 2, "sequence_parallel": True},
    "ep2·tp2·pp2 etp1": {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "grad_accum": 4},
    "ep2·pp2": {"dp": 2, "ep": 2, "pp": 2, "grad_accum": 2},
    "ep2·pp2+zero2": {"dp": 2, "ep": 2, "pp": 2, "zero": 2, "grad_accum": 2},
    "ep2·pp2 zbv": {
        "dp": 2, "ep": 2, "pp": 2, "virtual_stages": 2, "grad_accum": 4, "pipeline_schedule": "zbv", "micro_batch": 1,
    },
    "ep2·cp2": {"cp": 2, "ep": 2, "grad_accum": 2},
    "ep2·sp2": {"dp": 2, "sp": 2, "ep": 2, "zero": 3},
    "ep2+fusion": {"dp": 2, "ep": 2, "fusion": True},
    "ep2+capacity": {"dp": 2, "ep": 2, "capacity_factor": 0.75, "micro_batch": 2},
    "ep2·dp2+capacity": {"dp": 4, "ep": 2, "zero": 3, "capacity_factor": 1.0, "micro_batch": 2},
    "runs tp1/tp2": {"tp": 2, "micro_batch": 4, "strategy": "0:tp1,ckpt 1:-"},
    "runs zero2/zero3": {"dp": 2, "zero": 2, "micro_batch": 2, "strategy": "0:- 1:zero3,ckpt"},
    "runs zero1/zero3": {"dp": 2, "zero": 1, "micro_batch": 2, "strategy": "0:zero3 1:-"},
    "runs tp1+zero3/tp2": {"tp": 2, "dp": 2, "micro_batch": 2, "strategy": "0:tp1,zero3 1:ckpt"},
    "runs tp2/tp1 zero3": {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2, "strategy": "0:zero2 1:tp1"},
    "runs tp2/tp1·sp2": {"tp": 2, "sp": 2, "zero": 1, "micro_batch": 4, "strategy": "0:- 1:tp1,zero0"},
    "runs tp1+sp2/tp2": {"tp": 2, "strategy": "0:tp1,sp2,ckpt 1:-"},
    "runs tp2/tp1+cp2": {"tp": 2, "strategy": "0:- 1:tp1,cp2,zero1"},
    "runs tp1+sp2/tp1+cp2": {"tp": 2, "dp": 2, "zero": 2, "strategy": "0:tp1,sp2 1:tp1,cp2,zero3"},
    "runs tp2/tp1+sp4·sp2": {"tp": 2, "sp": 2, "zero": 3, "strategy": "0:- 1:tp1,sp4"},
    "kernels": {"kernels": True, "grad_accum": 2},
    "tp2+kernels": {"tp": 2, "kernels": True},
    "zero3+kernels": {"dp": 2, "zero": 3, "kernels": True},
    "pp2+kernels": {"pp": 2, "grad_accum": 4, "kernels": True},
}  # fmt: skip
"""Knobs of every combination of the table by name; absent knobs are neutral."""

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 40,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**_SIZES, **_TOKENS, **_NO_DROPOUT}
_DECODER = {**_SIZES, **_TOKENS, "num_key_value_heads": 2}

# Tiny sizes: odd vocabularies to test padding, and fewer key-value heads where the family supports them.
FAMILIES = {
    "bert": ("masked", _ENCODER),
    "roberta": ("masked", _ENCODER),
    "albert": ("masked", {**_ENCODER, "embedding_size": 16}),
    "gpt2": (
        "causal",
        {
            "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 97, "n_positions": 32, **_TOKENS,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
    "gpt_neo": (
        "causal",
        {
            "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 97, "window_size": 4, **_TOKENS,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32,
        },
    ),
    "opt": (
        "causal",
        {
            "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 97,
            "max_position_embeddings": 32, "word_embed_proj_dim": 16, "dropout": 0.0, **_TOKENS,
        },
    ),
    "t5": (
        "seq2seq",
        {
            "num_layers": 2, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": 97,
            "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
        },
    ),
    "llama": ("causal", _DECODER),
    "qwen2": ("causal", _DECODER),
    "qwen3": ("causal", {**_DECODER, "head_dim": 8}),
    "mistral": ("causal", {**_DECODER, "sliding_window": 8}),
    "mixtral": ("causal", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "causal",
        {**_DECODER, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
         "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "causal",
        {
            **_SIZES, **_TOKENS, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8,
            "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    ),
    "gpt_neox": ("causal", {**_SIZES, **_TOKENS, "hidden_dropout": 0.0}),
    "vit": (
        "image",
        {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "image_size": 16, "patch_size": 4, "num_labels": 10, **_NO_DROPOUT,
        },
    ),
    "wide_resnet": ("image", {"depth": 10, "width": 1, "classes": 10}),
}  # fmt: skip
"""Task and configuration of every family of the table: tiny, two blocks, without dropout."""
_DEEPER = {
    "gpt2": {"n_layer": 4},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "t5": {"num_layers": 4},
    "wide_resnet": {"depth": 16},
}
"""Changes of a family's configuration that make four blocks or more; the default is `num_hidden_layers`."""


def tiny(family, combination="", deep=False):
    """Returns the workload of a family of the table, of four blocks or more if `deep` or if a combination needs them."""
    task, arguments = FAMILIES[family]
    if deep or is_deep(COMBINATIONS.get(combination, {})):
        arguments = {**arguments, **_DEEPER.get(family, {"num_hidden_layers": 4})}
    if family == "wide_resnet":
        return wide_resnet(arguments, name=family, spec=family, global_batch=SAMPLES)
    architecture = Architecture(model_type=family, arguments=arguments, task=task)
    return hugging_face_workload(
        architecture, name=family, spec=family, seq_len=None if task == "image" else 16, global_batch=SAMPLES
    )


def is_deep(config):
    """Returns True for a configuration whose workload has four blocks or more."""
    return config.get("pp", 1) * config.get("virtual_stages", 1) > 2 or "stage_blocks" in config


def ranks(combination):
    """Returns the number of ranks of a combination."""
    config = COMBINATIONS[combination]
    return prod(config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp"))


def obstacle(family, combination):
    """Returns the reason why a family does not support a combination; empty if it does."""
    return refusal(tiny(family, combination), COMBINATIONS[combination])


def refusal(workload, config):
    """Returns the reason why a workload with a StandardSchedule does not support a configuration; empty if it does."""
    assert isinstance(workload.schedule, StandardSchedule), "that of every family in the table"
    support = workload.once(_support)
    stages = config.get("pp", 1) * config.get("virtual_stages", 1)
    tp, sp, cp = (config.get(name, 1) for name in ("tp", "sp", "cp"))
    reasons = [support.tp(tp), support.sequences(sp, cp, tp), support.pp(stages)]
    if config.get("ep", 1) > 1 or config.get("etp") or config.get("capacity_factor"):
        reasons.insert(0, broken_rule(Strategy.of(config), RuleContext(experts=experts_of(workload))))
    if config.get("sequence_parallel"):
        reasons.append(support.sequence_parallel)
    if config.get("strategy") is not None or config.get("stage_blocks") is not None:
        known = RuleContext(no_stage_blocks=workload.schedule.no_stage_blocks, **runs_of(workload)._asdict())
        reasons.append(broken_rule(Strategy.of(config), known).partition(": ")[2])
    if config.get("zero", 0) >= 2 and config.get("pp", 1) > 1:
        reasons.append(support.zero_in_stages)
    if config.get("kernels"):
        reasons.append(support.kernels)
    return next((reason for reason in reasons if reason), "")


def _support(workload):
    return workload.schedule.support(create_schedule(skeleton(workload)))


def compare_cell(family, combination, seed=0):
    """Compares one cell with one process; called alike on every rank of an initialised process group of the right size."""
    return departure(tiny(family, combination), COMBINATIONS[combination], seed)
