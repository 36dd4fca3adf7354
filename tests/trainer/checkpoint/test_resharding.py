"""A training that resumes with another strategy on other ranks equals one without an interruption."""

import functools
import itertools

import pytest
import resharding
from redline.models import flops_of
from tiers import tiered

QUICK = [
    ("llama", "tp2+sp", "zero3"),
    ("gpt2", "zero1", "pp2"),
    ("llama", "pp2 uneven", "pp2"),
    ("t5", "pp2", "zero3"),
    ("mixtral", "ep2", "one"),
    ("llama", "runs", "zero1"),
]
"""Every kind of strategy before and after a checkpoint."""
SLOW = [
    ("llama", "pp2 interleaved", "one"),
    ("bert", "zero2+ckpt", "tp2+sp"),
    ("llama", "zero3", "pp2"),
    ("llama", "zero3+bf16", "tp2+sp"),
    ("gpt2", "one", "tp2+sp"),
    ("gpt2", "tp2+sp", "zero1"),
    ("t5", "tp2+sp", "one"),
    ("mixtral", "ep2", "ep2+zero3"),
    ("mixtral", "ep2+zero3", "tp2+sp"),
    ("mixtral", "ep2", "ep4+zero1"),
    ("mixtral", "ep2·tp2", "ep2"),
    ("mixtral", "ep2·tp2 etp1", "ep2"),
    ("mixtral", "ep2+zero3", "ep2·tp2·dp2 etp1"),
    ("mixtral", "ep2·tp2·dp2 etp1", "pp2 uneven"),
    ("gpt2", "pp2 uneven", "pp2 interleaved"),
    ("gpt2", "zero1", "runs"),
    ("mixtral", "runs", "ep2+zero3"),
]
EVERY = [
    pytest.param(*cell, marks=pytest.mark.exhaustive)
    for cell in itertools.product(resharding.TABLE_FAMILIES, resharding.STRATEGIES, resharding.STRATEGIES)
    if cell not in {*QUICK, *SLOW}
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept"), {}


@functools.cache
def tiny(family):
    """Returns the workload of a family with its FLOPs known, as a training's driver would provide them."""
    made = resharding.tiny(family)
    flops_of(made)
    return made


def run(pools, family, strategy, steps, **where):
    size = resharding.ranks(strategy)
    given = tiny(family), strategy, steps
    if size == 1:
        return resharding.part(*given, **where)
    # Rank 0 keeps the log.
    return pools[size].run(lambda: resharding.part(*given, **where))[0]


def whole(kept, pools, family):
    """Returns the uninterrupted training on one process."""
    _, known = kept
    if family not in known:
        known[family] = run(pools, family, "one", resharding.BEFORE + resharding.AFTER)
    return known[family]


def saved(kept, pools, family, strategy):
    """Returns the folder of a training that was saved with a strategy."""
    folder, known = kept
    where = folder / f"{family}-{strategy}"
    if (family, strategy) not in known:
        known[family, strategy] = run(pools, family, strategy, resharding.BEFORE, save=where)
    return where


@pytest.mark.parametrize(("family", "first", "second"), [*tiered(QUICK, SLOW), *EVERY])
def test_a_resharded_training_equals_an_uninterrupted_one(two, request, kept, tmp_path, family, first, second):
    if reason := next(filter(None, (resharding.obstacle(family, each) for each in (first, second))), ""):
        pytest.skip(reason)
    pools = {2: two}
    if any(resharding.ranks(each) == 4 for each in (first, second)):
        pools[4] = request.getfixturevalue("four")
    expected = whole(kept, pools, family)
    begin = saved(kept, pools, family, first)
    found = run(
        pools,
        family,
        second,
        resharding.BEFORE + resharding.AFTER,
        begin=begin,
        copy=tmp_path / "copy",
        save=tmp_path / "end",
    )
    assert resharding.unequal(begin, tmp_path / "copy") == []
    assert len(found.losses) == resharding.AFTER
    assert resharding.departure(expected, found) <= resharding.tolerance(first, second)


def test_the_comparison_sees_one_bit(two, kept, tmp_path):
    begin = saved(kept, {2: two}, "llama", "tp2+sp")
    other = saved(kept, {2: two}, "llama", "zero3")
    # Both trainings are equal up to rounding.
    assert resharding.unequal(begin, other)
