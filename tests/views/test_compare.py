"""Runs side by side: values, differences, and significance computed from the recorded spread."""

import json
import math
import random
import statistics

import pytest
from redline.base.errors import UsageError
from redline.results import Measurement, Status, Trial, View
from redline.results.summary import judged
from redline.views.compare import compare, probability, relative_error


def measurement(throughput, spread=1.0, **more):
    return Measurement(
        status=Status.OK, throughput=throughput, unit="tokens/s", step_ms=100.0, step_ms_spread=spread, **more
    )


@pytest.fixture
def make(tmp_path, open_run, point, oom):
    """`make(name, throughput, ...)`: a run of two trials, the second the winner."""

    def make(name, throughput=200.0, *, knobs=None, winner=None, **more):
        with open_run(tmp_path / name, **more) as run:
            run.start(point(0, **(knobs or {})), sampler="default")
            run.finish(0, measurement(100.0, peak_memory_mib=500.0))
            run.start(point(1, **(knobs or {})), sampler="tpe")
            run.finish(1, winner or measurement(throughput, devices=2, seconds_total=30.0))
            run.start(point(2, **(knobs or {})), sampler="tpe")
            run.finish(2, oom(2000.0))
        return View(tmp_path / name)

    return make


def test_winners_are_shown_side_by_side(make, point):
    made = compare([make("a", 200.0), make("b", 260.0)])
    knobs, numbers = dict(made.knobs), dict(made.numbers)
    assert knobs["micro_batch"] == ("2", "2") and knobs["fusion"] == ("false", "false")
    assert numbers["tokens/s"] == ("200", "260")
    assert numbers["gain over the default"] == ("2", "2.6")
    assert numbers["winner is trial"] == ("1", "1")
    assert numbers["oom"] == ("1", "1") and "crash" not in numbers
    assert numbers["device seconds"] == ("60", "60")
    assert made.notes == ()
    (difference,) = made.differences
    assert difference.ratio == pytest.approx(1.3)
    assert difference.p < 1e-6
    assert difference.words == "30.0% faster (p < 0.001)"
    found = json.loads(made.to_json())
    assert found["differences"][0]["ratio"] == pytest.approx(1.3)
    assert found["numbers"]["throughput"] == [200.0, 260.0] and found["numbers"]["mfu"] == [None, None]
    assert found["numbers"]["gain"] == [2.0, 2.6] and found["numbers"]["crash"] == [0, 0]
    assert found["numbers"]["spread"] == pytest.approx([0.01, 0.01])


def test_a_difference_within_the_spread_is_not_significant(make):
    made = compare([make("a", winner=measurement(200.0, 10.0)), make("b", winner=measurement(198.0, 10.0))])
    (difference,) = made.differences
    # 10 ms of 100 ms is 1.96 standard errors of 5.1 %; the difference of 1 % is 0.14 of the joint one.
    expected = math.erfc(abs(math.log(0.99)) / (math.sqrt(2) * 10 / 1.959964 / 100) / math.sqrt(2))
    assert difference.p == pytest.approx(expected)
    assert difference.words == "1.0% slower, which is not significant (p = 0.89)"


def test_without_recorded_spread_no_significance_is_claimed(make):
    bare = Measurement(status=Status.OK, throughput=300.0, unit="tokens/s")
    (difference,) = compare([make("a"), make("b", winner=bare)]).differences
    assert difference.p is None and "it may be noise" in difference.words


def test_the_error_holds_what_a_simulation_shows():
    """About 5 % of comparisons of equally fast candidates are called different at 0.05."""
    draw = random.Random(0)
    error, called, count = 0.03, 0, 4000
    for _ in range(count):
        ratio = math.exp(draw.gauss(0, error) - draw.gauss(0, error))
        called += probability(ratio, error, error) < 0.05
    assert called / count == pytest.approx(0.05, abs=0.012)
    assert probability(1.0, 0.0, 0.0) == 1.0 and probability(1.1, 0.0, 0.0) == 0.0


def test_the_error_is_that_of_the_median_of_re_measurements_moderated_by_that_within_one():
    again = (95.0, 100.0, 105.0)
    trial = judged(Trial(number=0, config={}, measurement=measurement(100.0, 2.0)), again)
    within = 2.0 / 1.959963984540054 / 100.0
    variance = (2 * (statistics.stdev(again) / 100.0) ** 2 + 4 * within**2) / 6
    # Student's t, six degrees of freedom; a median is less certain than a mean.
    half_width = math.sqrt(math.pi / 2) * 2.4469 * math.sqrt(variance / 3)
    assert relative_error(trial) == pytest.approx(half_width / 1.959963984540054, rel=0.01)


def test_other_differences_are_noted(make, asked):
    other = make("b", asked={**asked, "seq_len": 256})
    (note,) = [each for each in compare([make("a"), other]).notes if "seq_len" in each]
    assert "seq_len: was 128, now 256" in note


def test_another_model_is_noted_in_words(make, asked):
    other = make("b", asked={**asked, "model": "bert-tiny", "workload": {"id": "77", "spec": "bert-tiny"}})
    (note,) = [each for each in compare([make("a"), other]).notes if "trained" in each]
    assert "b trained bert-tiny, " in note and "a gpt2-tiny" in note and "not due to the configuration" in note


def test_other_spaces_and_units_are_refused(make, asked):
    fewer = [each for each in asked["space"]["knobs"] if each["name"] != "zero"]
    with pytest.raises(UsageError, match="do not have the same space: only '.*b' has zero"):
        compare([make("a", asked={**asked, "space": {"knobs": fewer}}), make("b", knobs={"zero": 1})])
    samples = Measurement(status=Status.OK, throughput=300.0, unit="samples/s")
    with pytest.raises(UsageError, match="do not count in the same unit"):
        compare([make("c"), make("d", winner=samples)])
    with pytest.raises(UsageError, match="needs two runs or more, but got 1"):
        compare([make("e")])
