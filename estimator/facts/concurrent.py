"""Traces several variants at the same time, in one process each, before they are requested one by one."""

import gc
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

from ...base.collection import without_collection
from ...base.device import usable_cores
from ...base.errors import WorkloadError
from ...space import Space
from ..setup import TrainingSetup
from .model_facts import ModelFacts, Variant
from .traced import TracedFacts

_VARIANT = ("precision", "attention", "fusion", "kernels")


def variants_of(space: Space, setup: TrainingSetup) -> list[Variant]:
    """Combinations of precision, attention, fusion and kernels in a space; missing knobs have the setup's values."""
    known: dict[str, tuple[Any, ...]] = {knob.name: knob.values for knob in space.knobs if not knob.derived}
    known = {name: values for name, values in known.items() if name not in setup.fixed}
    precisions, attentions, fusions, kernels = (known.get(name, (getattr(setup, name),)) for name in _VARIANT)
    return list(product(precisions, attentions, fusions, kernels))


def trace_concurrently(
    source: TracedFacts, variants: Iterable[Variant], progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Traces missing variants, one process a core; failures are left for later. `progress` is called with the number of finished
    variants and the total.

    Processes are forked, so that they inherit torch and transformers; this requires that no other thread runs that may hold a
    lock. Otherwise nothing happens, and variants are traced when they are requested.
    """
    groups: dict[tuple[str, str], list[Variant]] = {}
    # Facts with kernels follow from those without, and tf32 has those of fp32.
    formed: Iterable[Variant] = (("fp32" if each[0] == "tf32" else each[0], *each[1:3], False) for each in variants)
    for variant in dict.fromkeys(formed):
        if not source.is_known(variant):
            # Variants that differ in fusion only share a trace.
            groups.setdefault(variant[:2], []).append(variant)
    workers = min(usable_cores(), len(groups))
    if workers < 2 or sys.platform != "linux" or threading.active_count() > 1:
        return
    try:
        with without_collection():
            source.prepare(any(variant[2] for some in groups.values() for variant in some))
    except WorkloadError:
        return  # raised again when a variant is requested
    if threading.active_count() > 1:
        return
    context = multiprocessing.get_context("fork")
    # A process that is terminated before it has its own handlers would run this one's, and stay.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pool = context.Pool(workers, initializer=_begin, initargs=(source,))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with pool:
        done, total = 0, sum(map(len, groups.values()))
        for found in pool.imap_unordered(_trace, groups.values()):
            source.add(found)
            done += len(found)
            progress(done, total)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_source: TracedFacts | None = None
"""In a forked process: the source whose variants it traces."""


def _begin(source: TracedFacts) -> None:
    import torch

    global _source
    _source = source
    # The parent terminates this process; the parent's signal handlers must not run here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    gc.freeze()  # the parent's objects are no garbage here
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork


def _trace(variants: list[Variant]) -> Mapping[Variant, ModelFacts]:
    assert _source is not None
    found = {}
    for variant in variants:
        try:
            precision, attention, fusion, kernels = variant
            found[variant] = _source.facts(precision=precision, attention=attention, fusion=fusion, kernels=kernels)
        except WorkloadError:
            return found  # raised again when it is requested
    return found
