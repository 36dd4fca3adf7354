"""`redline scale`: a model tuned on a growing number of devices, and predictions beyond it."""

import contextlib
import csv
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from math import prod

import pytest
import redline as rl
from command_line import run
from predicted_runner import predicted
from redline.results.scaling import COLUMNS, ScalePoint, Scaling
from redline.tuner.listener import SearchListener
from redline.tuner.scaling import counts_of

PREDICTED = predicted("gpt2-tiny", "h100-80gb", seq_len=128, trials=3)
NARROW = {
    "fix": {"attention": "sdpa", "precision": "bf16", "fusion": False, "kernels": False, "checkpoint_ratio": 0},
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """A scaling of a tiny model over 1, 2 and 4 devices, with predictions up to 16."""
    out = tmp_path_factory.mktemp("runs") / "scale"
    return rl.scale("gpt2-tiny", [4, 1, 2], global_batch=64, predict_to=16, out=out, **PREDICTED, **NARROW), out


def test_each_count_is_tuned_and_more_are_predicted(scaled):
    scaling, out = scaled
    assert [each.devices for each in scaling.points] == [1, 2, 4, 8, 16]
    assert [each.devices for each in scaling.measured] == [1, 2, 4]
    for each in scaling.measured:
        assert (out / f"devices-{each.devices}" / "best.yaml").exists()
        assert each.throughput >= each.default_throughput > 0
        assert each.global_batch == 64 and each.peak_memory_mib > 0
    for each in scaling.points:
        assert each.predicted_low < each.predicted_throughput < each.predicted_high
        assert prod(each.config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp")) == each.devices


def test_the_predicted_interval_widens_with_the_distance(scaled, tmp_path):
    out = shutil.copytree(scaled[1], tmp_path / "scale")
    options = {**PREDICTED, **NARROW, "resume": True}
    found = rl.scale("gpt2-tiny", [1, 2, 4], global_batch=64, predict_to=1024, out=out, **options)
    last = [each for each in found.points if each.devices >= 8]
    wide = [each.predicted_high / each.predicted_low for each in last]
    assert last[-1].devices == 1024 and wide == sorted(wide) and wide[-1] > 1.2 * wide[0]


def test_speed_up_and_efficiency_are_against_the_fewest_devices(scaled):
    scaling, _ = scaled
    one, *_, four = scaling.measured
    assert scaling.speed_up(one) == scaling.efficiency(one) == 1
    assert scaling.speed_up(four) == four.throughput / one.throughput
    assert scaling.efficiency(four) == pytest.approx(four.throughput / one.throughput / 4)
    last = scaling.points[-1]
    assert scaling.speed_up(last) is None and scaling.efficiency(last) is None
    expected = last.predicted_throughput / scaling.points[0].predicted_throughput / 16
    assert scaling.predicted_efficiency(last) == pytest.approx(expected)


def test_predictions_are_corrected_by_what_was_measured():
    point = {"unit": "tokens/s", "global_batch": 8}
    apart = Scaling(
        points=(
            ScalePoint(devices=2, throughput=100.0, predicted_throughput=110.0, **point),
            ScalePoint(devices=8, predicted_throughput=330.0, **point),
        )
    )
    assert apart.predicted_efficiency(apart.points[1]) == pytest.approx(330 / 110 * 2 / 8)


def test_the_table_and_the_plot_hold_every_count(scaled):
    scaling, out = scaled
    with (out / "scale.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["devices"]) for row in rows] == [1, 2, 4, 8, 16]
    for row, each in zip(rows, scaling.points, strict=True):
        assert (row["throughput"] == "") == (each.throughput is None)
        assert float(row["predicted_throughput"]) == pytest.approx(each.predicted_throughput, rel=1e-6)
        assert f"micro_batch={each.config['micro_batch']}" in row["config"]
    drawn = ElementTree.parse(out / "scale.svg").getroot()
    circles = drawn.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2 * 3, "the throughput of the winner and of the default, at three counts"
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [2, 5, 3, 3], (
        "proportional, predicted, default, winner"
    )
    json.dumps(scaling.to_dict(), allow_nan=False)


def test_the_global_batch_stays_unless_it_is_to_grow(tmp_path):
    small = {**PREDICTED, **NARROW, "trials": 1, "predict_to": 4}
    weak = rl.scale("gpt2-tiny", "1,2", global_batch=8, weak=True, **small)
    assert [each.global_batch for each in weak.points] == [8, 16, 32] and weak.weak
    usual = rl.scale("gpt2-tiny", "1,2", **small)
    assert len({each.global_batch for each in usual.points}) == 1


def test_a_device_count_at_which_nothing_fits_is_reported():
    # Weights, gradients and optimizer state of 124 million parameters take 1.9 GiB.
    asked = predicted("gpt2", "h100-80gb", seq_len=128, trials=1, memory_limit="1500MiB", global_batch=16)
    needs = {**asked, **NARROW}
    both = rl.scale("gpt2", "1,16", predict_to=16, **needs)
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
    again = rl.scale(
        "gpt2-tiny", [1, 2, 4, 8], global_batch=64, predict_to=8, out=out, resume=True, **PREDICTED, **NARROW
    )
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
def test_the_command_line_shows_a_line_a_count(capsys, tmp_path):
    common = ["--runner", "local", "--trials", 1, "--seq-len", 16, "--measure-time", "50ms", "--fix", "fusion=false"]
    code, out, _ = run(
        capsys, "scale", "gpt2-tiny", "--devices", "1,2", "--global-batch", 8, "--weak", "--predict-to", 4, *common,
        "--out", tmp_path / "s",
    )  # fmt: skip
    assert code == 0
    lines = [
        line.split() for line in out.splitlines() if line.strip()[:1] in "124" and re.search(r"\dk?-\d[\d,.]*k?$", line)
    ]
    assert [line[:2] for line in lines] == [["1", "8"], ["2", "16"], ["4", "32"]]
    assert "1.00x" in lines[0] and "2 devices" in out and "scale.svg" in out
    code, out, err = run(
        capsys, "scale", "gpt2-tiny", "--devices", "1", "--json", "--predict-to", 1, *common, "--out", tmp_path / "j"
    )
    assert code == 0 and [each["devices"] for each in json.loads(out)["points"]] == [1]
    code, out, err = run(capsys, "scale", "gpt2-tiny", "--resume", "--devices", "1", *common)
    assert code == 2 and "--resume needs --out, the folder to continue" in err
    code, out, err = run(capsys, "scale", "gpt2-tiny", "--devices", "some", *common)
    assert code == 2 and "devices must be numbers such as 1,2,4 or pow2:64, but got 'some'" in err


@pytest.mark.slow
def test_two_ranks_are_measured_beside_one(tmp_path):
    found = rl.scale(
        "gpt2-tiny", "1,2", runner="local", global_batch=4, seq_len=32, trials=2, measure_time="1s", out=tmp_path / "s",
        fix={"fusion": False, "precision": "fp32"},
    )  # fmt: skip
    assert [each.devices for each in found.points] == [1, 2], (
        "a machine without links to others is not predicted farther"
    )
    assert all(each.throughput > 0 and each.predicted_throughput > 0 for each in found.points)


def test_a_knob_missing_at_some_device_counts_is_reported():
    found = rl.scale("gpt2-tiny", "1,2", global_batch=8, predict_to=2, **PREDICTED, fix={"tp": 2})
    assert "tp needs two devices or more" in found.points[0].why and found.points[1].config["tp"] == 2
