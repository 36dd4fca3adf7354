"""Clusters that require a token of those who join them."""

import os
import subprocess
import sys

import pytest
from clusters import joined

pytestmark = pytest.mark.slow
TOKEN = "a" * 64
JOINS = """
import sys
import ray
from redline.runners.place import ray_driver

error = ray_driver._join(sys.argv[1])
print(error, *getattr(error, "__notes__", ()))
if ray.is_initialized():
    @ray.remote
    class Reader:
        def read(self, values):
            return len(ray.get(values[0]))

    reader = Reader.remote()
    # The worker fetches the value from this process.
    print(ray.get(reader.read.remote([ray.put(b"x" * 1_000_000)]), timeout=60))
"""


def join(address, home, **environment):
    """Joins a cluster in another process and returns its output."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment = {**plain, "HOME": str(home), **environment}
    joins = subprocess.run(
        [sys.executable, "-c", JOINS, address], env=environment, capture_output=True, text=True, timeout=200
    )
    assert joins.returncode == 0, joins.stderr
    return joins.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def guarded():
    with joined(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as (address, _):
        yield address


def test_a_token_joins_the_cluster_at_an_address(guarded, tmp_path):
    assert join(guarded, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) == ["None", "1000000"]


@pytest.mark.parametrize(
    "environment", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}], ids=["none", "another"]
)
def test_a_missing_token_and_another_one_are_errors_of_the_runner(guarded, tmp_path, environment):
    output = " ".join(join(guarded, tmp_path, **environment))
    assert output.startswith(f"joining the Ray cluster at '{guarded}' failed: ") and output.endswith(
        "needs RAY_AUTH_MODE=token."
    )
