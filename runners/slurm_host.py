"""A host of a trial in a Slurm allocation: a task of `srun` with a host agent, controlled over a connection.

Run as `python -m redline.runners.slurm_host PORT` by `srun`, once on each node. It connects to the process that
started `srun`, at the address set by Slurm and with the key in its environment, sends the number of its node, and
serves requests until the connection closes.
"""

import os
import socket
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Client, Connection

from ..base.device import visible_gpus
from ..base.errors import RedlineError, RunnerError
from .job import Job, Outcome
from .process import adopt_orphans, kill_descendants
from .worker_group import Host

KEY = "REDLINE_SLURM_KEY"
"""Environment variable with the key of the connection, hexadecimal."""


class SlurmHost(Host):
    """A host on a node of an allocation.

    Args:
        imports: of its agent.
        address: of this node, as seen by the requesting process.
    """

    def __init__(self, imports: tuple[str, ...], address: str) -> None:
        super().__init__(imports)
        self._address = address

    def address(self) -> str:
        return self._address

    def run(self, job: Job, key: str, send_log: bool) -> tuple[Outcome, bytes]:
        if job.device_ids:  # indices among the GPUs that Slurm allocated
            given = visible_gpus(max(map(int, job.device_ids)) + 1)
            if len(given) <= max(map(int, job.device_ids)):
                raise RunnerError(
                    f"Slurm allocated {len(given)} GPUs on {socket.gethostname()}, fewer than where redline was started; "
                    "request the same number on each node, for example with --gpus-per-node"
                )
            job = replace(job, device_ids=tuple(given[int(each)] for each in job.device_ids))
        return super().run(job, key, send_log)


def main() -> None:
    """Serves one connection until it closes."""
    adopt_orphans()
    key = bytes.fromhex(os.environ.pop(KEY))
    with Client((os.environ["SLURM_LAUNCH_NODE_IPADDR"], int(sys.argv[1])), authkey=key) as connection:
        with socket.socket(fileno=os.dup(connection.fileno())) as mine:
            address = mine.getsockname()[0]
        connection.send((int(os.environ["SLURM_NODEID"]), os.environ.get("SLURMD_NODENAME", address)))
        sys_path, imports = connection.recv()
        sys.path[:] = list(dict.fromkeys([*sys_path, *sys.path]))
        host = SlurmHost(imports, address)
        try:
            _serve(connection, host)
        finally:
            host.close()
            kill_descendants()


def _serve(connection: Connection, host: SlurmHost) -> None:
    lock = threading.Lock()

    def answer(number: int, method: str, arguments: tuple[object, ...]) -> None:
        value, raised = None, None
        try:
            value = getattr(host, method)(*arguments)
        except RedlineError as error:
            raised = error
        except Exception as error:  # a bug, reported to the process that sent the request
            raised = RunnerError(f"{type(error).__name__}: {error}")
        with lock:
            try:
                connection.send((number, value, raised))
            except OSError:  # the connection is closed, which `recv` detects
                return
            except Exception as error:  # the value cannot be pickled
                connection.send((number, None, RunnerError(f"{type(error).__name__}: {error}")))

    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        threading.Thread(target=answer, args=request, daemon=True).start()


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.slurm_host import main as serve

    serve()
