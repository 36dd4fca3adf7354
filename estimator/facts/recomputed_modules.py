"""Modules that each block recomputes in backward, as Megatron-LM's `--recompute-modules` names them.

A recomputed module keeps its inputs only; its other tensors are live again while its block runs backward (Megatron-LM,
docs of `recompute_modules` in core/transformer/transformer_config.py).
"""

from collections.abc import Iterable
from dataclasses import replace

from ...base.errors import UsageError, unknown
from .model_facts import Matmul, ModelFacts, Part, PerToken, Rebuilt, Shape, bytes_of, kept_inside

MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


def modules_of(text: str | None) -> frozenset[str]:
    """The modules in a text such as `moe_act+layernorm`.

    Raises:
        UsageError: one is unknown.
    """
    names = frozenset(text.replace("+", " ").split() if text else ())
    for name in names:
        if name not in MODULES:
            raise UsageError(f"recompute_modules: {unknown('module', name, MODULES)}")
    return names


def with_modules(facts: ModelFacts, modules: Iterable[str]) -> ModelFacts:
    """The facts if each block recomputes these modules; unchanged for traced models, whose tensors are not known by module."""
    names = frozenset(modules)
    if not names or facts.shape is None:
        return facts
    width = bytes_of(facts.precision)
    lean = facts.fusion or facts.kernels
    parts = tuple(
        _without(part, facts.shape, names, width, lean) if part.role == "block" else part for part in facts.parts
    )
    return replace(facts, parts=parts)


def _without(part: Part, shape: Shape, names: frozenset[str], width: int, lean: bool) -> Part:
    """A block that recomputes these modules."""
    saved, mixture = part.saved, part.experts > 0
    norms = 2.0 * width * shape.hidden if "layernorm" in names else 0.0
    scores = saved.scores if "core_attn" in names else 0.0
    sharded = rows = products = traffic = 0.0
    flops = sum(item.k * item.n * item.count * item.rows for item in part.matmuls)

    def share(chosen: Iterable[Matmul]) -> float:
        return sum(item.k * item.n * item.count * item.rows for item in chosen) / flops

    inner = shape.experts_per_token * (shape.expert_intermediate or shape.intermediate or 0) if mixture else 0
    experts = [item for item in part.matmuls if item.experts > 1]
    kept = kept_inside(shape, width, lean)
    if "core_attn" in names and part.attention is not None:
        sharded += 4.0 * shape.heads if not scores else 0.0
    if "mla_up_proj" in names and shape.kv_lora_rank:
        heads = shape.heads * width
        dim = shape.head_dim or shape.hidden // shape.heads
        sharded += heads * (2 * (dim + shape.rope_head_dim) + (shape.v_head_dim or dim))
        products += share(item for item in part.matmuls if item.k in (shape.q_lora_rank, shape.kv_lora_rank))
    if mixture and "moe" in names:
        sharded, rows, products = sharded + kept * inner, saved.rows, products + share(experts)
    elif mixture and "moe_act" in names:
        # The router's shares are then part of the activation, so that results of experts are not kept either.
        sharded, rows, traffic = sharded + float(width * inner), saved.rows / 2, traffic + kept * inner
    if mixture and names & {"moe", "shared_experts"} and shape.shared_intermediate:
        sharded += kept * shape.shared_intermediate
        products += share(part.matmuls[-2:])
    if not mixture and "mlp" in names:
        sharded += kept * (shape.intermediate or 4 * shape.hidden)
        products += share(part.matmuls[-2:])
    total = part.traffic
    moved = total.sequence + total.sharded + total.rows + total.whole
    traffic += (total.sequence / 2 if norms else 0.0) + (total.sharded / 2 if products else 0.0)
    return replace(
        part,
        saved=replace(
            saved,
            sequence=saved.sequence - norms,
            sharded=max(saved.sharded - sharded, 0.0),
            scores=saved.scores - scores,
            rows=saved.rows - rows,
        ),
        # One block's are live again while it runs backward.
        transient=PerToken(
            whole=part.transient.whole,
            sequence=part.transient.sequence + norms,
            sharded=part.transient.sharded + sharded,
            scores=part.transient.scores + scores,
            rows=part.transient.rows + rows,
        ),
        rebuilt=Rebuilt(
            products=min(products, 1.0),
            attention=1.0 if "core_attn" in names else 0.0,
            traffic=min(traffic / moved, 1.0) if moved else 0.0,
            exchange=1.0 if mixture and "moe" in names else 0.0,
        ),
    )
