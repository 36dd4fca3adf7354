"""Facts of any workload, by tracing one step of it on fake tensors."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...base.collection import without_collection
from ...base.errors import WorkloadError
from ...base.forked import ForkedCall
from ...models import Workload
from ...models.architecture import Architecture
from . import disk_cache
from .fused_loss import unformed
from .layout import Layout
from .model_facts import Attention, Matmul, ModelFacts, Part, PerToken, Variant
from .step_trace import AttentionCall, Product, Segment, StepTrace, Tally
from .tracing import trace_step


class TracingError(WorkloadError):
    """A model cannot be traced. `known` has the facts that do not need a trace: parts with their parameters."""

    known: ModelFacts

    def __init__(self, message: str, known: ModelFacts) -> None:
        super().__init__(message)
        self.known = known


@dataclass
class TracedFacts:
    """The facts of a workload in every variant; each is traced on first use and cached on disk."""

    workload: Workload
    device_type: str = "cuda"
    """Whose operators run, as `Hardware.operators`: they keep different tensors for backward."""
    folder: Path | None = None
    """Folder of the cache; None for the user's cache folder."""
    _known: dict[tuple[str, str, bool], ModelFacts] = field(default_factory=dict, init=False, repr=False)
    _failed: dict[tuple[str, str, bool], WorkloadError] = field(default_factory=dict, init=False, repr=False)
    _steps: dict[tuple[str, str], "tuple[Layout, StepTrace]"] = field(default_factory=dict, init=False, repr=False)
    _layout: Layout | None = field(default=None, init=False, repr=False)
    _begun: dict[tuple[str, str], ForkedCall[Mapping[Variant, ModelFacts]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> ModelFacts:
        """The facts of one variant.

        Raises:
            TracingError: the model cannot be traced; says at which operator.
            WorkloadError: it cannot be built, or its batch or loss is not what it must be.
        """
        if precision == "tf32":  # products of the same tensors, at another rate
            return replace(
                self.facts(precision="fp32", attention=attention, fusion=fusion, kernels=kernels), precision="tf32"
            )
        if kernels:
            return unformed(self.facts(precision=precision, attention=attention, fusion=fusion))
        variant = (precision, attention, fusion)
        if variant in self._failed:
            raise self._failed[variant]
        if variant not in self._known and variant[:2] in self._begun:
            self.finish((precision, attention))
        if variant not in self._known:
            try:
                self._known[variant] = trace_facts(
                    self.workload, precision=precision, attention=attention, fusion=fusion,
                    device_type=self.device_type, folder=self.folder, steps=self._steps, layout=self._layout,
                )  # fmt: skip
            except WorkloadError as error:
                self._failed[variant] = error
                raise
        return self._known[variant]

    def prepare(self, fusion: bool) -> None:
        """Does what all variants have in common, with `fusion` also for those that compile blocks: copies of this source in other
        processes need not do it again.

        Raises:
            WorkloadError: the model cannot be built.
        """
        self._layout = self._layout or Layout.of(self.workload)
        if fusion:
            from .compiled import prepare

            prepare()

    @property
    def begun(self) -> Mapping[tuple[str, str], ForkedCall[Mapping[Variant, ModelFacts]]]:
        """The forked processes that trace, by precision and attention."""
        return self._begun

    def begin(self, variants: Sequence[Variant]) -> None:
        """Starts tracing variants of one precision and attention in a forked process; requires `can_fork()`."""
        self._begun[variants[0][:2]] = ForkedCall(partial(self._traced, variants))

    def finish(self, key: tuple[str, str]) -> int:
        """Waits for the variants of a precision and attention that are being traced. Returns their number."""
        found = self._begun.pop(key).result()
        self._known.update({variant[:3]: facts for variant, facts in found.items()})
        return len(found)

    def _traced(self, variants: Sequence[Variant]) -> Mapping[Variant, ModelFacts]:
        """The facts of variants, without those from the first that fails: its error is raised when it is requested."""
        found = {}
        with suppress(WorkloadError):
            for variant in variants:
                precision, attention, fusion, kernels = variant
                found[variant] = self.facts(precision=precision, attention=attention, fusion=fusion, kernels=kernels)
        return found

    def is_known(self, variant: Variant) -> bool:
        """True if (precision, attention, fusion, kernels) needs no tracing, since it is in memory or on disk; facts with
        `kernels` follow from those without."""
        precision, attention, fusion, _ = variant
        precision = "fp32" if precision == "tf32" else precision
        formed = (precision, attention, fusion)
        if formed in self._known:
            return True
        named = {"precision": precision, "attention": attention, "fusion": fusion}
        found = disk_cache.load(
            disk_cache.key_of(self.workload.model_id, {**named, "device": self.device_type}), self.folder
        )
        if found is not None:
            self._known[formed] = found
        return found is not None


def trace_facts(
    workload: Workload,
    *,
    precision: str = "fp32",
    attention: str | None = None,
    fusion: bool = False,
    kernels: bool = False,
    device_type: str = "cuda",
    folder: Path | None = None,
    cached: bool = True,
    steps: "dict[tuple[str, str], tuple[Layout, StepTrace]] | None" = None,
    layout: Layout | None = None,
) -> ModelFacts:
    """The facts of a workload: parameters, products, FLOPs, kept bytes and memory traffic, part by part.

    Tracing takes a few seconds and negligible memory on any machine; reading from disk takes milliseconds.

    Args:
        workload: any, including a user's own modules.
        precision, attention, fusion, kernels: values of the knobs. An attention that the workload does not
            have is ignored.
        device_type: whose operators run, as `Hardware.operators`.
        folder: of the cache; None for the user's.
        cached: True to read and write the cache.
        steps: steps that were traced, by precision and attention; a variant with fusion starts from the one
            without.
        layout: the model's blocks and their division, if known.

    Raises:
        TracingError: the model cannot be traced; names the operator, and has the facts that are known without
            a trace.
        WorkloadError: the model cannot be built, or its batch or loss is invalid.
    """
    if not isinstance(workload.model, Architecture):
        attention = "sdpa" if attention is None else attention
    elif attention is None or workload.model.default_attention == "eager":
        attention = workload.model.default_attention
    if kernels:
        formed = trace_facts(
            workload,
            precision=precision,
            attention=attention,
            fusion=fusion,
            device_type=device_type,
            folder=folder,
            cached=cached,
            steps=steps,
            layout=layout,
        )
        return unformed(formed)
    variant = {"precision": precision, "attention": attention, "fusion": fusion, "device": device_type}
    key = disk_cache.key_of(workload.model_id, variant)
    found = disk_cache.load(key, folder) if cached else None
    if found is not None:
        return found
    with without_collection():
        made = _trace(workload, precision, attention, fusion, device_type, {} if steps is None else steps, layout)
    if cached:
        disk_cache.store(key, made, folder)
    return made


def _trace(
    workload: Workload,
    precision: str,
    attention: str,
    fusion: bool,
    device_type: str,
    steps: "dict[tuple[str, str], tuple[Layout, StepTrace]]",
    layout: Layout | None,
) -> ModelFacts:
    if (precision, attention) not in steps:
        layout = layout or next((known for known, _ in steps.values()), None) or Layout.of(workload)
        steps[precision, attention] = (
            layout,
            trace_step(
                workload,
                layout.blocks,
                layout.split,
                precision=precision,
                attention=attention,
                device_type=device_type,
            ),
        )
    layout, seen = steps[precision, attention]
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
    )
    if seen.error and "in backward" not in seen.operator:
        raise TracingError(_tracing_message(workload, seen, facts, layout), facts)
    if seen.error:
        facts = replace(facts, notes=(*facts.notes, f"backward cannot be traced: {seen.operator} ({seen.error})"))
    if fusion:
        from .compiled import fused

        facts = fused(facts, workload, seen, layout, precision)
    return facts


def _tracing_message(workload: Workload, seen: StepTrace, known: ModelFacts, layout: "Layout") -> str:
    count = f" in {len(layout.blocks)} repeated blocks and what is around them" if layout.blocks else ""
    return (
        f"{workload.name} cannot be traced: operator {seen.operator} does not work without values "
        f"({seen.error}). Known without it: {known.parameters:,} parameters{count}, so what weights, "
        "gradients and optimizer states take; not its activations and time. Dry runs work all the same; for "
        "an estimate give a workload that takes the other way for tensors without values, or shape numbers "
        "(--layers, --hidden, ...)"
    )


def _parts(workload: Workload, seen: StepTrace, layout: Layout) -> list[Part]:
    """The segments of a trace, grouped into parts in the order of the forward pass."""
    owned = _owned(seen, layout)
    maker = _Maker(workload, seen, layout, owned)
    before: list[Segment] = []
    between: list[Segment] = []
    tail: list[Segment] = []
    kinds: dict[Hashable, list[Segment]] = {}
    reached = {segment.path for segment in seen.segments if segment.block}
    # Blocks that were not reached still have their parameters.
    missed = [Segment(path=path, block=True, after=0) for path in layout.blocks if path not in reached]
    for segment in (*seen.segments, *missed):
        if segment.block:
            kinds.setdefault(maker.signature(segment), []).append(segment)
        elif not layout.blocks:
            (tail if segment.path == "" else between).append(segment)
        elif segment.after == 0:
            before.append(segment)
        elif segment.after < len(layout.blocks):
            between.append(segment)
        else:
            tail.append(segment)
    parts = []
    if before:
        parts.append(maker.part("embedding", "embedding", before))
    for number, alike in enumerate(kinds.values()):
        parts.append(maker.block("block" if not number else f"block {number + 1}", alike))
    if between:
        parts.append(maker.part("other", "other", between))
    norm, head, loss = _tail(tail, has_blocks=bool(layout.blocks))
    if norm:
        parts.append(maker.part("norm", "norm", norm))
    if head:
        parts.append(maker.part("head", "head", head))
    if loss:
        parts.append(maker.part("loss", "loss", loss, spike=seen.tail_transient))
    left = owned.get("", set())
    if left:
        parts.append(maker.unused(left))
    return parts


def _tail(tail: list[Segment], *, has_blocks: bool) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """The segments after the last block, divided into norm, head and loss."""
    if not has_blocks:
        return [], [], tail
    products = [index for index, each in enumerate(tail) if each.products]
    first = products[0] if products else len(tail)
    norm, head, loss = [], [], []
    for index, segment in enumerate(tail):
        if segment.path == "" and not segment.products:
            loss.append(segment)
        elif segment.products or (products and first < index and segment.parameters):
            head.append(segment)
        elif index < first:
            norm.append(segment)
        else:
            (head if index < (products[-1] if products else 0) else loss).append(segment)
    return norm, head, loss


def _owned(seen: StepTrace, layout: Layout) -> dict[str, set[str]]:
    """The parameters of each segment, by its key; unread parameters have the empty key."""
    owned: dict[str, set[str]] = {}
    left = set(seen.parameters)
    for path in layout.blocks:
        own_names = {name for name in left if name.startswith(path + ".")}
        owned[_key(path, True, 0)] = own_names
        left -= own_names
    for segment in seen.segments:
        if not segment.block:
            own_names = segment.parameters & left
            owned[_key(segment.path, False, segment.after)] = own_names
            left -= own_names
    owned[""] = left
    return owned


def _key(path: str, block: bool, after: int) -> str:
    return f"block {path}" if block else f"{path}@{after}"


def _head(seen: StepTrace, layout: Layout) -> tuple[int, bool]:
    """`vocabulary` and `tied` of the model's last product, if it computes logits of an embedded vocabulary."""
    last = [each for segment in seen.segments if segment.after == len(layout.blocks) for each in segment.products]
    tokens = [each for each in last if each.weight]
    if not tokens or not layout.blocks:
        return 0, False
    widest = max(tokens, key=lambda each: each.n)
    before = {name for segment in seen.segments if segment.after == 0 for name in segment.parameters}
    return widest.n, widest.weight in before


class _Maker:
    """Converts segments to parts: bytes of a batch become bytes a token."""

    def __init__(self, workload: Workload, seen: StepTrace, layout: Layout, owned: Mapping[str, set[str]]) -> None:
        self._seen, self._layout, self._owned = seen, layout, owned
        self._length = workload.seq_len or 1
        self._tokens = seen.samples * self._length
        self._is_causal = getattr(workload.model, "task", "") == "causal"

    def signature(self, segment: Segment) -> Hashable:
        """Key that is equal for identical blocks."""
        products = tuple((each.k, each.n, each.rows, each.count) for each in segment.products)
        calls = tuple((each.heads, each.kv_heads, each.head_dim) for each in segment.attention)
        return products, calls, self._count(self._names(segment))

    def block(self, name: str, alike: list[Segment]) -> Part:
        """The part of identical blocks. It uses their median: the first may contain tensors that are created once for all, and
        the last may have other temporaries."""
        one = sorted(alike, key=lambda each: each.saved.total)[len(alike) // 2]
        # The last block's backward begins while the loss's gradient is live.
        transient = statistics.median_low(each.transient for each in alike)
        return self._make(name, "block", [one], count=len(alike), transient=transient)

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
        names = {each for segment in segments for each in self._names(segment)}
        attention = self._attention([call for segment in segments for call in segment.attention])
        heads = attention.heads if attention else 0
        saved = self._per_token([each.saved for each in segments], heads)
        saved = PerToken(
            whole=saved.whole + sum(each.saved_rows for each in segments) / self._tokens,
            sequence=saved.sequence,
            sharded=saved.sharded,
            scores=saved.scores,
        )
        traffic = self._per_token([each.traffic for each in segments], heads)
        backward = sum(each.backward.total for each in segments)
        forward = sum(each.traffic.total for each in segments)
        boundary = sum(each.boundary for each in segments) / self._tokens if role == "block" else 0.0
        return Part(
            name=name,
            role=role,
            count=count,
            parameters=self._count(names),
            sharded=self._sharded(names, segments),
            frozen=self._count(names & self._seen.frozen),
            experts=self._count(names & {each.weight for each in _stacked(segments)}),
            routed=sum(each.rows * each.count * each.k for each in _first_of_mixtures(segments)) / self._tokens,
            matmuls=self._matmuls(segments),
            attention=attention,
            saved=saved,
            saved_fixed=sum(each.saved_fixed for each in segments),
            boundary=boundary,
            transient=self._split_transient(transient / self._tokens, boundary, saved),
            traffic=traffic,
            traffic_backward=_scaled(traffic, backward / forward) if forward and backward else None,
            traffic_fixed=sum(each.traffic_fixed for each in segments),
            kernels=float(sum(each.kernels for each in segments)),
        )

    def _names(self, segment: Segment) -> set[str]:
        return self._owned.get(_key(segment.path, segment.block, segment.after), set())

    def _count(self, names: set[str]) -> int:
        return sum(_numel(self._seen.parameters[name]) for name in names)

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
                what = (product.k, product.n, product.split, product.rows / self._tokens, product.trainable, experts)
                counted[what] = counted.get(what, 0) + product.count
        return tuple(
            Matmul(k=k, n=n, split=split, rows=rows, trainable=trainable, count=count, experts=experts)
            for (k, n, split, rows, trainable, experts), count in counted.items()
        )

    def _attention(self, calls: list[AttentionCall]) -> Attention | None:
        if not calls:
            return None
        return Attention(
            heads=sum(each.heads for each in calls),
            kv_heads=sum(each.kv_heads for each in calls),
            head_dim=calls[0].head_dim,
            causal=self._is_causal or all(each.causal for each in calls),
        )

    def _per_token(self, tallies: list[Tally], heads: int) -> PerToken:
        scores = sum(each.scores for each in tallies)
        pairs = self._seen.samples * self._length**2 * heads
        return PerToken(
            sequence=sum(each.outside for each in tallies) / self._tokens,
            sharded=sum(each.inside for each in tallies) / self._tokens + (0.0 if pairs else scores / self._tokens),
            scores=scores / pairs if pairs else 0.0,
        )

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
    first: dict[str, Product] = {}
    for product in _stacked(segments):
        first.setdefault(product.weight.rpartition(".")[0], product)
    return list(first.values())


def _scaled(value: PerToken, factor: float) -> PerToken:
    return PerToken(
        whole=value.whole * factor,
        sequence=value.sequence * factor,
        sharded=value.sharded * factor,
        scores=value.scores * factor,
    )


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
