"""Facts under the knob `kernels`: the loss without the logits of a micro-batch.

Notation: H hidden size, V vocabulary, C tokens of a chunk, r bytes of a number in a hidden state, c bytes
of one in the products, 4 or 2. `schedule/fused_logits.py` describes the computation.

| of the head | in bytes |
|---|---|
| kept for backward, a token | r H, the gradient of its hidden state, in place of c H, its input |
| live with a chunk, a token of it | 4 V, and c V in addition if c is not 4 |
| live while the loss is computed | 4 V H, the gradient of the weight |
| moved, a token, on a chunk | 40 V by operators, 12 V by casts if c is not 4 |
| moved, a token, by adding to the weight's gradient | 8 V H / C, or (2 c + 8) V H / C if c is not 4 |
"""

from dataclasses import replace

from ...knobs.meaning import most_chunk
from .model_facts import Matmul, ModelFacts, PerToken, bytes_of

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
