"""Facts of any workload, by tracing one step of it on fake tensors."""

import math
import statistics
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base.collection import without_collection
from ...base.errors import WorkloadError
from ...models import Workload
from ...models.architecture import Architecture
from ...models.lora import lora_of
from . import disk_cache
from .derived import unformed
from .model_facts import Attention, Matmul, ModelFacts, Part, PerToken, Variant
from .step_trace import Product, Segment, StepTrace, Tally
from .tracing import Layout, trace_step

Step = tuple[str, str, bool]
"""Precision, attention, and True with Liger-Kernel's modules: what a traced step depends on."""


@dataclass
class TracedFacts:
    """The facts of a workload in every variant; each is traced on first use and cached on disk."""

    workload: Workload
    device_type: str = "cuda"
    """Device whose operators run, as `Hardware.operators`: operators keep different tensors for backward on each."""
    liger: bool = False
    """True if `kernels` puts Liger-Kernel's modules, as `Hardware.liger`."""
    folder: Path | None = None
    """Folder of the cache; None for the user's cache folder."""
    _known: dict[Variant, ModelFacts] = field(default_factory=dict, init=False, repr=False)
    _failed: dict[Variant, WorkloadError] = field(default_factory=dict, init=False, repr=False)
    _steps: dict[Step, "tuple[Layout, StepTrace]"] = field(default_factory=dict, init=False, repr=False)

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> ModelFacts:
        """The facts of one variant.

        Raises:
            WorkloadError: the model cannot be built or traced, or its batch or loss is not what it must be.
        """
        variant = traced_variant((precision, attention, fusion, kernels), self.liger)
        return derived(self._traced(variant), precision, kernels)

    def _traced(self, variant: Variant) -> ModelFacts:
        if variant in self._failed:
            raise self._failed[variant]
        if variant not in self._known:
            precision, attention, fusion, liger = variant
            try:
                self._known[variant] = trace_facts(
                    self.workload, precision=precision, attention=attention, fusion=fusion, liger=liger,
                    device_type=self.device_type, folder=self.folder, steps=self._steps,
                )  # fmt: skip
            except WorkloadError as error:
                self._failed[variant] = error
                raise
        return self._known[variant]


def traced_variant(variant: Variant, liger: bool) -> Variant:
    """The variant that is traced for the facts of another: tf32 has the tensors of fp32, and `kernels` differs in a trace only by
    Liger-Kernel's modules, which compiled blocks (`fusion`) are taken not to need: their operators are fused already.
    """
    precision, attention, fusion, kernels = variant
    return "fp32" if precision == "tf32" else precision, attention, bool(fusion), bool(kernels and liger and not fusion)


def derived(traced: ModelFacts, precision: str, kernels: bool) -> ModelFacts:
    """The facts of a variant from those of its `traced_variant`."""
    formed = unformed(traced) if kernels else traced
    return formed if formed.precision == precision else replace(formed, precision=precision)


def named(variant: Variant, device_type: str) -> dict[str, Any]:
    """A traced variant in the disk cache."""
    return dict(zip(("precision", "attention", "fusion", "liger"), variant), device=device_type)


def trace_facts(
    workload: Workload,
    *,
    precision: str = "fp32",
    attention: str | None = None,
    fusion: bool = False,
    liger: bool = False,
    device_type: str = "cuda",
    folder: Path | None = None,
    steps: "dict[Step, tuple[Layout, StepTrace]] | None" = None,
) -> ModelFacts:
    """The facts of a workload: parameters, products, FLOPs, kept bytes and memory traffic, part by part.

    Tracing takes a few seconds and negligible memory on any machine; reading from disk takes milliseconds.

    Args:
        workload: any, including a user's own modules.
        precision, attention, fusion: values of the knobs. An attention that the workload does not have is ignored.
        liger: True for a model with Liger-Kernel's modules.
        device_type: device whose operators run, as `Hardware.operators`.
        folder: of the cache; None for the user's.
        steps: steps that were traced; a variant with fusion starts from the one without.

    Raises:
        WorkloadError: the model cannot be built or traced, or its batch or loss is invalid; names the operator.
    """
    if not isinstance(workload.model, Architecture):
        attention = "sdpa" if attention is None else attention
    elif attention is None or workload.model.default_attention == "eager":
        attention = workload.model.default_attention
    variant = (precision, attention, fusion, liger)
    key = disk_cache.key_of(workload.model_id, named(variant, device_type))
    stored = disk_cache.load(key, folder)
    if stored is not None:
        return stored
    with without_collection():
        facts = _trace(workload, variant, device_type, {} if steps is None else steps)
    disk_cache.store(key, facts, folder)
    return facts


