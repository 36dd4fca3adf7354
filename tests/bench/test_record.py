"""Recorded surfaces: the stored ones can be replayed, and recording resumes after an interruption."""

import importlib.util
import sys
from pathlib import Path

import pytest
import redline
from redline.results import Measurement, Status
from redline.space import Space

BENCH = Path(redline.__file__).parent / "bench"


def bench(name):
    """Imports a module of bench/ with bench/ in the path, as for a script."""
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record, tables = bench("record"), importlib.import_module("tables")
KEPT = {each.name: each for each in tables.read_folder(BENCH / "surfaces")}


@pytest.mark.parametrize("name", sorted(KEPT))
def test_a_kept_surface_is_a_whole_grid_with_real_failures(name):
    surface = KEPT[name]
    limit = surface.facts["hardware"]["memory_limit_mib"]
    assert len(surface.rows) >= 150 and surface.causes_known
    statuses = [each.status for each in surface.rows.values()]
    assert 0.1 < statuses.count(Status.OOM) / len(statuses) < 0.5
    assert set(statuses) == {Status.OK, Status.OOM}
    for measured in surface.rows.values():
        assert measured.memory_limit_mib == limit
        assert measured.peak_memory_mib < limit or not measured.ok


@pytest.mark.parametrize("name", sorted(KEPT))
def test_the_estimator_is_made_from_a_kept_surfaces_facts(name):
    surface = bench("estimator").load(BENCH / "surfaces" / f"{name}.csv")
    table = surface.estimator.table(surface.configs)
    assert (table.throughput > 0).all() and len(table.throughput) == len(KEPT[name].rows)


@pytest.fixture
def space():
    space = Space()
    dp = space.choice("dp", [1, 2])
    space.choice("zero", [0, 1, 2], when=dp > 1)
    space.choice("micro_batch", [4, 8])
    return space


def ok(step_ms):
    speed = 1e6 / step_ms
    return Measurement(
        status=Status.OK, tokens_per_second=speed, throughput=speed, step_ms=step_ms, peak_memory_mib=512.0
    )


def test_recording_resumes_where_it_stopped(space, tmp_path):
    path = tmp_path / "table.csv"
    first, second, *rest = space
    table = record.Table(path, space, "tokens_per_second")
    table.add(second, Measurement(status=Status.OOM, reason="too much", memory_limit_mib=100.0))
    table.add(first, ok(20.0))
    again = record.Table(path, space, "tokens_per_second")
    assert [again.has(each) for each in (first, second, *rest)] == [True, True, *[False] * len(rest)]
    lines = path.read_text().splitlines()
    assert lines[0].startswith("dp,zero,micro_batch,status,reason,tokens_per_second,step_ms,")
    assert lines[1] == "1,0,4,ok,,50000.0,20.00,,0.50000,"  # without replicas zero has its default
    assert lines[2].startswith("1,0,8,oom,too much,")


def test_a_failure_that_a_hungrier_run_outlived_was_no_lack_of_memory():
    import numpy as np
    import pandas as pd

    rows = [
        # tp, pp, dp, zero, micro_batch, grad_accum, ran
        (2, 4, 4, 1, 2, 8, True),
        (2, 4, 8, 1, 2, 8, False),  # states shared by more ranks: outlived
        (2, 4, 2, 1, 2, 8, False),  # by fewer ranks
        (2, 4, 4, 1, 4, 8, False),  # a larger micro-batch
        (2, 4, 4, 1, 1, 2, False),  # fewer in flight, and smaller ones: outlived
        (4, 4, 4, 1, 1, 2, False),  # sharded differently: unknown
        (2, 4, 4, 0, 1, 2, False),  # states not shared
    ]
    table = pd.DataFrame(rows, columns=["tp", "pp", "dp", "zero", "micro_batch", "grad_accum", "ran"])
    found = bench("estimator").outlived(table.drop(columns="ran"), table.ran.to_numpy())
    assert found.tolist() == [False, True, False, False, True, False, False]
    alone = bench("estimator").outlived(table[["micro_batch"]], table.ran.to_numpy())
    assert np.flatnonzero(alone).tolist() == [1, 2, 4, 5, 6]
