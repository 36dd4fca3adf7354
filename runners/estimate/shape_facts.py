"""Facts of a transformer from its shape numbers, where there is no model to trace."""

from ...errors import UsageError, unknown
from .model_facts import Attention, Matmul, ModelFacts, Part, PerToken, Shape

FLASH = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that keep no scores."""


def bytes_of(precision: str) -> int:
    """Bytes of an activation that a product reads, at a value of the knob `precision`."""
    return 4 if precision == "fp32" else 2


def facts_of(shape: Shape, *, precision: str, attention: str, fusion: bool, kernels: bool) -> ModelFacts:
    """Counts parameters, products, saved activations and memory traffic of `shape`.

    Saved activations are those of Korthikanti et al., arXiv:2205.05198, section 4, generalised to grouped key
    and value heads, gated feed-forward networks and rotary positions. Without `fusion` or `kernels` norms and
    activation functions are the chains of plain operators that transformers runs, which keep more and read
    memory more often; with either they are one kernel each.
    """
    if attention not in ("eager", *FLASH):
        raise UsageError(unknown("attention", attention, ("eager", *FLASH)))
    lean = fusion or kernels
    b = bytes_of(precision)
    # Under autocast the residual stream and the norms stay fp32, products and attention are half.
    r = 2 if precision == "bf16_pure" else 4
    h, v = shape.hidden, shape.vocabulary
    block = _block(shape, b, r, attention, lean)
    norm_parameters = h * (2 if shape.biases else 1)
    parts = [
        Part(
            name="embedding",
            role="embedding",
            parameters=v * h + shape.positions * h,
            sharded=v * h,
            saved=PerToken(whole=8.0, sequence=h if shape.dropout else 0.0),
            traffic=PerToken(sequence=2.0 * r * h),
            kernels=4.0 if shape.positions else 2.0,
        ),
        block,
        Part(
            name="norm",
            role="norm",
            parameters=norm_parameters,
            saved=PerToken(sequence=_norm_saved(h, b, r, shape.biases, lean)),
            traffic=PerToken(sequence=_norm_traffic(h, b, r, lean)),
            kernels=1.0 if lean or shape.biases else 6.0,
        ),
        Part(
            name="head",
            role="head",
            parameters=0 if shape.tied else v * h,
            sharded=0 if shape.tied else v * h,
            matmuls=(Matmul(k=h, n=v, split="column"),),
            saved=PerToken(),
            kernels=1.0,
        ),
        Part(
            name="loss",
            role="loss",
            # The products' output, its fp32 copy and the log-probabilities that backward needs.
            saved=PerToken(sharded=float(v * (4 if b == 4 else 2 + 4 + (0 if lean else 4)))),
            # Their gradient in fp32, and in the precision of the head.
            transient=PerToken(sharded=float(v * (4 + (0 if lean else b)))),
            traffic=PerToken(sharded=float(v * (b + (8 if lean else 16)))),
            kernels=3.0 if lean else 8.0,
        ),
    ]
    return ModelFacts(
        name=shape.name,
        parts=tuple(parts),
        precision=precision,
        attention=attention,
        fusion=fusion,
        kernels=kernels,
        tied=shape.tied,
        vocabulary=v,
        shape=shape,
    )


def _norm_saved(h: int, b: int, r: int, layer_norm: bool, lean: bool) -> float:
    """Input and output of a norm, and what the plain operators of an RMSNorm keep between them."""
    if lean or layer_norm:
        return float((r + b) * h)
    # fp32 copy of a half-precision input, normalised values before the weight.
    return float((4 + r + b) * h)


def _norm_traffic(h: int, b: int, r: int, lean: bool) -> float:
    return float((r + b) * h if lean else (2 * r + 20 + b) * h)


def _block(shape: Shape, b: int, r: int, attention: str, lean: bool) -> Part:
    h, heads = shape.hidden, shape.heads
    kv_heads = shape.kv_heads or heads
    dim = shape.head_dim or h // heads
    inner = shape.intermediate or 4 * h
    q, kv = heads * dim, kv_heads * dim
    gates = 2 if shape.gated else 1
    matmuls = (
        Matmul(k=h, n=q + 2 * kv, split="column"),
        Matmul(k=q, n=h, split="row"),
        Matmul(k=h, n=inner, split="column", count=1)
        if gates == 1
        else Matmul(k=h, n=2 * inner, split="column"),
        Matmul(k=inner, n=h, split="row"),
    )
    weights = sum(item.k * item.n for item in matmuls)
    sharded_biases = (q + 2 * kv + inner * gates) if shape.biases else 0
    whole = (2 * h if shape.biases else 0) + 2 * h * (2 if shape.biases else 1)
    fused_attention = attention in FLASH
    mask = 1 if shape.dropout else 0

    sequence = 2 * _norm_saved(h, b, r, shape.biases, lean) + 2 * mask * h
    sharded = b * (q + 2 * kv) + b * q  # rotated queries and keys, values; the output
    if fused_attention:
        sharded += 4 * heads  # log-sum-exp of a query's scores
    if not lean and kv_heads < heads and not fused_attention:
        sharded += b * 2 * (q - kv)  # keys and values repeated for every query head
    # SwiGLU keeps gate, up, act(gate) and the product; fused it recomputes act(gate). GELU keeps both its
    # ends.
    sharded += b * inner * ((3 if lean else 4) if shape.gated else 2)
    # fp32 softmax, its copy in the precision of the product, dropout's mask and output.
    scores = 0.0 if fused_attention else float((b if lean else 4 + (b if b == 2 else 0)) + mask * (1 + b))

    rotary = 0 if shape.positions else (2 * b * (q + kv) if lean else 6 * b * (q + kv))
    activation = b * inner * ((3 if lean else 5) if shape.gated else 2)
    score_traffic = 0.0 if fused_attention else float((4 if lean else 10) * b)
    return Part(
        name="block",
        role="block",
        count=shape.layers,
        parameters=weights + sharded_biases + whole,
        sharded=weights + sharded_biases,
        matmuls=matmuls,
        attention=Attention(heads=heads, kv_heads=kv_heads, head_dim=dim, causal=shape.causal),
        saved=PerToken(sequence=float(sequence), sharded=float(sharded), scores=scores),
        boundary=float(r * h),
        transient=PerToken(sequence=float(2 * r * h), sharded=float(b * inner * gates)),
        traffic=PerToken(
            sequence=2 * _norm_traffic(h, b, r, lean) + 2.0 * 3 * r * h,
            sharded=float(rotary + activation),
            scores=score_traffic,
        ),
        kernels=(20.0 if lean else 40.0) + (0.0 if fused_attention else 6.0),
    )
