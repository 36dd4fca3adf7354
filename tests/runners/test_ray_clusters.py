"""Searches on clusters of several nodes: their devices are found and kept to, room is waited for, lost nodes are replaced."""

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import yaml
from clusters import ONE_CORE, described, gpus, joined

pytestmark = pytest.mark.slow
LOGIN = {"num_cpus": 0}
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"

SEARCH = """
import os, sys, time
import redline as rl

from redline.tuner.listener import SearchListener

class Listener(SearchListener):
    def on_wait(self, what):
        print("WAIT", what, flush=True)

    def on_message(self, message):
        print("NOTE", message, flush=True)

def search(fn, values=(1, 2), trials=2, **options):
    space = rl.Space()
    space.choice("x", list(values))
    begin = time.monotonic()
    try:
        result = rl.tune(fn, space, trials=trials, sampler="grid", runner="ray", listener=Listener(), **options)
    except rl.RedlineError as error:
        print("ERROR", type(error).__name__, error, flush=True)
        return
    print("EXCLUDED", time.monotonic() - begin - result.seconds, flush=True)
    for trial in result.all_trials:
        print("TRIAL", trial.config["x"], trial.measurement.status, trial.measurement.reason, flush=True)

def where(config):
    print("on", os.environ.get("NODE_NAME"), os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    return float(config["x"])
"""

HOLDER = """
import sys, time
import ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)

@ray.remote
class Holder:
    def hold(self):
        return ray.get_runtime_context().get_node_id()

resource, amount = sys.argv[2], float(sys.argv[3])
options = {"num_gpus": amount, "num_cpus": 0} if resource == "GPU" else {"num_cpus": amount}
holder = Holder.options(**options).remote()
print(ray.get(holder.hold.remote()), flush=True)
sys.stdin.read()
"""


def searching(code, address, **environment):
    """Starts a process that searches on a cluster."""
    script = SEARCH + textwrap.dedent(code)
    environment = {**os.environ, "RAY_ADDRESS": address, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], text=True, env=environment, **pipes)


def search(code, address, **environment):
    """Searches on a cluster, and returns what was printed."""
    process = searching(code, address, **environment)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return output


