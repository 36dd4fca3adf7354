"""Ray clusters on this machine."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

import psutil

CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
head, *others = json.loads(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
for node in others:
    cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
"""
DESCRIBED = """
from redline.base import device

gpus = device.Device(type="cuda", name={name!r}, count={count}, memory_mib={memory_mib}, capability=(9, 0))
device._cuda = lambda: gpus
"""
ONE_CORE = {"num_cpus": 1}


def gpus(count, kind, **options):
    """Returns a node whose Ray counts GPUs of a kind, which it has as far as `detect` knows (see `described`)."""
    return {"num_cpus": count, "num_gpus": count, "resources": {f"accelerator_type:{kind}": 1}, **options}


def described(folder, name, *, count=1, memory_mib=81_559):
    """Returns options of a node on which `redline.base.device.detect` finds GPUs of this name."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DESCRIBED.format(name=name, count=count, memory_mib=memory_mib))
    return {"env_vars": {"PYTHONPATH": str(folder)}}


@contextlib.contextmanager
def joined(nodes=(ONE_CORE,), **environment):
    """Starts a cluster of these nodes, the first of them its head. Yields its address and processes."""
    # Ray records the machine's cluster there, and a killed cluster cannot remove the record.
    place = tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "TMPDIR": place.name, **environment}
    cluster = subprocess.Popen([sys.executable, "-c", CLUSTER, json.dumps(nodes)], text=True, env=environment, **pipes)
    family = []
    try:
        address = cluster.stdout.readline().strip()
        family = psutil.Process(cluster.pid).children(recursive=True)
        yield address, family
    finally:
        cluster.kill()
        cluster.communicate()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        place.cleanup()
