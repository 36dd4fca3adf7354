"""Processes of Ray are killed or stopped during a search.

Trials continue if Ray can be restarted; otherwise the search ends with its results so far. Nothing hangs, and nothing
is left.
"""

import contextlib
import csv
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import psutil
import pytest
import yaml
from clusters import ONE_CORE, joined
from processes import left_of

pytestmark = pytest.mark.slow

SEARCH = """
import os, pathlib, sys, time
import redline as rl
from redline.runners.place import ray_runner

ray_runner.SILENCE_S = float(os.environ.get("SILENCE_S", 8.0))
again = ray_runner.RayRunner._driver_again
restarts = []
ray_runner.RayRunner._driver_again = lambda runner: restarts.append(1) or again(runner)
space = rl.Space()
space.choice("x", [1, 2, 3])
out, seconds = sys.argv[1], float(sys.argv[2])

def fn(config):
    open(f"{out}-{config['x']}", "a").write(f"{os.getpid()}\\n")
    time.sleep(3 if len(list(pathlib.Path(out).parent.glob("run-*"))) == 1 else seconds)
    return float(config["x"])

try:
    result = rl.tune(fn, space, trials=3, sampler="grid", runner="ray", out=out, concurrency=int(os.environ.get("AT_ONCE", 1)))
    print([str(trial.measurement.status) for trial in result.all_trials], len(restarts), "restarts")
except rl.RunnerError as error:
    print("RunnerError", error)
"""


@pytest.fixture
def search(tmp_path):
    """Starts a search of three trials on Ray and returns its processes once the second trial is running."""
    made = []
    temporary = tempfile.TemporaryDirectory(prefix="rl")  # a short name, as Ray creates sockets in it

    def start(seconds=3, **environment):
        command = [sys.executable, "-c", textwrap.dedent(SEARCH), str(tmp_path / "run"), str(seconds)]
        made.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": temporary.name, **environment},
            )
        )
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("run-*"))) < 2:
            assert time.monotonic() < end and made[0].poll() is None, made[0].communicate()
            time.sleep(0.05)
        return made[0], psutil.Process(made[0].pid).children(recursive=True)

    yield start
    for each in made:
        each.kill()
        each.communicate()
    left = [each for each in os.listdir(temporary.name) if each.startswith("redline-")]
    temporary.cleanup()
    assert left == []


def named(family, name):
    for each in family:
        with contextlib.suppress(psutil.Error):  # some have ended
            if name in " ".join([each.name(), *each.cmdline()]):
                return each
    raise AssertionError(f"no {name} among {family}")


HITS = {
    "the head is killed": ("gcs_server", signal.SIGKILL),
    "the head stands still": ("gcs_server", signal.SIGSTOP),
    "the node is killed": ("raylet", signal.SIGKILL),
    "the worker of a host is killed": ("ray::RayHost", signal.SIGKILL),
    "the worker of a host stands still": ("ray::RayHost", signal.SIGSTOP),
    "the process that speaks to Ray is killed": ("ray_driver", signal.SIGKILL),
    "the process that speaks to Ray stands still": ("ray_driver", signal.SIGSTOP),
    "its guard is killed": ("ray_driver", signal.SIGKILL),
    "the host agent is killed": ("redline.runners.host.agent", signal.SIGKILL),
}
ONLY_A_HOST = ("the worker of a host is killed", "the worker of a host stands still", "the host agent is killed")
"""Ray and its other hosts go on after these."""
OFTEN = ("the head is killed", "the worker of a host stands still")


@pytest.mark.parametrize(
    ("name", "number"),
    [pytest.param(*hit, id=what, marks=[pytest.mark.exhaustive] * (what not in OFTEN)) for what, hit in HITS.items()],
)
def test_a_search_survives_the_loss(search, tmp_path, name, number, request):
    host_alone = request.node.callspec.id in ONLY_A_HOST
    process, family = search(**({"SILENCE_S": "60"} if host_alone else {}))
    hit = named(family, name)
    if name == "ray_driver" and "guard" not in request.node.name:
        hit = named([each for each in family if each.ppid() == hit.pid], name)
    hit.send_signal(number)
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert out.startswith("['ok', 'ok', 'ok']") and not errors.strip()
    assert not host_alone or "] 0 restarts" in out, out
    # Processes of a Ray whose head is gone end a minute later, if nobody is left to kill them.
    assert left_of(family, 120 if "guard" in request.node.name else 30) == []
    rows = list(csv.DictReader((tmp_path / "run" / "trials.csv").open()))
    assert [row["status"] for row in rows] == ["ok"] * 3


FILLS = """
import sys, time
import redline as rl
space = rl.Space()
space.choice("gib", [0, 5, 1])

def fn(config):
    held = b"x" * (config["gib"] << 30)
    time.sleep(3)
    return 1.0 + config["gib"]

result = rl.tune(fn, space, trials=3, sampler="grid", runner="ray", out=sys.argv[1])
for trial in result.all_trials:
    print(trial.config["gib"], trial.measurement.status, trial.measurement.reason)
"""


def test_a_candidate_that_the_memory_monitor_of_a_cluster_kills_is_oom(tmp_path):
    memory = psutil.virtual_memory()
    most = (memory.total - memory.available + (3 << 30)) / memory.total
    limits = {"RAY_memory_monitor_refresh_ms": "100", "RAY_memory_usage_threshold": f"{most:.3f}"}
    with joined(**limits) as (address, _):
        command = [sys.executable, "-c", FILLS, str(tmp_path / "run")]
        environment = {**os.environ, "RAY_ADDRESS": address}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = sorted(done.stdout.splitlines())
    assert [line.split()[:2] for line in found] == [["0", "ok"], ["1", "ok"], ["5", "oom"]]
    assert "Ray killed it on a host that is short of memory" in found[2]


@pytest.mark.exhaustive
def test_a_node_that_stays_away_leaves_the_trials_of_the_others(search):
    with joined([ONE_CORE, ONE_CORE]) as (address, nodes):
        process, _ = search(RAY_ADDRESS=address, AT_ONCE="2", SILENCE_S="60", seconds=50)
        named(list(reversed(nodes)), "raylet").kill()
        out, errors = process.communicate(timeout=280)
    assert out.strip() == "['ok', 'ok', 'ok'] 0 restarts", errors


@pytest.mark.parametrize("killed", [("gcs_server", "raylet"), ("raylet",)], ids=["head and node", "the only node"])
def test_a_cluster_that_is_lost_for_good_ends_the_search_with_what_was_found(search, tmp_path, killed):
    with joined() as (address, nodes):
        process, family = search(RAY_ADDRESS=address, seconds=60)
        for name in killed:
            named(nodes, name).kill()
        begin = time.monotonic()
        out, errors = process.communicate(timeout=250)
        # Ray may take half a minute until it gives up a host.
        assert time.monotonic() - begin < (60 if "gcs_server" in killed else 120)
    assert out.startswith("RunnerError"), errors
    assert f"The trials so far are in '{tmp_path / 'run'}'" in out
    assert left_of(family) == []
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["best"]["configuration"] in ({"x": 1}, {"x": 2}, {"x": 3})
