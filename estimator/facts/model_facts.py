"""Facts of a model that the estimator uses: parameters, products, saved activations, part by part."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Protocol

from ...base.errors import UsageError, unknown
from ...base.option import Option, check_options
from ...knobs.meaning import FORMATS

Variant = tuple[str, str, bool, bool]
"""Knobs that the facts of a model depend on: (precision, attention, fusion, kernels)."""
FLASH = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that keep no scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """One matrix product of the forward pass: (tokens * `rows`, k) times (k, n).

    Backward does two more of the same size.
    """

    k: int
    """Inner dimension of the whole, unsharded product."""
    n: int
    """Outer dimension of the whole, unsharded product."""
    split: str = "none"
    """Dimension that tensor parallelism divides: `column` n, `row` k, `none` neither."""
    count: int = 1
    """Products of this shape in one instance of the part."""
    rows: float = 1.0
    """Rows a token: below 1 if the product has fewer rows than tokens (a pooler), above if it has more (experts)."""
    trainable: bool = True
    """True if the weight gets a gradient; a frozen one costs one product in backward rather than two."""
    experts: int = 1
    """Number of experts of each mixture if these are its products, one each; otherwise 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The scaled dot-product attention of one block."""

    heads: int
    """Query heads of the whole layer."""
    kv_heads: int
    """Key and value heads of the whole layer."""
    head_dim: int
    """Elements of a head: the mean of those of queries and keys and those of values."""
    causal: bool = True
    """True if a fused kernel may skip the half above the diagonal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerToken:
    """Bytes a token, grouped by their divisors. `b = whole + sequence / s + sharded / tp + rows / d`.

    `s` is tp with sequence parallelism, else 1; `d` is tp where ranks divide tokens among whole experts (`etp=1`), else 1. Eager
    attention adds `scores` bytes for each head, query and key, divided by tp like the heads.
    """

    whole: float = 0.0
    """Kept in full by every tensor-parallel rank, with or without sequence parallelism."""
    sequence: float = 0.0
    """Between the tensor-parallel segments (norms, dropout, residual): divided by sequence parallelism only."""
    sharded: float = 0.0
    """Inside the tensor-parallel segments: divided by tp."""
    scores: float = 0.0
    """For each head, query and key; 0 for fused attention kernels."""
    rows: float = 0.0
    """Rows of experts."""

    def scaled(self, factor: float) -> "PerToken":
        """These bytes times a factor."""
        return PerToken(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """Shares of a part's forward that backward repeats although the part is not recomputed as a whole."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    """Of what the memory bandwidth bounds."""
    exchange: float = 0.0
    """Of the exchange of rows between experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A module that occurs once, or `count` identical modules (the repeated block)."""

    name: str
    """Name in the breakdown."""
    role: str
    """`embedding` (first pipeline stage), `block` (divided among the stages, checkpointed), `norm`, `head`, `loss` (last stage),
    or `other` (last stage)."""
    count: int = 1
    """Number of instances."""
    parameters: int = 0
    """Parameters of one instance, whole; a tied head has none of its own."""
    sharded: int = 0
    """The parameters that tensor parallelism divides; every rank has the rest."""
    frozen: int = 0
    """The parameters without gradient and optimizer state."""
    experts: int = 0
    """The parameters of the experts of mixtures, which `ep` ranks share."""
    routed: float = 0.0
    """Elements a token that are sent to experts, and as many that are returned."""
    matmuls: tuple[Matmul, ...] = ()
    """Products with weights, forward, of one instance."""
    attention: Attention | None = None
    """Its attention, not among `matmuls`."""
    saved: PerToken = PerToken()
    """Tensors that forward keeps for backward, one instance, at the facts' precision, attention and fusion."""
    boundary: float = 0.0
    """The instance's input, bytes a token (divided by sequence parallelism): all that a checkpointed one keeps."""
    transient: PerToken = PerToken()
    """Live in addition to `saved` at the instance's own peak: recomputed or backward temporaries, fp32 logits."""
    traffic: PerToken = PerToken()
    """Bytes that memory-bound operators (norms, activations, residuals, casts) read and write, forward."""
    traffic_backward: PerToken | None = None
    """The same in backward; None: twice the forward."""
    saved_fixed: float = 0.0
    """Bytes kept independent of the batch, one instance: autocast's copies of weights. Divided like `sharded` parameters; a
    checkpointed instance keeps none."""
    traffic_fixed: float = 0.0
    """Bytes moved in each forward independent of the batch: autocast's casts of weights."""
    kernels: float = 0.0
    """Kernels launched in forward, products and attention included; backward counts twice."""
    chunk: int = 0
    """Tokens that are processed at a time, 0 for all at once: `transient` is that of one chunk, or of half a micro-batch if that
    is less, and `kernels` are launched for every chunk."""
    rebuilt: Rebuilt = Rebuilt()
    """What backward repeats of an instance that is not checkpointed."""
    transient_fixed: float = 0.0
    """Bytes live in addition to `transient` independent of the batch, divided like it: the gradient of a weight that forward
    computes, before it is added to that of earlier micro-batches."""


class FactsSource(Protocol):
    """Source of the facts of a model for a precision, an attention implementation and fusion."""

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> "ModelFacts":
        """The facts of one variant; called once a variant, so it may take seconds."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts of a model for one precision, attention implementation and fusion."""

    name: str
    parts: tuple[Part, ...]
    """In the order of the forward pass."""
    precision: str = "bf16"
    attention: str = "sdpa"
    fusion: bool = False
    kernels: bool = False
    tied: bool = False
    """True if the head shares the embedding's matrix: with pp > 1 first and last stage both have it."""
    vocabulary: int = 0
    """Columns of the logits; 0 without logits."""
    shape: "Shape | None" = None
    """The shape numbers that these facts are computed from, if any: other variants follow from them."""
    notes: tuple[str, ...] = ()
    """Assumptions about missing information, in words."""
    frozen_bits: float | None = None
    """Bits of a frozen weight, with its scales, while products are in 16 bits, of a model with adapters; None: those of the
    weights' dtype."""

    @property
    def traced(self) -> bool:
        """True if they come from a trace, not from shape numbers."""
        return self.shape is None

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return sum(part.count * part.parameters for part in self.parts)

    @property
    def experts(self) -> tuple[int, ...]:
        """The distinct numbers of experts of its mixtures, ascending; empty for none."""
        return tuple(sorted({item.experts for part in self.parts for item in part.matmuls if item.experts > 1}))

    @property
    def blocks(self) -> int:
        """Number of repeated blocks."""
        return sum(part.count for part in self.parts if part.role == "block")

    def model_flops(self, seq_len: int) -> float:
        """FLOPs of one token, forward and backward, without recomputation; attention over the whole square.

        The convention of PaLM (arXiv:2204.02311, appendix B): 6 a matrix element, 12 * heads * head_dim * seq_len for attention.
        """
        total = 0.0
        for part in self.parts:
            part_flops = sum(6.0 * item.k * item.n * item.count * item.rows for item in part.matmuls)
            if part.attention is not None:
                part_flops += 12.0 * part.attention.heads * part.attention.head_dim * seq_len
            total += part.count * part_flops
        return total

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> "ModelFacts":
        """This model at another precision, attention and fusion.

        Raises:
            UsageError: the facts are of one variant only (traced, not from shape numbers) and not that one.
        """
        variant = (precision, attention, fusion, kernels)
        if variant == (self.precision, self.attention, self.fusion, self.kernels):
            return self
        if self.shape is None:
            raise UsageError(
                f"the facts of {self.name} hold for precision {self.precision}, attention {self.attention}, "
                f"fusion {self.fusion}, kernels {self.kernels} only, but {variant} was asked for; "
                "give the workload instead"
            )
        return self.shape.facts(precision=precision, attention=attention, fusion=fusion, kernels=kernels)

    @classmethod
    def from_shape(
        cls, *, precision: str = "bf16", attention: str = "sdpa", fusion: bool = False, kernels: bool = False,
        **shape: Any,
    ) -> "ModelFacts":  # fmt: skip
        """Facts from shape numbers: the fields of `Shape` by name. No model is needed.

        >>> ModelFacts.from_shape(layers=32, hidden=4096, heads=32, intermediate=11008, vocabulary=32000).parameters
        6738415616
        """
        fields = set(Shape.__slots__)
        for name in shape:
            if name not in fields:
                raise UsageError(unknown("shape number", name, fields))
        instance = Shape(**shape)
        return instance.facts(precision=precision, attention=attention, fusion=fusion, kernels=kernels)


_POSITIVE = Option("", type=int, least=1)
_COUNT = Option("", type=int, least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Shape numbers of a decoder or encoder transformer. The defaults are Llama's conventions."""

    layers: Annotated[int, _POSITIVE]
    hidden: Annotated[int, _POSITIVE]
    """Elements of the residual stream."""
    heads: Annotated[int, _POSITIVE]
    vocabulary: Annotated[int, _POSITIVE]
    """Rows of the embedding."""
    kv_heads: Annotated[int | None, _POSITIVE] = None
    """None: `heads`."""
    head_dim: Annotated[int | None, _POSITIVE] = None
    """None: hidden / heads."""
    intermediate: Annotated[int | None, _POSITIVE] = None
    """Inner size of the feed-forward network; None: 4 * hidden."""
    gated: bool = True
    """True if the feed-forward network has a gate (SwiGLU), i.e. three matrices instead of two."""
    tied: bool = False
    """True if the head shares the matrix of the embedding."""
    causal: bool = True
    """True if tokens attend to earlier ones only."""
    positions: Annotated[int, _COUNT] = 0
    """Learned positions; 0: rotary."""
    biases: bool = False
    """True if products and norms have biases (GPT-2)."""
    dropout: bool = False
    """True if the model has dropout, which keeps a mask of a byte an element."""
    experts: Annotated[int, _COUNT] = 0
    """Experts of the feed-forward network of a block; 0 for a dense model."""
    experts_per_token: Annotated[int, _POSITIVE] = 1
    expert_intermediate: Annotated[int | None, _POSITIVE] = None
    """Inner size of an expert; None: `intermediate`."""
    shared_intermediate: Annotated[int, _COUNT] = 0
    """Inner size of the experts that every token passes through, together."""
    dense_layers: Annotated[int, _COUNT] = 0
    """First blocks without experts."""
    kv_lora_rank: Annotated[int, _COUNT] = 0
    """Width of latent keys and values; 0: no latent attention. Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434,
    section 2.1); `head_dim` is the part without positions.
    """
    q_lora_rank: Annotated[int, _COUNT] = 0
    """Width of latent queries; 0: queries are not compressed."""
    rope_head_dim: Annotated[int, _COUNT] = 0
    """With latent attention: elements of a head with positions."""
    v_head_dim: Annotated[int | None, _POSITIVE] = None
    """Elements of a head of values; None: head_dim."""
    name: str = "shape"

    def __post_init__(self) -> None:
        check_options(self)
        if self.experts and not (self.experts > 1 and self.experts_per_token <= self.experts):
            raise UsageError(
                f"Shape: experts must be 2 or more, of which a token has at most all, but got experts={self.experts}, "
                f"experts_per_token={self.experts_per_token}"
            )
        if self.dense_layers > (self.layers - 1 if self.experts else 0):
            raise UsageError(
                f"Shape: dense_layers must leave a block with experts, but got dense_layers={self.dense_layers}, "
                f"layers={self.layers}, experts={self.experts}"
            )
        if self.head_dim is None and self.hidden % self.heads:
            raise UsageError(
                f"Shape: heads must divide hidden where head_dim is not given, but got hidden={self.hidden}, "
                f"heads={self.heads}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise UsageError(f"Shape: kv_heads must divide heads, but got heads={self.heads}, kv_heads={self.kv_heads}")

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> ModelFacts:
        """The facts of this shape in one variant."""
        return facts_of(self, precision=precision, attention=attention, fusion=fusion, kernels=kernels)


def bytes_of(precision: str) -> int:
    """Bytes of an activation that a product reads, at a value of the knob `precision`."""
    return FORMATS[precision].compute_bytes


def facts_of(shape: Shape, *, precision: str, attention: str, fusion: bool, kernels: bool) -> ModelFacts:
    """Counts parameters, products, saved activations and memory traffic of `shape`.

    Saved activations are those of Korthikanti et al., arXiv:2205.05198, section 4, generalised to grouped key and value heads,
    gated feed-forward networks and rotary positions. Without `fusion` or `kernels`, norms and activation functions are the chains
    of plain operators that transformers runs, which keep more and read memory more often; with either they are one kernel each.
    In the functions below, b and r are the bytes of a value in products and in the residual stream, and `lean` means that either
    is on.

    A block with experts has a router and, for each token, the products of its experts: their inputs, the rows between both
    products, and the rows that are returned are kept for each of them.
    """
    if attention not in ("eager", *FLASH):
        raise UsageError(unknown("attention", attention, ("eager", *FLASH)))
    # Under autocast the residual stream and the norms stay fp32, products and attention are 16-bit.
    b, r, lean = bytes_of(precision), 2 if precision == "bf16_pure" else 4, fusion or kernels
    return ModelFacts(
        name=shape.name,
        parts=(
            _embedding(shape, r),
            *_blocks(shape, b, r, attention, lean),
            _last_norm(shape, b, r, lean),
            _head(shape),
            _loss(shape, b, lean),
        ),
        precision=precision,
        attention=attention,
        fusion=fusion,
        kernels=kernels,
        tied=shape.tied,
        vocabulary=shape.vocabulary,
        shape=shape,
    )


def _embedding(shape: Shape, r: int) -> Part:
    h, v = shape.hidden, shape.vocabulary
    return Part(
        name="embedding",
        role="embedding",
        parameters=v * h + shape.positions * h,
        sharded=v * h,
        saved=PerToken(whole=8.0, sequence=h if shape.dropout else 0.0),
        traffic=PerToken(sequence=2.0 * r * h),
        kernels=4.0 if shape.positions else 2.0,
    )


def _last_norm(shape: Shape, b: int, r: int, lean: bool) -> Part:
    h = shape.hidden
    return Part(
        name="norm",
        role="norm",
        parameters=h * (2 if shape.biases else 1),
        saved=PerToken(sequence=_norm_saved(h, b, r, shape.biases, lean)),
        traffic=PerToken(sequence=_norm_traffic(h, b, r, lean)),
        kernels=1.0 if lean or shape.biases else 6.0,
    )


def _head(shape: Shape) -> Part:
    weights = 0 if shape.tied else shape.vocabulary * shape.hidden
    return Part(
        name="head",
        role="head",
        parameters=weights,
        sharded=weights,
        matmuls=(Matmul(k=shape.hidden, n=shape.vocabulary, split="column"),),
        saved=PerToken(),
        kernels=1.0,
    )


def _loss(shape: Shape, b: int, lean: bool) -> Part:
    v = shape.vocabulary
    return Part(
        name="loss",
        role="loss",
        # The products' output, its fp32 copy and the log-probabilities that backward needs.
        saved=PerToken(sharded=float(v * (4 if b == 4 else 2 + 4 + (0 if lean else 4)))),
        # Their gradient in fp32, and in the precision of the head.
        transient=PerToken(sharded=float(v * (4 + (0 if lean else b)))),
        traffic=PerToken(sharded=float(v * (b + (8 if lean else 16)))),
        kernels=3.0 if lean else 8.0,
    )


def _norm_saved(h: int, b: int, r: int, layer_norm: bool, lean: bool) -> float:
    """Input and output of a norm, and the intermediate tensors that the plain operators of an RMSNorm keep."""
    if lean or layer_norm:
        return float((r + b) * h)
    # fp32 copy of a half-precision input, normalised values before the weight.
    return float((4 + r + b) * h)


def _norm_traffic(h: int, b: int, r: int, lean: bool) -> float:
    return float((r + b) * h if lean else (2 * r + 20 + b) * h)


def _blocks(shape: Shape, b: int, r: int, attention: str, lean: bool) -> list[Part]:
    """The repeated blocks, the dense ones of a mixture first."""
    if not shape.experts:
        return [_block(shape, b, r, attention, lean, "block", shape.layers)]
    dense = shape.dense_layers
    dense_blocks = [_block(shape, b, r, attention, lean, "block", dense)] if dense else []
    mixed = _with_experts(
        _block(shape, b, r, attention, lean, f"block{' 2' * bool(dense)}", shape.layers - dense), shape, b, lean
    )
    return [*dense_blocks, mixed]


def _with_experts(block: Part, shape: Shape, b: int, lean: bool) -> Part:
    """A dense block whose feed-forward network is replaced by a mixture of experts."""
    h, gates, count, chosen = shape.hidden, 2 if shape.gated else 1, shape.experts, shape.experts_per_token
    dense_inner, inner, shared = _inner(shape), shape.expert_intermediate or _inner(shape), shape.shared_intermediate
    weights, bias = (gates + 1) * h, gates if shape.biases else 0
    # Inputs and results of the experts, those between their products, and the router's logits and shares in fp32.
    kept_bytes = kept_inside(shape, b, lean)
    rows, router = float(chosen * b * 2 * h), 8.0 * count
    moved = float(chosen * (4 * b + (BIAS_OF_ROWS if shape.biases else 0)) * h)
    matmuls = [
        *block.matmuls[:-FEEDING],
        Matmul(k=h, n=count),
        Matmul(k=h, n=gates * inner, split="column", rows=chosen / count, count=count, experts=count),
        Matmul(k=inner, n=h, split="row", rows=chosen / count, count=count, experts=count),
    ]
    if shared:
        matmuls += [Matmul(k=h, n=gates * shared, split="column"), Matmul(k=shared, n=h, split="row")]
    expert_parameters = count * (weights * inner + bias * inner)
    changed = expert_parameters + shared * (weights + bias) - dense_inner * (weights + bias)
    clamped = CLAMPS * chosen * inner if shape.biases and shape.gated else 0.0
    inside = kept_bytes * (chosen * inner + shared - dense_inner)
    return replace(
        block,
        parameters=block.parameters + changed + count * h,
        sharded=block.sharded + changed,
        experts=expert_parameters,
        routed=float(chosen * h),
        matmuls=tuple(matmuls),
        saved=replace(
            block.saved,
            whole=block.saved.whole + router,
            sharded=block.saved.sharded + inside,
            rows=block.saved.rows + rows,
        ),
        transient=replace(block.transient, sharded=float(b * gates * max(chosen * inner + shared, dense_inner))),
        traffic=replace(
            block.traffic, sharded=block.traffic.sharded + inside + clamped, rows=block.traffic.rows + moved
        ),
        kernels=block.kernels + (MIXTURE_KERNELS if lean else MIXTURE_KERNELS + 20.0),
    )


MIXTURE_KERNELS = 60.0
"""Kernels of a mixture's forward besides its products, counted in Megatron-LM's (core/transformer/moe): the router with top-k,
scatters and auxiliary loss some twenty, the rows of each expert and rank fifteen, permutation, exchange and their inverses
twenty-five."""
BIAS_OF_ROWS = 28
"""Bytes that adding the bias of each expert to its rows moves for an element, forward: multiplied by the rows' shares in fp32
(4), added (2 + 4 + 4), concatenated (8) and cast back (6); backward 40, which is taken as twice the forward like all traffic
(Megatron-LM, `_apply_bias` of TEGroupedMLP in core/transformer/moe/experts.py)."""
CLAMPS = 12.0
"""Bytes that clamps of gate and input move for an element between the products of an expert, outside of the fused activation:
forward 16 (both clamped, then joined), backward 20, taken as 12 and twice that (Megatron-LM, `weighted_bias_quick_geglu_impl` in
core/fusions/fused_bias_geglu.py). Only gpt-oss has experts with biases, and clamps."""
FEEDING = 2
"""The last products of a dense block, those of its feed-forward network."""


def _inner(shape: Shape) -> int:
    return shape.intermediate or 4 * shape.hidden


def kept_inside(shape: Shape, b: int, lean: bool) -> float:
    """Bytes kept for an element between the products of a feed-forward network. SwiGLU keeps gate, up, act(gate) and the product;
    fused, it recomputes act(gate). GELU keeps its input and output."""
    return float(b * ((3 if lean else 4) if shape.gated else 2))


def _block(shape: Shape, b: int, r: int, attention: str, lean: bool, name: str, count: int) -> Part:
    h, heads = shape.hidden, shape.heads
    kv_heads = shape.kv_heads or heads
    dim = shape.head_dim or h // heads
    latent = shape.kv_lora_rank > 0
    # Elements of a head of queries and keys, and of values.
    width, values = dim + shape.rope_head_dim, shape.v_head_dim or dim
    inner = _inner(shape)
    q, k, v, attended = heads * width, kv_heads * width, kv_heads * values, heads * values
    gates = 2 if shape.gated else 1
    attending = (
        _latent_products(shape, q, heads * (dim + values), attended)
        if latent
        else (Matmul(k=h, n=q + k + v, split="column"), Matmul(k=attended, n=h, split="row"))
    )
    matmuls = (
        *attending,
        Matmul(k=h, n=inner, split="column", count=1) if gates == 1 else Matmul(k=h, n=2 * inner, split="column"),
        Matmul(k=inner, n=h, split="row"),
    )
    weights = sum(item.k * item.n for item in matmuls if item.split != "none")
    compressed = shape.q_lora_rank + shape.kv_lora_rank
    sharded_biases = (q + k + v + inner * gates) if shape.biases else 0
    undivided = (2 * h if shape.biases else 0) + 2 * h * (2 if shape.biases else 1) + compressed
    undivided += sum(item.k * item.n for item in matmuls if item.split == "none")
    fused_attention = attention in FLASH
    mask = 1 if shape.dropout else 0

    # Latent queries, keys and values before and after their norms.
    sequence = 2 * _norm_saved(h, b, r, shape.biases, lean) + 2 * mask * h + b * (2 * compressed + shape.rope_head_dim)
    sharded = b * (q + k + v) + b * attended  # rotated queries and keys, values; the output
    if fused_attention:
        sharded += 4 * heads  # log-sum-exp of a query's scores
    if not lean and kv_heads < heads and not fused_attention:
        sharded += b * 2 * (q - k)  # keys and values repeated for every query head
    sharded += int(inner * kept_inside(shape, b, lean))
    # fp32 softmax, its copy in the precision of the product, dropout's mask and output.
    scores = 0.0 if fused_attention else float((b if lean else 4 + (b if b == 2 else 0)) + mask * (1 + b))

    rotary = 0 if shape.positions else (2 * b * (q + k) if lean else 6 * b * (q + k))
    if latent:  # heads are concatenated from parts with and without positions
        rotary += 2 * b * (q + k)
    activation = b * inner * ((3 if lean else 5) if shape.gated else 2)
    score_traffic = 0.0 if fused_attention else float((4 if lean else 10) * b)
    return Part(
        name=name,
        role="block",
        count=count,
        parameters=weights + sharded_biases + undivided,
        sharded=weights + sharded_biases,
        matmuls=matmuls,
        attention=Attention(heads=heads, kv_heads=kv_heads, head_dim=(width + values) // 2, causal=shape.causal),
        saved=PerToken(sequence=float(sequence), sharded=float(sharded), scores=scores),
        boundary=float(r * h),
        transient=PerToken(sequence=float(2 * r * h), sharded=float(b * inner * gates)),
        traffic=PerToken(
            sequence=2 * _norm_traffic(h, b, r, lean) + 2.0 * 3 * r * h,
            sharded=float(rotary + activation),
            scores=score_traffic,
        ),
        kernels=(20.0 if lean else 40.0) + (0.0 if fused_attention else 6.0) + (10.0 if latent else 0.0),
    )


def _latent_products(shape: Shape, q: int, kv: int, attended: int) -> tuple[Matmul, ...]:
    """Products of latent attention: down to the latents, which every tensor-parallel rank computes whole, and up to heads."""
    down = Matmul(k=shape.hidden, n=shape.kv_lora_rank + shape.rope_head_dim)
    queries: tuple[Matmul, ...] = (Matmul(k=shape.hidden, n=q, split="column"),)
    if shape.q_lora_rank:
        queries = (Matmul(k=shape.hidden, n=shape.q_lora_rank), Matmul(k=shape.q_lora_rank, n=q, split="column"))
    up = Matmul(k=shape.kv_lora_rank, n=kv, split="column")
    return *queries, down, up, Matmul(k=attended, n=shape.hidden, split="row")
