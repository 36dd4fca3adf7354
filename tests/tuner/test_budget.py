"""Durations and amounts of memory are parsed as people write them; an error quotes invalid input."""

import pytest
from redline import UsageError
from redline.tuner.budget import parse_duration, parse_memory


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), (2.5, 2.5), ("5 min", 300), (None, None)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "m30", "0", "-5s", "0s", -1, "nan"])
def test_durations_that_are_none(text):
    with pytest.raises(UsageError, match="time must be"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "mib"),
    [("8GiB", 8192), ("512MiB", 512), ("1.5G", 1536), ("1 gib", 1024), (700, 700), ("1GB", 953.67), ("500MB", 476.84)],
)
def test_amounts_of_memory(text, mib):
    assert parse_memory(text) == pytest.approx(mib, rel=1e-4)


@pytest.mark.parametrize("text", ["", "much", "8 elephants", "0", "-1GiB", "0GiB", 0])
def test_amounts_that_are_none(text):
    with pytest.raises(UsageError, match="memory limit must be"):
        parse_memory(text)
