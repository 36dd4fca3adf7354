"""Work of a micro-batch on one rank: products, attention and what the memory bandwidth bounds.

Source: roofline, Williams et al. 2009. Arrays have shape (k, n): k parts of a stage, n configurations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..knobs.meaning import FLOAT8
from .constants import Constants
from .facts.model_facts import Matmul, ModelFacts, Part, bytes_of
from .hardware import Hardware
from .kernels import attention_share, kernel_of, product_seconds, products_of
from .knob_arrays import KnobArrays
from .rank import filled, per_token
from .setup import TrainingSetup


def matmul_seconds(
    item: Matmul, tokens: np.ndarray, tp: np.ndarray, width: float, hardware: Hardware, precision: str,
    constants: Constants, ep: "np.ndarray | float" = 1.0, fill: "np.ndarray | float" = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """One product on one rank: the forward, and the one or two of its backward.

    A rank has its share of the experts, with proportionally more rows, `fill` times those routed to them. Their products run as
    one, in tiles of rows that belong to one expert each.
    """
    shared = ep if item.experts > 1 else 1.0
    rows, count = (
        np.maximum(tokens * item.rows * shared * (fill if item.experts > 1 else 1.0), 1.0),
        item.count / shared,
    )
    k = item.k / (tp if item.split == "row" else 1.0)
    n = item.n / (tp if item.split == "column" else 1.0)
    peak = hardware.rate(precision)
    if hardware.kind == "cpu":
        few = constants.half_rows / rows
        if item.experts > 1:
            few = few * shared / item.experts + constants.tile_rows / 2 / rows
        shape = (1 + few) * (1 + constants.half_width / k) * (1 + constants.half_width / n)
        compute = 2 * rows * k * n / (peak * hardware.achievable * constants.matmul_efficiency) * shape
        moved = width * (rows * k + k * n + rows * n) / memory_rate(hardware, constants)
        forward = count * np.maximum(compute, moved)
        return forward, forward * (2 if item.trainable else 1)
    like = products_of(hardware)
    narrow = precision in NARROW
    one_like = partial(
        product_seconds,
        width=1 if narrow else width,
        peak=peak,
        bandwidth=hardware.memory_gb_per_s * 1e9,
        like=like,
        share=constants.matmul_efficiency * (_narrow_efficiency(precision, constants)),
    )
    if item.experts > 1:
        group = item.experts / shared
        weights = group * width * k * n / memory_rate(hardware, constants)
        filled = (rows + constants.tile_rows / 2) * group
        forward = np.maximum(one_like(filled, n, k), weights)
        back = np.maximum(one_like(filled, k, n), weights)
        if item.trainable:
            back = back + one_like(k * group, n, rows + constants.tile_rows / 2)
        return count / group * forward, count / group * back
    back = one_like(rows, k, n)
    if item.trainable:
        back = back + one_like(k, n, rows)
    return count * one_like(rows, n, k), count * back


NARROW = (*FLOAT8, "mxfp8", "nvfp4")
"""8-bit and 4-bit formats of products."""
CAST = {"mxfp8": 5.0, "nvfp4": 8.0}
"""Bytes moved to cast a 16-bit number to fewer bits with scales, in both layouts; for 4 bits this includes rotation and random
rounding."""


RING_MERGE = (18.0, 14.0)
"""Bytes moved for a number of attention's output for each block of keys in a ring: the forward pass scales it and adds the new
part, in float32; the backward pass adds to the gradient of the queries."""


def _narrow_efficiency(precision: str, constants: Constants) -> float:
    """Share of the peak rate that products in narrow formats reach; 1 for other formats."""
    if precision not in NARROW:
        return 1.0
    shares = {"mxfp8": constants.mxfp8_efficiency, "nvfp4": constants.nvfp4_efficiency}
    return shares.get(precision, constants.eight_bit_efficiency)


def memory_rate(hardware: Hardware, constants: Constants) -> float:
    return hardware.memory_gb_per_s * 1e9 * constants.bandwidth_efficiency


@dataclass(slots=True)
class Work:
    """Seconds of one micro-batch in k parts, forward and backward. Arrays, shape (k, n); shape (n,) for a single part."""

    matmul: np.ndarray
    attention: np.ndarray
    memory: np.ndarray
    matmul_back: np.ndarray
    attention_back: np.ndarray
    memory_back: np.ndarray
    host: np.ndarray
    """Host time of the forward's launches."""
    experts: np.ndarray
    """The part of the products that belongs to experts, forward."""
    experts_back: np.ndarray

    @classmethod
    def of(
        cls, model_parts: Sequence[Part], facts: ModelFacts, cols: KnobArrays, setup: TrainingSetup, hardware: Hardware,
        constants: Constants,
    ) -> "Work":  # fmt: skip
        """The work of these parts, a row each."""
        distinct = distinct_sizes(cols)
        works = [part_work(part, facts, cols, setup, hardware, constants, distinct) for part in model_parts]
        return cls(**{name: np.stack([getattr(work, name) for work in works]) for name in cls.__slots__})

    def take(self, rows: Sequence[int], indices: np.ndarray | None = None) -> "Work":
        """The work of the parts in `rows`, for the configurations at `indices`, or for all if it is None."""
        chosen = list(rows) if indices is None else np.ix_(np.array(rows), indices)
        return Work(*(getattr(self, name)[chosen] for name in Work.__slots__))

    def at_clocks(self, share: np.ndarray) -> "Work":
        """A copy with products and attention at a share of their rate."""
        limited = ("matmul", "attention", "matmul_back", "attention_back", "experts", "experts_back")
        return replace(self, **{name: getattr(self, name) / share for name in limited})