def _trace(
    workload: Workload, variant: Variant, device_type: str, steps: "dict[Step, tuple[Layout, StepTrace]]"
) -> ModelFacts:
    precision, attention, fusion, liger = variant
    step = (precision, attention, liger)
    if step not in steps:
        layout = next((layout_of_step for layout_of_step, _ in steps.values()), None) or Layout.of(workload)
        seen = trace_step(
            workload, layout, precision=precision, attention=attention, device_type=device_type, liger=liger
        )
        steps[step] = layout, seen
    layout, seen = steps[step]
    if seen.error and "in backward" not in seen.operator:
        raise WorkloadError(_tracing_message(workload, seen, layout))
    vocabulary, tied = _head(seen, layout)
    facts = ModelFacts(
        name=workload.name,
        parts=tuple(_parts(workload, seen, layout)),
        precision=precision,
        attention=attention,
        fusion=fusion,
        vocabulary=vocabulary,
        tied=tied,
        notes=tuple(layout.notes),
        frozen_bits=None if (lora := lora_of(workload)) is None else lora.frozen_bits,
    )
    if seen.error:
        facts = replace(facts, notes=(*facts.notes, f"backward cannot be traced: {seen.operator} ({seen.error})"))
    if fusion:
        from .compiled import fused

        facts = fused(facts, workload, seen, layout, precision)
    return facts


def _tracing_message(workload: Workload, seen: StepTrace, layout: "Layout") -> str:
    parameters = sum(math.prod(shape) for shape in seen.parameters.values())
    count = f" in {len(layout.blocks)} repeated blocks and the modules around them" if layout.blocks else ""
    return (
        f"{workload.name} cannot be traced: operator {seen.operator} does not work without values "
        f"({seen.error}). Known without it: {parameters:,} parameters{count}, and so the memory of "
        "weights, gradients and optimizer states; not its activations and time. Dry runs work all the same; for "
        "an estimate give a workload that takes the other way for tensors without values"
    )


def _parts(workload: Workload, seen: StepTrace, layout: Layout) -> list[Part]:
    """The segments of a trace, grouped into parts in the order of the forward pass."""
    maker = _Maker(workload, seen, layout)
    segments, unread = _owning(seen, layout)
    embedding: list[Segment] = []
    between: list[Segment] = []
    tail: list[Segment] = []
    kinds: dict[Hashable, list[Segment]] = {}
    for segment in segments:
        if segment.block:
            kinds.setdefault(maker.signature(segment), []).append(segment)
        elif not layout.blocks:
            (tail if segment.path == "" else between).append(segment)
        elif segment.after == 0:
            embedding.append(segment)
        elif segment.after < len(layout.blocks):
            between.append(segment)
        else:
            tail.append(segment)
    parts = []
    if embedding:
        parts.append(maker.part("embedding", "embedding", embedding))
    for number, blocks in enumerate(kinds.values()):
        parts.append(maker.block("block" if not number else f"block {number + 1}", blocks))
    if between:
        parts.append(maker.part("other", "other", between))
    norm, head, loss = _tail(tail, has_blocks=bool(layout.blocks))
    if norm:
        parts.append(maker.part("norm", "norm", norm))
    if head:
        parts.append(maker.part("head", "head", head))
    if loss:
        parts.append(maker.part("loss", "loss", loss, spike=seen.tail_transient))
    if unread:
        parts.append(maker.unused(unread))
    return parts