@contextlib.contextmanager
def held(address, resource, amount):
    """Uses devices of a cluster. Yields a function that gives them back."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, address, resource, str(amount)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline().strip()
        yield lambda: holder.communicate()
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory):
    """A host without GPUs, one with two H100 and one with an A100."""
    folder = tmp_path_factory.mktemp("nodes")
    h100 = gpus(2, "H100", **described(folder / "h100", H100, count=2))
    a100 = gpus(1, "A100", **described(folder / "a100", A100, memory_mib=40_960))
    h100["env_vars"]["NODE_NAME"], a100["env_vars"]["NODE_NAME"] = "node-h100", "node-a100"
    with joined([LOGIN, h100, a100]) as (address, _):
        yield address


@pytest.fixture(scope="module")
def one_core():
    """A host without devices, and one with a core."""
    with joined([LOGIN, ONE_CORE]) as (address, _):
        yield address


def devices_of(run):
    return yaml.safe_load((run / "run.yaml").read_text())["asked"]["devices"]


def test_a_host_without_gpus_plans_for_and_places_on_those_that_the_cluster_has_most_of(two_kinds, tmp_path):
    run = tmp_path / "run"
    output = search(f"search(where, out={str(run)!r})", two_kinds)
    assert [line.split()[:3] for line in output.splitlines() if line.startswith("TRIAL")] == [
        ["TRIAL", "1", "ok"],
        ["TRIAL", "2", "ok"],
    ]
    note = f"NOTE the cluster has 2 x {H100}, 1 x {A100}: trials use the {H100}; `device_kind` chooses others"
    assert note in output
    assert (devices_of(run)["type"], devices_of(run)["name"], devices_of(run)["memory_mib"]) == ("cuda", H100, 81_559)
    assert all("on node-h100" in (run / "logs" / f"{number}.log").read_text() for number in range(2))


def test_a_training_uses_the_devices_of_its_run_if_the_cluster_has_them(two_kinds):
    code = (
        "from redline.runners.place.ray_runner import kind_of_cluster\n"
        f"print([kind_of_cluster({two_kinds!r}, name).device.name for name in ({A100!r}, 'NVIDIA V100', None)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == str([A100, H100, H100]), done.stderr


def test_a_kind_that_is_named_is_kept_by_a_resume_and_has_fewer_devices(two_kinds, tmp_path):
    run = tmp_path / "run"
    output = search(f"search(where, out={str(run)!r}, trials=1, device_kind='a100')", two_kinds)
    output += search(f"search(where, out={str(run)!r}, trials=2, resume=True)", two_kinds)
    assert output.count("TRIAL 2 ok") == 1 and "ERROR" not in output, output
    assert devices_of(run)["name"] == A100
    assert all("on node-a100" in (run / "logs" / f"{number}.log").read_text() for number in range(2))
    output = search("search(where, device_kind='a100', devices=2)", two_kinds)
    assert "ERROR UsageError a trial needs 2 devices, the same number on each" in output
    assert "have 1 A100 GPUs" in output
    output = search("search(where, device_kind='v100')", two_kinds)
    assert f"ERROR UsageError `device_kind` must name one of 2 x {H100}, 1 x {A100}, but got 'v100'" in output


def test_a_second_search_waits_for_the_devices_of_the_first(one_core):
    first = searching("search(lambda config: time.sleep(20) or 1.0, trials=1)", one_core)
    while not _uses(one_core):
        assert first.poll() is None, first.communicate()
    second = search("search(where, time='60s', trials=1)", one_core)
    output, errors = first.communicate(timeout=120)
    assert "TRIAL 1 ok" in output, errors
    assert "WAIT waiting for 1 CPU: 0 of 1 are free" in second
    assert "TRIAL 1 ok" in second
    # The wait does not count as time of the search.
    excluded_s = float(second.partition("EXCLUDED ")[2].split()[0])
    assert excluded_s > 5


def _uses(address):
    """True once a search has placed its trials."""
    code = """
        import ray
        ray.init(address=sys.argv[1] if len(sys.argv) > 1 else os.environ["RAY_ADDRESS"], logging_level="ERROR")
        from ray.util.placement_group import placement_group_table
        print("USES", any(group["state"] == "CREATED" for group in placement_group_table().values()))
    """
    return "USES True" in search(code, address)


def command_line(address, *options, timeout=150):
    """Runs `redline tune` of a command on a cluster."""
    command = [sys.executable, "-m", "redline.cli", "tune", "--command", f"{sys.executable} -c print({{x}})"]
    command += [
        "--metric",
        r"(?P<score>\d+)",
        "--set",
        "x=1,2",
        "--runner",
        "ray",
        "--ray-address",
        address,
        "--trials",
        "1",
    ]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=timeout)


def test_no_room_too_few_devices_and_a_broken_cluster_are_three_different_ends(one_core, tmp_path):
    with held(one_core, "CPU", 1):
        taken = command_line(one_core, "--time", "6s", "--out", str(tmp_path / "taken"))
    assert taken.returncode == 4, taken.stdout + taken.stderr
    assert "no room on the Ray cluster within 6 s: waiting for 1 CPU: 0 of 1 are free" in taken.stderr
    few = command_line(one_core, "--concurrency", "2", "--out", str(tmp_path / "few"))
    assert few.returncode == 2 and "2 trials at once need 2 CPUs, but the Ray cluster has 1" in few.stderr
    broken = command_line("127.0.0.1:1", "--out", str(tmp_path / "broken"))
    assert broken.returncode == 1 and "joining the Ray cluster at '127.0.0.1:1' failed" in broken.stderr
    assert "`--runner local` works without Ray" in broken.stderr


def test_an_address_of_ray_client_is_refused_with_the_address_to_give():
    output = search("search(where)", "ray://127.0.0.1:10001")
    assert "ERROR UsageError ray://127.0.0.1:10001 is an address of Ray Client" in output
    assert "ray start --address=HOST:6379" in output


def test_a_lost_node_is_waited_for_while_others_use_the_rest(tmp_path):
    code = """
        def fn(config):
            time.sleep(5)
            return float(config["x"])
        search(fn, values=(1, 2, 3), trials=3)
    """
    with joined([LOGIN, ONE_CORE, ONE_CORE]) as (address, nodes):
        with held(address, "CPU", 1) as give_back:
            process = searching(code, address)
            lines = iter(process.stdout.readline, "")
            read = []
            reader = threading.Thread(target=lambda: read.extend(lines), daemon=True)
            end = time.monotonic() + 100
            while not (hosts := [process for process in _family(nodes) if "ray::RayHost" in process.name()]):
                assert time.monotonic() < end, process.communicate()
                time.sleep(0.1)
            hosts[0].parent().kill()
            reader.start()
            while not any("WAIT waiting for 1 CPU: 0 of 1 are free" in line for line in read):
                assert time.monotonic() < end + 60 and process.poll() is None, read
                time.sleep(0.1)
            give_back()
        reader.join(timeout=200)
        assert process.wait(timeout=60) == 0, process.stderr.read()
    assert sum(line.startswith("TRIAL") and " ok " in line for line in read) == 3, read
    process.stdout.close()
    process.stderr.close()


def _family(nodes):
    """Returns the processes that the nodes of a cluster have started."""
    family = []
    for node in nodes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += node.children(recursive=True)
    return family