class ProductWork(NamedTuple):
    """Seconds of the matrix products of one part, and the elements that they read and write. Arrays of shape (n,)."""

    forward: np.ndarray
    backward: np.ndarray
    experts: np.ndarray
    """The part of `forward` that belongs to experts."""
    experts_back: np.ndarray
    inputs: np.ndarray
    """Elements of a token in the products' inputs."""
    outputs: np.ndarray


def part_work(
    part: Part,
    facts: ModelFacts,
    cols: KnobArrays,
    setup: TrainingSetup,
    hardware: Hardware,
    constants: Constants,
    distinct: tuple[np.ndarray, np.ndarray],
) -> Work:
    """The work of one part; arrays of shape (n,)."""
    tp = cols.tp.astype(float)
    seq = setup.seq_len or 1
    tokens = cols.micro_batch * float(seq) / cols.sequence_ranks
    zero = np.zeros(len(tp))
    half = "fp16" if setup.products == "fp16" else "bf16" if facts.precision in FLOAT8 else facts.precision
    kind_of_product = (setup.products or facts.precision) if part.role == "block" else half
    products = product_work(part, facts, cols, tokens, hardware, kind_of_product, constants, distinct)
    attention, eager = zero, part.saved.scores > 0
    if part.attention is not None:
        kind = part.attention
        flops = 4.0 * tokens * seq * kind.heads * kind.head_dim / tp
        if kind.causal and not eager:
            flops = flops / 2
        share = constants.eager_attention_efficiency
        if not eager:
            kernel = setup.attention_kernel or (kernel_of(facts.attention) if facts.traced else "flash2")
            # In a ring, a kernel gets the keys of one rank at a time.
            share = constants.attention_efficiency or attention_share(hardware, kernel, seq / cols.cp, kind.head_dim)
        attention = flops / (hardware.rate(half) * share)
    memory, memory_back = traffic(part, cols, tokens, setup, hardware, constants, products)
    chunks = np.maximum(np.ceil(tokens / part.chunk), 2.0) if part.chunk else 1.0
    launched = zero + part.kernels * chunks
    if setup.separate_experts:
        launched = launched + sum(item.experts for item in part.matmuls if item.experts > 1) / cols.ep
    return Work(
        matmul=products.forward,
        attention=zero + attention,
        memory=memory,
        matmul_back=products.backward,
        # Fused kernels compute the scores again, a fifth product beside the four of backward.
        attention_back=zero + (2.0 if eager else 2.5) * attention,
        memory_back=memory_back,
        host=launched * constants.launch_us * 1e-6 + _gathering(part, cols, constants),
        experts=products.experts,
        experts_back=products.experts_back,
    )


