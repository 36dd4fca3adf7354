"""Traces several variants at the same time, in one process each, before they are requested one by one."""

from collections.abc import Callable, Iterable
from itertools import product
from multiprocessing.connection import wait
from typing import Any

from ...base.collection import without_collection
from ...base.device import usable_cores
from ...base.errors import WorkloadError
from ...space import Space
from ..setup import TrainingSetup
from .model_facts import FactsSource, Variant
from .traced import Step, TracedFacts, step_of, traced_variant

_VARIANT = ("precision", "attention", "fusion", "kernels")


def variants_of(space: Space, setup: TrainingSetup) -> list[Variant]:
    """Combinations of precision, attention, fusion and kernels in a space; missing knobs have the setup's values."""
    knob_values: dict[str, tuple[Any, ...]] = {knob.name: knob.values for knob in space.knobs if not knob.derived}
    knob_values = {name: values for name, values in knob_values.items() if name not in setup.fixed}
    precisions, attentions, fusions, kernels = (knob_values.get(name, (getattr(setup, name),)) for name in _VARIANT)
    return list(product(precisions, attentions, fusions, kernels))


def trace_ahead(source: TracedFacts, variants: Iterable[Variant]) -> None:
    """Starts tracing variants in other processes while this one does something else, where processes can be forked; facts that
    are requested wait for them."""
    for group in _missing(source, variants)[: usable_cores() - 1]:
        source.begin(group)


def trace_space(
    source: FactsSource,
    space: Space,
    setup: TrainingSetup,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Traces the variants of a space with `trace_concurrently`, if their facts come from traces."""
    if isinstance(source, TracedFacts):
        trace_concurrently(source, variants_of(space, setup), progress)


def trace_concurrently(
    source: TracedFacts, variants: Iterable[Variant], progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Traces missing variants, one process a core, and waits for them and for those that were begun; failures are left for later.
    `progress` is called with the number of finished variants and the total.

    Where no process can be forked, variants are traced when they are requested.
    """
    groups = _missing(source, variants)
    workers = min(usable_cores(), len(groups) + len(source.begun))
    if not groups or workers < 2:
        return
    try:
        with without_collection():
            source.prepare(any(variant[2] for group in groups for variant in group))
    except WorkloadError:
        return  # raised again when a variant is requested
    done, total = 0, sum(map(len, groups))
    while True:
        while groups and len(source.begun) < workers:
            if not source.begin(groups.pop(0)):
                groups = []
        if not source.begun:
            return
        ready = wait([call.channel for call in source.begun.values()])
        for key in [key for key, call in source.begun.items() if call.channel in ready]:
            done += source.finish(key)
            progress(done, max(done, total))


def _missing(source: TracedFacts, variants: Iterable[Variant]) -> list[list[Variant]]:
    """The traced variants of these that are neither known nor being traced, grouped by the step that they share."""
    groups: dict[Step, list[Variant]] = {}
    for variant in dict.fromkeys(traced_variant(variant, source.liger) for variant in variants):
        if step_of(variant) not in source.begun and not source.is_known(variant):
            groups.setdefault(step_of(variant), []).append(variant)
    return list(groups.values())
