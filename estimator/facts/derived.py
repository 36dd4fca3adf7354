"""Facts that follow from those of a model's whole training: under the knob `kernels`, of trainings of some blocks or in a low
rank, and with modules that each block recomputes.

`kernels` computes the loss without the logits of a micro-batch (`schedule/primitives/fused_loss.py` describes how). Notation:
H hidden size, V vocabulary, C tokens of a chunk, r bytes of a number in a hidden state, c bytes of one in the products, 4 or 2.

| of the head | in bytes |
|---|---|
| kept for backward, a token | r H, the gradient of its hidden state, in place of c H, its input |
| live with a chunk, a token of it | 4 V, and c V in addition if c is not 4 |
| live while the loss is computed | 4 V H, the gradient of the weight |
| moved, a token, on a chunk | 40 V by operators, 12 V by casts if c is not 4 |
| moved, a token, by adding to the weight's gradient | 8 V H / C, or (2 c + 8) V H / C if c is not 4 |
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...base.errors import UsageError, unknown
from ...knobs.meaning import most_chunk
from .model_facts import FactsSource, Matmul, ModelFacts, Part, PerToken, Rebuilt, Shape, bytes_of, kept_inside

ON_A_CHUNK = 40
"""Bytes that operators move for each logit: maximum, difference, exponential, sum, quotient, share."""
OPERATORS = 20.0
"""Operators of a chunk."""


def unformed(facts: ModelFacts) -> ModelFacts:
    """The facts with a loss that does not form the logits, from those with logits; unchanged without a vocabulary."""
    head = _head(facts)
    if head is None:
        note = "kernels: no head onto a vocabulary; as without it"
        return replace(facts, kernels=True, notes=(*facts.notes, note))
    chunk, width = most_chunk(head.k), bytes_of(facts.precision)
    state = 2 if facts.precision == "bf16_pure" else 4
    added = (8 if width == 4 else 2 * width + 8) * head.n * head.k / chunk
    moved = head.n * (ON_A_CHUNK + (0 if width == 4 else 12)) + added
    parts = []
    for part in facts.parts:
        if head in part.matmuls:
            saved = replace(part.saved, whole=part.saved.whole + head.k * (state - width))
            part = replace(part, saved=saved, traffic_backward=None)
        if part.role == "loss":
            part = replace(
                part,
                saved=PerToken(whole=part.saved.whole),
                chunk=chunk,
                transient=PerToken(sharded=float(head.n * (4 + (0 if width == 4 else width)))),
                transient_fixed=4.0 * head.n * head.k,
                traffic=PerToken(sharded=moved),
                traffic_backward=PerToken(),
                kernels=OPERATORS,
            )
        parts.append(part)
    return replace(facts, kernels=True, parts=tuple(parts))


def _head(facts: ModelFacts) -> Matmul | None:
    """The product that computes the logits."""
    has_loss = any(part.role == "loss" for part in facts.parts)
    products = [item for part in facts.parts if part.role == "head" for item in part.matmuls]
    products = [item for item in products if item.n == facts.vocabulary]
    return products[-1] if products and has_loss else None


def with_loss(facts: ModelFacts, loss: str | None) -> ModelFacts:
    """The facts with cross-entropy computed by one of `estimator.setup.LOSSES`; None does not change it.

    `plain` has the logits, their fp32 copy and its logarithms, then the gradient of both. `parallel` has their fp32 copy, which
    becomes the softmax, and the gradient in 16 bits; the passes over memory are: copy, maximum, subtract, exponential, sum,
    divide, then scale and cast (Megatron-LM, core/tensor_parallel/cross_entropy.py). `compiled` keeps the logits and writes their
    gradient beside them: read for maximum and sum, then read and written once. `fused` has the logits, which their gradient
    replaces: read twice, written once.
    """
    head = _head(facts)
    if loss is None or head is None:
        return facts
    if loss == "chunked":
        return replace(unformed(facts), kernels=facts.kernels)
    width, count = bytes_of(facts.precision), float(head.n)
    saved, spike, moved, back, kernels = {
        "plain": (width + (8 if width < 4 else 4), 4 + width, width + 16, 2 * width + 32, 8.0),
        "parallel": (4, width, width + 36, width + 12, 8.0),
        "compiled": (width, width, 2 * width, 2 * width, 4.0),
        "fused": (width, 0, 2 * width, width, 2.0),
    }[loss]
    parts = tuple(
        replace(
            part,
            saved=PerToken(whole=part.saved.whole, sharded=count * saved),
            transient=PerToken(sharded=count * spike),
            traffic=PerToken(sharded=count * moved),
            traffic_backward=PerToken(sharded=count * back),
            kernels=kernels,
            chunk=0,
            transient_fixed=0.0,
        )
        if part.role == "loss"
        else part
        for part in facts.parts
    )
    return replace(facts, parts=parts)


@dataclass(frozen=True)
class PartlyTrained:
    """The facts of a model of which only some blocks are trained."""

    source: FactsSource
    blocks: int
    """Number of trained blocks."""
    last: bool
    """True if they are the last ones, at which backward ends; otherwise it passes through all blocks."""

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> ModelFacts:
        """The facts of one variant."""
        facts = self.source.facts(precision=precision, attention=attention, fusion=fusion, kernels=kernels)
        parts: list[Part] = []
        remaining = max(0, facts.blocks - self.blocks)
        for part in facts.parts:
            if part.role != "block":
                parts.append(_frozen(part))
                continue
            frozen = min(remaining, part.count)
            remaining -= frozen
            if frozen:
                parts.append(replace(_passed(part) if self.last else _frozen(part), count=frozen))
            if part.count > frozen:
                parts.append(replace(part, count=part.count - frozen))
        return replace(facts, parts=tuple(parts))


def _frozen(part: Part) -> Part:
    """A part whose weights get no gradients."""
    products = tuple(replace(product, trainable=False) for product in part.matmuls)
    return replace(part, frozen=part.parameters, matmuls=products)


def _passed(part: Part) -> Part:
    """A frozen block before all trained ones, which keeps nothing for backward. Its backward is not free here, as it is in fact:
    one product of each matrix is counted."""
    return replace(_frozen(part), saved=PerToken(), boundary=0.0, saved_fixed=0.0, traffic_backward=PerToken())


def low_rank_share(facts: ModelFacts, rank: int) -> float:
    """Share of an optimizer's two states that is kept if gradients of the blocks' matrices are projected to a rank: the states of
    the longer dimension, and the projection of the shorter one (GaLore, arXiv:2403.03507, section 4)."""
    kept = float(facts.parameters)
    for part in facts.parts:
        for item in part.matmuls if part.role == "block" else ():
            narrow = min(rank, item.k, item.n)
            projected = narrow * max(item.k, item.n) + narrow * min(item.k, item.n) / 2
            kept -= part.count * item.count * item.experts * (item.k * item.n - projected)
    return kept / facts.parameters


MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that each block can recompute in backward, by the names of Megatron-LM's `--recompute-modules`. A recomputed module
keeps its inputs only; its other tensors are live again while its block runs backward (Megatron-LM, docs of
`recompute_modules` in core/transformer/transformer_config.py)."""


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