def _tail(tail: list[Segment], *, has_blocks: bool) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """The segments after the last block, divided into norm, head and loss."""
    if not has_blocks:
        return [], [], tail
    products = [index for index, segment in enumerate(tail) if segment.products]
    first_product = products[0] if products else len(tail)
    norm, head, loss = [], [], []
    for index, segment in enumerate(tail):
        if segment.path == "" and not segment.products:
            loss.append(segment)
        elif segment.products or (products and first_product < index and segment.parameters):
            head.append(segment)
        elif index < first_product:
            norm.append(segment)
        else:
            (head if index < (products[-1] if products else 0) else loss).append(segment)
    return norm, head, loss


def _owning(seen: StepTrace, layout: Layout) -> tuple[list[Segment], set[str]]:
    """The segments with the parameters of each: those inside a block, and otherwise those that it reads first; and the parameters
    that are left. Blocks that were not reached have theirs too."""
    reached = {segment.path for segment in seen.segments if segment.block}
    missed = [Segment(path=path, block=True, after=0) for path in layout.blocks if path not in reached]
    segments, unread = [*seen.segments, *missed], set(seen.parameters)
    names_of: dict[int, set[str]] = {}
    for segment in sorted(segments, key=lambda segment: not segment.block):
        inside = {name for name in unread if name.startswith(segment.path + ".")}
        names_of[id(segment)] = inside if segment.block else segment.parameters & unread
        unread -= names_of[id(segment)]
    return [replace(segment, parameters=names_of[id(segment)]) for segment in segments], unread


def _head(seen: StepTrace, layout: Layout) -> tuple[int, bool]:
    """`vocabulary` and `tied` of the model's last product, if it computes logits of an embedded vocabulary."""
    products = [
        product for segment in seen.segments if segment.after == len(layout.blocks) for product in segment.products
    ]
    weighted = [product for product in products if product.weight]
    if not weighted or not layout.blocks:
        return 0, False
    widest = max(weighted, key=lambda product: product.n)
    embedded = {name for segment in seen.segments if segment.after == 0 for name in segment.parameters}
    return widest.n, widest.weight in embedded


