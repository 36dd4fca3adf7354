"""Whether a family, spread over devices, still computes what one process computes: a declared table, and its check.

A cell is a family at a tiny size and a combination of knobs. It holds where, with dropout off and in float32, the
first step's loss, every gradient of it, and every weight after three steps are those of one process at the same
global batch. A combination that a family cannot follow has a reason instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .workload import Workload

SAMPLES = 8
"""Global batch."""
STEPS = 3
LOSS_TOLERANCE = 1e-5
"""Relative. A float32 sum of n terms in another order departs by about sqrt(n) * 2**-24 of its magnitude."""
GRADIENT_TOLERANCE = 1e-4
"""Of the largest magnitude in the same tensor, or of a hundredth of the largest in any: sums through all layers,
whose rounding is relative to terms that nearly cancel."""
WEIGHT_TOLERANCE = 2e-6
"""Absolute, beside weights of 0.02 and updates of up to LEARNING_RATE: AdamW divides by the gradient's own size,
so that where that is nearly nothing three steps carry its rounding into the weight."""
LEARNING_RATE = 1e-3
EPSILON = 1e-4
"""AdamW's: with the usual 1e-8 gradients that are zero but for rounding would move weights."""

COMBINATIONS: Mapping[str, Mapping[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp2 gpipe": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "gpipe"},
    "pp2 1f1b": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "pp2+ckpt": {"pp": 2, "grad_accum": 4, "checkpoint_ratio": 0.5},
    "zero3+fusion": {"dp": 2, "zero": 3, "fusion": True},
    "tp2·dp2+zero3": {"tp": 2, "dp": 2, "zero": 3},
    "tp2·pp2": {"tp": 2, "pp": 2, "grad_accum": 4},
    "pp2·dp2+zero2": {"pp": 2, "dp": 2, "zero": 2, "grad_accum": 2},
}
"""Every combination of the table by its name: knobs, absent ones neutral."""

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

# Tiny sizes: odd vocabularies, so that padding is tried; fewer key-value heads where there are such.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
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
"""Every family of the table: its task and its configuration, tiny and without dropout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """By how much a cell departs from one process, on one rank."""

    loss: float
    """Relative."""
    gradient: float
    """Of the largest magnitude, over all parameters that this rank holds."""
    weight: float
    """Absolute, after the last step."""
    where: str
    """The parameter whose gradient departs most."""
    parameters: tuple[str, ...]
    """Names of what this rank holds."""

    @property
    def holds(self) -> bool:
        """Whether all are within tolerance."""
        return (
            self.loss <= LOSS_TOLERANCE
            and self.gradient <= GRADIENT_TOLERANCE
            and self.weight <= WEIGHT_TOLERANCE
        )


def tiny(family: str) -> "Workload":
    """The workload of a family of the table."""
    from .huggingface import Architecture, hugging_face_workload
    from .wide_resnet import wide_resnet

    task, arguments = FAMILIES[family]
    if family == "wide_resnet":
        return wide_resnet(arguments, name=family, spec=family, global_batch=SAMPLES)
    architecture = Architecture(model_type=family, arguments=arguments, task=task)
    return hugging_face_workload(
        architecture, name=family, spec=family, seq_len=None if task == "image" else 16, global_batch=SAMPLES
    )


def ranks(combination: str) -> int:
    """How many ranks a combination takes."""
    config = COMBINATIONS[combination]
    return config.get("tp", 1) * config.get("pp", 1) * config.get("dp", 1)


def obstacle(family: str, combination: str) -> str:
    """Why a family cannot follow a combination; empty where it can."""
    return refusal(tiny(family), COMBINATIONS[combination])


def refusal(workload: "Workload", config: Mapping[str, Any]) -> str:
    """Why a workload whose schedule is a StandardSchedule cannot follow a configuration; empty where it can."""
    from ..schedule import create_schedule
    from .skeleton import skeleton

    support = workload.schedule.support(create_schedule(skeleton(workload)))
    reasons = [support.tp(config.get("tp", 1)), support.pp(config.get("pp", 1))]
    if config.get("sequence_parallel"):
        reasons.append(support.sequence_parallel)
    if config.get("zero"):
        reasons.append(support.zero)
    if config.get("zero", 0) >= 2 and config.get("pp", 1) > 1:
        reasons.append(support.zero_in_stages)
    return next((reason for reason in reasons if reason), "")


def check(family: str, combination: str) -> Departure:
    """One cell, on every rank of an initialised process group of the right size; all call it alike."""
    return departure(tiny(family), COMBINATIONS[combination])


def departure(workload: "Workload", config: Mapping[str, Any]) -> Departure:
    """By how much a workload in a configuration departs from one process, called on every rank alike.

    Its model must draw no random numbers (dropout off).
    """
    import torch

    workload = replace(workload, optimizer=_adamw)
    expected = _train(workload, {})
    if config.get("fusion"):
        # The limit on compilations counts by function, and models share some; past it nothing would be compiled.
        torch.compiler.reset()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            found = _train(workload, config)
    else:
        found = _train(workload, config)
    largest = max(float(each.abs().max()) for each in expected.gradients.values())
    gradient, where, weight = 0.0, "", 0.0
    for name, value in found.gradients.items():
        want = expected.gradients[name].double()
        scale = max(float(want.abs().max()), 0.01 * largest)
        departure = float((value.double() - want).abs().max()) / scale
        if not departure <= gradient:  # not a number included
            gradient, where = departure, name
    for name, value in found.weights.items():
        weight = max(weight, float((value - expected.weights[name]).abs().max()))
    assert set(found.gradients) == set(found.weights) & set(expected.gradients)
    return Departure(
        loss=abs(found.loss - expected.loss) / abs(expected.loss),
        gradient=gradient,
        weight=weight if torch.isfinite(torch.tensor(weight)) else float("inf"),
        where=where,
        parameters=tuple(found.weights),
    )


@dataclass(frozen=True, slots=True)
class _Trained:
    loss: float
    gradients: dict[str, "torch.Tensor"]
    weights: dict[str, "torch.Tensor"]


def _train(workload: "Workload", config: Mapping[str, Any]) -> _Trained:
    """Three steps on the same batches, whatever the configuration."""
    import torch
    import torch.distributed as dist

    from ..schedule.sharding import owner, whole
    from .training import Training

    cuda = torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if config else (0, 1)
    training = Training(workload, {"attention": "eager", **config}, device, rank=rank, world_size=ranks)

    def named(read: Any) -> dict[str, torch.Tensor]:
        # Tied weights by all of their names: stages hold them under different ones.
        found = training.model.named_parameters(remove_duplicate=False)
        return {name: whole(*owner(training.model, name), read(param)).clone() for name, param in found}

    loss = float(training.passes())
    gradients = named(lambda p: torch.zeros_like(p) if p.grad is None else p.grad.detach())
    training.optimizer.step()
    training.optimizer.zero_grad()
    for _ in range(STEPS - 1):
        training.step()
    return _Trained(loss, gradients, named(lambda p: p.detach()))


def _adamw(params: Any) -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(params, lr=LEARNING_RATE, eps=EPSILON)
