"""Ray clusters on this machine."""

import contextlib
import os
import subprocess
import sys
import tempfile

import psutil

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for _ in range(1, int(sys.argv[1])):
    cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def joined(nodes=1, **environment):
    """Starts a cluster of nodes with one core each. Yields its address and processes."""
    # Ray records the machine's cluster there, and a killed cluster cannot remove the record.
    place = tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "TMPDIR": place.name, **environment}
    cluster = subprocess.Popen([sys.executable, "-c", CLUSTER, str(nodes)], text=True, env=environment, **pipes)
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