class _Maker:
    """Converts segments to parts: bytes of a batch become bytes a token."""

    def __init__(self, workload: Workload, seen: StepTrace, layout: Layout) -> None:
        self._seen, self._layout = seen, layout
        self._length = workload.seq_len or 1
        self._tokens = seen.samples * self._length
        self._is_causal = getattr(workload.model, "task", "") == "causal"

    def signature(self, segment: Segment) -> Hashable:
        """Key that is equal for identical blocks."""
        products = tuple((product.k, product.n, product.rows, product.count) for product in segment.products)
        calls = tuple((call.heads, call.kv_heads, call.head_dim) for call in segment.attention)
        return products, calls, self._count(segment.parameters)

    def block(self, name: str, blocks: list[Segment]) -> Part:
        """The part of identical blocks. It uses their median: the first may contain tensors that are created once for all, and
        the last may have other temporaries."""
        median = sorted(blocks, key=lambda block: block.saved.total)[len(blocks) // 2]
        # The last block's backward begins while the loss's gradient is live.
        transient = statistics.median_low(block.transient for block in blocks)
        return self._make(name, "block", [median], count=len(blocks), transient=transient)

    def part(self, name: str, role: str, segments: list[Segment], spike: float = 0.0) -> Part:
        """The combined part of several segments."""
        return self._make(name, role, segments, count=1, transient=spike)

    def unused(self, names: set[str]) -> Part:
        """The parameters that no operator reads."""
        return Part(
            name="unused", role="other", parameters=self._count(names), sharded=self._sharded(names, None),
            frozen=self._count(names),
        )  # fmt: skip

    def _make(self, name: str, role: str, segments: list[Segment], *, count: int, transient: float) -> Part:
        names = {parameter for segment in segments for parameter in segment.parameters}
        attention = self._attention([call for segment in segments for call in segment.attention])
        heads = attention.heads if attention else 0
        saved = self._per_token([segment.saved for segment in segments], heads)
        saved = replace(saved, rows=sum(segment.saved_rows for segment in segments) / self._tokens)
        traffic = self._per_token([segment.traffic for segment in segments], heads)
        backward = sum(segment.backward.total for segment in segments)
        forward = sum(segment.traffic.total for segment in segments)
        boundary = sum(segment.boundary for segment in segments) / self._tokens if role == "block" else 0.0
        return Part(
            name=name,
            role=role,
            count=count,
            parameters=self._count(names),
            sharded=self._sharded(names, segments),
            frozen=self._count(names & self._seen.frozen),
            experts=self._count(names & {product.weight for product in _stacked(segments)}),
            routed=sum(product.rows * product.count * product.k for product in _first_of_mixtures(segments))
            / self._tokens,
            matmuls=self._matmuls(segments),
            attention=attention,
            saved=saved,
            saved_fixed=sum(segment.saved_fixed for segment in segments),
            boundary=boundary,
            transient=self._split_transient(transient / self._tokens, boundary, saved),
            traffic=traffic,
            traffic_backward=traffic.scaled(backward / forward) if forward and backward else None,
            traffic_fixed=sum(segment.traffic_fixed for segment in segments),
            kernels=float(sum(segment.kernels for segment in segments)),
        )

    def _count(self, names: set[str]) -> int:
        return sum(math.prod(self._seen.parameters[name]) for name in names)

    def _sharded(self, names: set[str], segments: list[Segment] | None) -> int:
        if self._layout.cuts is not None:
            return self._count({name for name in names if name in self._layout.cuts})
        if segments is None:
            return 0
        splits = {product.weight: product.split for segment in segments for product in segment.products}
        cut = {name for name, split in splits.items() if split != "none" and name in names}
        biases = {name.removesuffix("weight") + "bias" for name, split in splits.items() if split == "column"}
        return self._count(cut | (biases & names))

    def _matmuls(self, segments: list[Segment]) -> tuple[Matmul, ...]:
        counted: dict[tuple[Any, ...], int] = {}
        for segment in segments:
            for product in segment.products:
                experts = product.count if product.stacked else 1
                key = (product.k, product.n, product.split, product.rows / self._tokens, product.trainable, experts)
                counted[key] = counted.get(key, 0) + product.count
        return tuple(
            Matmul(k=k, n=n, split=split, rows=rows, trainable=trainable, count=count, experts=experts)
            for (k, n, split, rows, trainable, experts), count in counted.items()
        )

    def _attention(self, calls: list[Attention]) -> Attention | None:
        if not calls:
            return None
        return Attention(
            heads=sum(call.heads for call in calls),
            kv_heads=sum(call.kv_heads for call in calls),
            head_dim=calls[0].head_dim,
            causal=self._is_causal or all(call.causal for call in calls),
        )

    def _per_token(self, tallies: list[Tally], heads: int) -> PerToken:
        total = Tally(*(sum(getattr(tally, kind) for tally in tallies) for kind in Tally.__slots__))
        return total.per_token(self._seen.samples, self._length, heads)

    def _split_transient(self, total: float, boundary: float, saved: PerToken) -> PerToken:
        """Divides the temporaries by tensor parallelism: all but the gradients of the residual stream, if any tensor inside is
        divided."""
        if not saved.sharded and not saved.scores:
            return PerToken(sequence=total)
        outside = min(total, 2 * boundary)
        return PerToken(sequence=outside, sharded=total - outside)


def _stacked(segments: list[Segment]) -> list[Product]:
    """The products of experts."""
    return [product for segment in segments for product in segment.products if product.stacked]


def _first_of_mixtures(segments: list[Segment]) -> list[Product]:
    """The first product of each mixture of experts."""
    by_mixture: dict[str, Product] = {}
    for product in _stacked(segments):
        by_mixture.setdefault(product.weight.rpartition(".")[0], product)
    return list(by_mixture.values())
