"""A host of a trial ends with the process that placed it."""

import os
import signal
import subprocess
import sys

import psutil

INNER = """
import os
from redline.runners.place.ray_host import _end_with_parent
raylet = os.getppid()
print(os.getpid(), flush=True)
_end_with_parent(raylet)
"""
OUTER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {INNER!r}])
"""


def test_a_host_ends_with_the_raylet_that_started_it():
    raylet = subprocess.Popen([sys.executable, "-c", OUTER], stdout=subprocess.PIPE, text=True)
    host = psutil.Process(int(raylet.stdout.readline()))
    try:
        assert host.is_running() and raylet.poll() is None
        os.kill(raylet.pid, signal.SIGKILL)
        raylet.wait()
        _, alive = psutil.wait_procs([host], timeout=60)
        assert not alive or host.status() == psutil.STATUS_ZOMBIE
    finally:
        if host.is_running():
            host.kill()
        raylet.stdout.close()
