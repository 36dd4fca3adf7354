"""Reading a share takes the memory of the share, and writing takes that of a shard, measured in a separate process."""

import json
import subprocess
import sys

import pytest
from house import ROOT

pytestmark = pytest.mark.slow

SLACK_MIB = 48
"""The largest matrix (32 MiB), which is mapped as a whole while a half of it is read, and half of that for allocators and the
file system's buffers."""


@pytest.fixture(scope="module")
def measured():
    """Returns the results of bench/weights.py for a model of 320 MiB in shards of 64 MiB, by kind."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "weights.py"), "--layers", "4", "--hidden", "1024", "--shard-mib", "64", "--json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["what"]: each for each in json.loads(done.stdout)}


@pytest.mark.parametrize("what", ["half of each matrix by rows", "half of each matrix by columns", "one layer"])
def test_reading_a_share_takes_its_memory_and_not_the_whole_s(measured, what):
    row = measured[what]
    assert row["share_mib"] < row["whole_mib"] * 0.6
    assert row["peak_mib"] < row["share_mib"] + SLACK_MIB


def test_writing_takes_the_memory_of_a_shard(measured):
    row = measured["written as shards"]
    assert row["whole_mib"] == pytest.approx(320, abs=1)
    assert row["peak_mib"] < 2 * 64 + SLACK_MIB