def _gathering(part: Part, cols: KnobArrays, constants: Constants) -> "np.ndarray | float":
    """Host seconds to gather the weights of a part's modules in one pass, where ZeRO 3 does that module by module."""
    if not constants.gather_us or not part.parameters:
        return 0.0
    modules = sum(item.count for item in part.matmuls if item.experts == 1) + (2 if part.role == "block" else 0)
    return np.where(cols.zero >= 3, modules * constants.gather_us * 1e-6, 0.0)


def product_work(
    part: Part,
    facts: ModelFacts,
    cols: KnobArrays,
    tokens: np.ndarray,
    hardware: Hardware,
    precision: str,
    constants: Constants,
    distinct: tuple[np.ndarray, np.ndarray],
) -> ProductWork:
    """The products of one part. Each set of sizes is computed once, at its `distinct` representative, as this takes most of the
    time of a table."""
    tp = cols.tp.astype(float)
    zero = np.zeros(len(tp))
    matmul, back, experts, experts_back, inputs, outputs = zero, zero, zero, zero, zero, zero
    (representatives, representative_of), fill = distinct, filled(cols)
    dense = tokens[representatives], tp[representatives]
    of_experts = (tokens / cols.token_splits)[representatives], cols.expert_tp[representatives].astype(float)
    for item in part.matmuls:
        forward_seconds, backward_seconds = (
            seconds[representative_of]
            for seconds in matmul_seconds(
                item,
                *(of_experts if item.experts > 1 else dense),
                bytes_of(facts.precision),
                hardware,
                precision,
                constants,
                cols.ep[representatives],
                fill[representatives],
            )
        )
        matmul, back = matmul + forward_seconds, back + backward_seconds
        if item.experts > 1:
            experts, experts_back = experts + forward_seconds, experts_back + backward_seconds
        inputs = inputs + item.count * item.rows * item.k / (tp if item.split == "row" else 1.0)
        outputs = outputs + item.count * item.rows * item.n / (tp if item.split == "column" else 1.0)
    return ProductWork(matmul, back, experts, experts_back, inputs, outputs)


def traffic(
    part: Part, cols: KnobArrays, tokens: np.ndarray, setup: TrainingSetup, hardware: Hardware, constants: Constants,
    products: ProductWork,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Seconds, forward and backward, of the operations of one part that the memory bandwidth bounds; arrays of shape (n,)."""
    tp, seq = cols.tp.astype(float), setup.seq_len or 1
    sequence = np.where(cols.sequence_parallel, tp, 1.0)
    bandwidth = memory_rate(hardware, constants) / (constants.loss_traffic if part.role == "loss" else 1.0)
    memory = per_token(part.traffic, part, tp, sequence, cols.token_splits, seq) * tokens / bandwidth
    if part.traffic_backward is None:
        memory_back = 2 * memory
    else:
        memory_back = per_token(part.traffic_backward, part, tp, sequence, cols.token_splits, seq) * tokens / bandwidth
    casts = part.traffic_fixed / tp / bandwidth  # of weights, then of their gradients
    memory, memory_back = memory + casts, memory_back + casts
    if part.attention is not None:
        merged = (cols.cp - 1) * tokens * part.attention.heads * part.attention.head_dim / tp / bandwidth
        memory, memory_back = memory + RING_MERGE[0] * merged, memory_back + RING_MERGE[1] * merged
    if setup.products in NARROW and part.role == "block":
        cast = CAST.get(str(setup.products), 4.0) * tokens / bandwidth
        memory, memory_back = memory + cast * products.inputs, memory_back + cast * products.outputs
    return memory, memory_back


def distinct_sizes(cols: KnobArrays) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the first configuration of each set of product sizes, and for each configuration its index among these."""
    sizes = ((cols.micro_batch * 4096 + cols.tp) * 4096 + cols.sequence_ranks) * 65536 + cols.ep
    for column in (cols.capacity_factor, cols.token_splits):
        if (column != column[0]).any():
            values, which = np.unique(column, return_inverse=True)
            sizes = sizes * len(values) + which
    _, representatives, representative_of = np.unique(sizes, return_index=True, return_inverse=True)
    return representatives, representative_of
