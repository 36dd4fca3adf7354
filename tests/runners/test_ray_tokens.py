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

print(ray_driver._join(sys.argv[1]))
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


def write_token(home, token):
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(token)
    return home


@pytest.fixture(scope="module")
def guarded():
    with joined(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as (address, _):
        yield address


def test_a_token_in_the_default_file_joins_the_cluster_at_an_address(guarded, tmp_path):
    assert join(guarded, write_token(tmp_path, TOKEN)) == ["None", "1000000"]


def test_a_token_in_the_environment_or_in_a_file_that_it_names_joins_too(guarded, tmp_path):
    (tmp_path / "mine").write_text(TOKEN)
    assert join(guarded, tmp_path, RAY_AUTH_TOKEN=TOKEN) == ["None", "1000000"]
    assert join(guarded, tmp_path, RAY_AUTH_TOKEN_PATH=str(tmp_path / "mine")) == ["None", "1000000"]


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "token"}], ids=["unset", "token"])
def test_a_missing_token_is_named_with_the_places_where_it_is_looked_for(guarded, tmp_path, mode):
    (line,) = join(guarded, tmp_path, **mode)
    assert line.startswith(f"the Ray cluster at '{guarded}' requires a token, and none was found in")
    assert all(place in line for place in ("RAY_AUTH_TOKEN,", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))


def test_another_token_and_disabled_tokens_are_named(guarded, tmp_path):
    (line,) = join(guarded, tmp_path, RAY_AUTH_TOKEN="b" * 64)
    assert line.startswith(f"the Ray cluster at '{guarded}' requires another token than that of")
    (line,) = join(guarded, tmp_path, RAY_AUTH_MODE="disabled")
    assert line == f"the Ray cluster at '{guarded}' requires a token, but RAY_AUTH_MODE=disabled disables them"


def test_a_token_of_this_host_does_not_disturb_a_cluster_without_tokens(tmp_path):
    with joined(RAY_AUTH_MODE="disabled") as (address, _):
        assert join(address, write_token(tmp_path, TOKEN)) == ["None", "1000000"]
