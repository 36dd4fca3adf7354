"""Text of configurations."""

import math

import pytest
from redline.knobs.text import config_text, exact_text, value_text
from redline.space.values import from_text


@pytest.mark.parametrize("value", [True, False, 3, 0.1, 1.0, 1e-05, math.pi, "sdpa", "0-7:tp2,ckpt 8-31:tp1,zero3"])
def test_the_command_line_reads_the_text_of_a_value_as_that_value(value):
    read = from_text(exact_text(value), None, "knob")
    assert read == value
    assert type(read) is type(value)
    assert from_text(value_text(value), None, "knob") == value


def test_lossy_knobs_are_marked():
    config = {"tp": 2, "precision": "bf16_pure", "fusion": False}
    assert config_text(config, ["precision"]) == "tp=2 precision=bf16_pure (lossy) fusion=false"
    assert config_text(config, between=", ") == "tp=2, precision=bf16_pure, fusion=false"
