"""A result's view in a notebook."""

from xml.etree import ElementTree

import pytest
import redline as rl
from redline.results import Measurement, Status, Trial
from redline.tuner.result import make_result


@pytest.fixture
def result():
    def train(config):
        if config["micro_batch"] > 4:
            raise rl.OutOfMemory("<script>alert(1)</script>")
        return rl.Measurement(
            status="ok", throughput=10.0 * config["micro_batch"], unit="samples/s",
            peak_memory_mib=100.0 * config["micro_batch"], memory_limit_mib=512.0,
        )  # fmt: skip

    space = rl.Space()
    space.choice("micro_batch", [1, 2, 4, 8])
    return rl.tune(train, space, trials=4, sampler="grid", isolate=False)


def test_the_html_holds_the_winner_and_the_trials(result):
    root = ElementTree.fromstring(result._repr_html_())
    text = " ".join(root.itertext())
    assert "best: trial 2, 40 samples/s" in text and "gain 4.00x" in text
    assert "3 ok, 1 oom" in text
    rows = [[cell.text for cell in row] for row in root.findall(".//tr")]
    assert rows[0] == ["trial", "status", "samples/s", "peak MiB", "sampler", "micro_batch"]
    assert rows[1][1:3] == ["ok", "40"] and rows[-1][1] == "oom"


def test_a_result_without_a_winner_says_why():
    failed = Trial(number=0, config={"a": 1}, measurement=Measurement(status=Status.OOM, reason="x < y"))
    made = make_result([failed], ["a"], folder=None, ended="", interrupted=False)
    assert "none of 1 trials succeeded: 1 oom." in made._repr_html_()
    assert "no trial has finished" in make_result([], [], folder=None, ended="", interrupted=False)._repr_html_()
