"""The check that a model computes the same in a parallel configuration as one process, and a table of such cells.

It holds if, without dropout and in float32, the loss of the first step, all its gradients, and all weights after three
steps equal those of one process at the same global batch, up to rounding (`schedule/comparison.py`).

A capacity drops rows of experts by the tokens of a forward pass on one rank, so one process is then given the same
capacity and the same micro-batches: those of the first rank, then those of the second, and so on. Ranks must not share
samples (`sp`, `cp`, runs of a smaller `tp`), which would divide these tokens.

A cell of the table is a family at a tiny size and a combination of knobs. For a combination that a family does not
support there is a reason.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from redline.base._torch import dynamo
from redline.knobs.rules import RuleContext, refusal as broken_rule
from redline.knobs.strategy import Strategy
from redline.models.architecture import Architecture
from redline.models.families.standard import StandardSchedule
from redline.models.huggingface import hugging_face_workload
from redline.models.skeleton import experts_of, skeleton
from redline.models.spaces import runs_of
from redline.models.wide_resnet import wide_resnet
from redline.schedule import comparison, create_schedule
from redline.schedule.comparison import Comparison, Departure, Numbers, Tolerance, allowance, scale, unit_roundoff
from redline.training.training import Training

STEPS = 3
LEARNING_RATE = 1e-3
EPSILON = 1e-2
"""Epsilon of AdamW, in the order of the gradients: with the usual 1e-8 their rounding errors alone would move weights."""

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
        reasons.append((broken_rule(Strategy.of(config), known) or "").partition(": ")[2])
    if config.get("zero", 0) >= 2 and config.get("pp", 1) > 1:
        reasons.append(support.zero_in_stages)
    if config.get("kernels"):
        reasons.append(workload.schedule.no_kernels(create_schedule(skeleton(workload))))
    return next((reason for reason in reasons if reason), "")


def _support(workload):
    return workload.schedule.support(create_schedule(skeleton(workload)))


def compare_cell(family, combination, seed=0):
    """Compares one cell with one process; called alike on every rank of an initialised process group of the right size."""
    return departure(tiny(family, combination), COMBINATIONS[combination], seed)


def departure(workload, config, seed=0, expected=None):
    """Returns the deviation of a workload in a configuration from one process in float32, on this rank.

    Its model must not draw random numbers (dropout off). Its optimizer is replaced by AdamW with an epsilon in the
    order of the gradients.

    Args:
        config: its configuration, of precision fp32 or bf16; on several ranks, called alike on every rank.
        expected: the result of `reference` for the workload, the seed and `for_one_process(config)`, if known.
    """
    expected = expected or reference(workload, seed, for_one_process(config))
    if config.get("fusion"):
        # The limit on compilations counts per function, and models share functions; beyond it nothing is compiled.
        torch.compiler.reset()
    with dynamo.config.patch(fail_on_recompile_limit_hit=True) if config.get("fusion") else nullcontext():
        numbers, _ = _train(replace(workload, optimizer=adamw), config, seed)
    exact = config.get("precision", "fp32") == "fp32"
    allowed = expected.allowed if exact else expected.allowed_half
    return compare(expected.trained, numbers, allowed, workload.global_batch * (workload.seq_len or 1))


def for_one_process(config):
    """Returns the configuration in which one process trains the same as ranks in another one."""
    same = ("capacity_factor", "micro_batch") if config.get("capacity_factor") else ()
    return {name: config[name] for name in same}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The expected values of a comparison."""

    trained: Numbers
    """Results of one process in float32."""
    allowed: float
    """Allowed rounding error of a gradient in float32."""
    allowed_half: float
    """Allowed rounding error of a gradient in bfloat16."""


def reference(workload, seed=0, config=None):
    """Returns the results of one process, computed on each rank by itself; `config` has knobs that are not neutral."""
    numbers, model = _train(replace(workload, optimizer=adamw), config or {}, seed, alone=True)
    batch = workload.batch(workload.global_batch, 0)
    rows = max(tensor.numel() for tensor in (batch.values() if isinstance(batch, Mapping) else batch))
    exact, half = (allowance(model, rows, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    return Reference(trained=numbers, allowed=exact, allowed_half=half)


def adamw(params, fused=False):
    """Returns the optimizer of every comparison."""
    return torch.optim.AdamW(params, lr=LEARNING_RATE, eps=EPSILON, fused=fused or None)


def trained(model, passes, update):
    """Returns the results of `STEPS` steps with `adamw`: loss and gradients of the first, weights after the last.

    `passes` returns the loss; `update` discards the gradients.
    """
    loss = float(passes())
    gradients = comparison.gradients_of(model)
    update()
    for _ in range(STEPS - 1):
        passes()
        update()
    return Numbers(loss=loss, gradients=gradients, weights=comparison.weights_of(model))


def compare(expected, found, allowed, terms):
    """Returns the deviation of the results of `trained` on this rank from those on one process.

    Rounding may change a gradient by `allowed`; the loss is a mean of `terms` tokens or samples.
    """
    assert found.gradients.keys() == found.weights.keys() & expected.gradients.keys()
    loss = comparison.loss_allowance(allowed, terms)
    tolerance = replace(Tolerance.of_tensors(allowed), loss=loss)
    first = comparison.compare(replace(expected, weights={}), replace(found, weights={}), tolerance)
    steepest, most = comparison.largest(expected.gradients), comparison.largest(expected.weights)
    weights = []
    for name, weight in found.weights.items():
        over = scale(expected.weights[name], most)
        departs = comparison.departure(expected.weights[name], weight, over=over)
        gradient = allowed * scale(expected.gradients.get(name), steepest)
        limit = adamw_allowance(gradient, weight, lr=LEARNING_RATE, eps=EPSILON, steps=STEPS) / over
        description = f"{name} after the optimizer's steps departs by {departs:.2g}"
        weights.append(Departure(kind="weights", by=departs, allowed=limit, description=description))
    return Comparison((*first.departures, *weights))


def adamw_allowance(gradient, weight, *, lr, eps, steps):
    """Returns the largest absolute departure of a weight after some steps of AdamW.

    A step is lr m / (s + eps), where m is a mean of gradients and s the root of a mean of their squares, |m| <= s. If
    gradients depart by g, so do m and s, and the step by lr g (1 / (s + eps) + s / (s + eps)**2), at most lr g / eps,
    where s is zero. With the usual eps of 1e-8 the rounding of a gradient that is almost zero therefore reverses a
    step, and the comparison is meaningless: eps must be of the gradients' magnitude. The departure of weights changes
    the following gradients, so that each step doubles it. Each step rounds the weight twice (decay and update), in
    both runs.

    Args:
        gradient: largest departure of the gradient, absolute.
    """
    rounded = 4 * steps * unit_roundoff(weight.dtype) * scale(weight)
    return lr / eps * gradient * (2**steps - 1) + rounded


def _train(workload, config, seed, alone=False):
    """Trains three steps on the same batches in any configuration; returns the results and the model."""
    cuda = torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rank, ranks = (0, 1) if alone or not dist.is_initialized() else (dist.get_rank(), dist.get_world_size())
    training = Training(workload, {"attention": "eager", **config}, device, seed=seed, rank=rank, world_size=ranks)
    return trained(training.model, training.passes, training.update), training.model
