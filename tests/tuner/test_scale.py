"""`redline scale`: a model tuned on a growing number of devices."""

import contextlib
import csv
import json
from dataclasses import fields
from math import prod

import pytest
import redline as rl
from predicted_runner import predicted
from redline.tuner.listener import SearchListener
from redline.tuner.scaling import ScalePoint, Scaling, counts_of

PREDICTED = predicted("gpt2-tiny", "h100-80gb", seq_len=128, trials=3)
NARROW = {
    "fix": {"attention": "sdpa", "precision": "bf16", "fusion": False, "kernels": False, "checkpoint_ratio": 0},
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """A scaling of a tiny model over 1, 2 and 4 devices."""
    out = tmp_path_factory.mktemp("runs") / "scale"
    return rl.scale("gpt2-tiny", [4, 1, 2], global_batch=64, out=out, **PREDICTED, **NARROW), out


def test_each_count_is_tuned(scaled):
    scaling, out = scaled
    assert [each.devices for each in scaling.points] == [each.devices for each in scaling.measured] == [1, 2, 4]
    for each in scaling.measured:
        assert (out / f"devices-{each.devices}" / "best.yaml").exists()
        assert each.throughput >= each.default_throughput > 0
        assert each.global_batch == 64 and each.peak_memory_mib > 0
        assert prod(each.config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp")) == each.devices


def test_efficiency_is_relative_to_the_fewest_measured_devices():
    point = {"unit": "tokens/s", "global_batch": 8}
    apart = Scaling(
        points=(
            ScalePoint(devices=1, why="nothing fits", **point),
            ScalePoint(devices=2, throughput=100.0, **point),
            ScalePoint(devices=8, throughput=300.0, **point),
        )
    )
    assert list(apart.table.efficiency[1:]) == pytest.approx([1.0, 300 / 100 * 2 / 8])
    assert list(apart.table.speed_up[1:]) == [1.0, 3.0] and apart.to_dict()["points"][0]["efficiency"] is None
    nothing = Scaling(points=(ScalePoint(devices=1, why="nothing fits", **point),))
    assert nothing.to_dict()["points"][0]["speed_up"] is None


def test_the_table_holds_every_count(scaled):
    scaling, out = scaled
    with (out / "scale.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {*rows[0]} == {field.name for field in fields(ScalePoint)} | {"speed_up", "efficiency"}
    assert [int(row["devices"]) for row in rows] == [1, 2, 4]
    for row, each in zip(rows, scaling.points, strict=True):
        assert float(row["throughput"]) == pytest.approx(each.throughput, rel=1e-6)
        assert f"micro_batch={each.config['micro_batch']}" in row["config"]
    json.dumps(scaling.to_dict(), allow_nan=False)


@pytest.mark.slow
def test_the_global_batch_stays_unless_it_is_to_grow(tmp_path):
    small = {**PREDICTED, **NARROW, "trials": 1}
    weak = rl.scale("gpt2-tiny", "1,2", global_batch=8, weak=True, **small)
    assert [each.global_batch for each in weak.points] == [8, 16] and weak.weak
    usual = rl.scale("gpt2-tiny", "1,2", **small)
    assert len({each.global_batch for each in usual.points}) == 1
    grown = rl.scale("gpt2-tiny", "1,3", weak=True, **small)
    assert [each.global_batch for each in grown.points] == [32, 96], "three devices cannot share the usual 32 samples"


@pytest.mark.slow
def test_a_device_count_at_which_nothing_fits_is_reported():
    # Weights, gradients and optimizer state of 124 million parameters take 1.9 GiB.
    asked = predicted("gpt2", "h100-80gb", seq_len=128, trials=1, memory_limit="1500MiB", global_batch=16)
    needs = {**asked, **NARROW}
    both = rl.scale("gpt2", "1,16", **needs)
    assert both.points[0].why and both.points[0].throughput is None
    assert both.points[1].throughput is not None and not both.points[1].why


def test_an_interrupt_ends_it_with_what_was_found(tmp_path):
    class Interrupts(contextlib.nullcontext, SearchListener):
        def __init__(self, count):
            super().__init__(self)

        def on_trial_end(self, trial):
            raise KeyboardInterrupt

    found = rl.scale("gpt2-tiny", "1,2", out=tmp_path / "s", listening=Interrupts, **PREDICTED, **NARROW)
    assert found.interrupted and [each.devices for each in found.points] == [1]
    assert (tmp_path / "s" / "scale.csv").exists()


def test_scale_resumes_from_existing_runs(scaled):
    _, out = scaled

    def started(name):
        with (out / name / "trials.csv").open(newline="") as file:
            return [(row["trial"], row["started"]) for row in csv.DictReader(file)]

    before = {each.name: started(each.name) for each in out.glob("devices-*")}
    again = rl.scale("gpt2-tiny", [1, 2, 4, 8], global_batch=64, out=out, resume=True, **PREDICTED, **NARROW)
    assert [each.devices for each in again.measured] == [1, 2, 4, 8]
    assert len(before) == 3 and all(started(name) == trials for name, trials in before.items())


@pytest.mark.parametrize(
    ("given", "counts"), [("1,2,4", (1, 2, 4)), ("4, 1,4", (1, 4)), ("pow2:20", (1, 2, 4, 8, 16)), ([3], (3,))]
)
def test_counts_are_numbers_or_powers_of_two(given, counts):
    assert counts_of(given) == counts


@pytest.mark.parametrize("given", ["", "0", "1,x", "-2", "pow2:0", "pow2:x", "1.5", [True], [], [0]])
def test_invalid_device_counts_are_refused(given):
    with pytest.raises(rl.UsageError, match="devices must"):
        counts_of(given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": 7, "weak": True, "devices": "2,4"}, "it must be a multiple of 2"),
        ({"fix": {"nothing": 3}}, "unknown knob 'nothing'"),
    ],
)
def test_impossible_scalings_are_refused_at_once(options, words, tmp_path):
    with pytest.raises((rl.UsageError, rl.SpaceError), match=words):
        rl.scale("gpt2-tiny", out=tmp_path / "s", **{"devices": "1,2", **PREDICTED, **options})
    assert not (tmp_path / "s").exists()


def test_a_callable_knows_nothing_of_devices():
    with pytest.raises(rl.UsageError, match="a callable does not depend on devices"):
        rl.scale(lambda config: 1.0, "1,2")


@pytest.mark.slow
def test_two_ranks_are_measured_beside_one(tmp_path):
    found = rl.scale(
        "gpt2-tiny", "1,2", runner="local", global_batch=4, seq_len=32, trials=2, measure_time="1s", out=tmp_path / "s",
        fix={"fusion": False, "precision": "fp32"},
    )  # fmt: skip
    assert [each.devices for each in found.points] == [1, 2]
    assert all(each.throughput > 0 for each in found.points)


def test_a_knob_missing_at_some_device_counts_is_reported():
    found = rl.scale("gpt2-tiny", "1,2", global_batch=8, **PREDICTED, fix={"tp": 2})
    assert "tp needs two devices or more" in found.points[0].why and found.points[1].config["tp"] == 2
