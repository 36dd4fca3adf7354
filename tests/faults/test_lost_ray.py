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
from processes import left_of

pytestmark = pytest.mark.slow

SEARCH = """
import os, pathlib, sys, time
import redline as rl
from redline.runners import ray_runner

ray_runner.SILENCE_S = 8.0
space = rl.Space()
space.choice("x", [1, 2, 3])
out, seconds = sys.argv[1], float(sys.argv[2])

def fn(config):
    open(f"{out}-{config['x']}", "a").write(f"{os.getpid()}\\n")
    time.sleep(3 if len(list(pathlib.Path(out).parent.glob("run-*"))) == 1 else seconds)
    return float(config["x"])

try:
    result = rl.tune(fn, space, trials=3, sampler="grid", runner="ray", out=out)
    print([str(trial.measurement.status) for trial in result.all_trials])
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
    "the host agent is killed": ("redline.runners.agent", signal.SIGKILL),
}
OFTEN = ("the head is killed", "the worker of a host stands still")


@pytest.mark.parametrize(
    ("name", "number"),
    [pytest.param(*hit, id=what, marks=[pytest.mark.exhaustive] * (what not in OFTEN)) for what, hit in HITS.items()],
)
def test_a_search_survives_the_loss(search, tmp_path, name, number, request):
    process, family = search()
    hit = named(family, name)
    if name == "ray_driver" and "guard" not in request.node.name:
        hit = named([each for each in family if each.ppid() == hit.pid], name)
    hit.send_signal(number)
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert out.strip() == "['ok', 'ok', 'ok']" and not errors.strip()
    # Processes of a Ray whose head is gone end a minute later, if nobody is left to kill them.
    assert left_of(family, 120 if "guard" in request.node.name else 30) == []
    rows = list(csv.DictReader((tmp_path / "run" / "trials.csv").open()))
    assert [row["status"] for row in rows] == ["ok"] * 3


@pytest.mark.parametrize("killed", [("gcs_server", "raylet"), ("raylet",)], ids=["head and node", "the only node"])
def test_a_cluster_that_is_lost_for_good_ends_the_search_with_what_was_found(search, tmp_path, killed):
    script = """
    import sys, time
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    print(cluster.address, flush=True)
    sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    # Ray records the machine's cluster there, and a killed cluster cannot remove the record.
    place = tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    cluster = subprocess.Popen(command, text=True, env={**os.environ, "TMPDIR": place.name}, **pipes)
    try:
        process, family = search(RAY_ADDRESS=cluster.stdout.readline().strip(), seconds=60)
        nodes = psutil.Process(cluster.pid).children(recursive=True)
        for name in killed:
            named(nodes, name).kill()
        begin = time.monotonic()
        out, errors = process.communicate(timeout=250)
        # Ray may take half a minute until it gives up a host.
        assert time.monotonic() - begin < (60 if "gcs_server" in killed else 120)
    finally:
        cluster.kill()
        cluster.communicate()
        for each in nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        place.cleanup()
    assert out.startswith("RunnerError"), errors
    assert f"The trials so far are in '{tmp_path / 'run'}'" in out
    assert left_of(family) == []
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best["best"]["configuration"] in ({"x": 1}, {"x": 2}, {"x": 3})
