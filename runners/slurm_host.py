"""A host of a trial inside a Slurm allocation: a task of `srun` with a host agent, which hangs on a connection.

Run as `python -m redline.runners.slurm_host PORT` by `srun`, once on each node. It connects to whoever started `srun`
there, by the address that Slurm tells it and the key in its environment, says which node it is, and does what it is asked until
the connection closes.
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
"""The variable with the key of the connection, hexadecimal."""


class SlurmHost(Host):
    """On a node of an allocation.

    Args:
        imports: of its agent.
        address: of this node, as the one that asks sees it.
    """

    def __init__(self, imports: tuple[str, ...], address: str) -> None:
        super().__init__(imports)
        self._address = address

    def address(self) -> str:
        return self._address

    def run(self, job: Job, key: str, send_log: bool) -> tuple[Outcome, bytes]:
        if job.device_ids:  # places among those that Slurm has given
            given = visible_gpus(max(map(int, job.device_ids)) + 1)
            if len(given) <= max(map(int, job.device_ids)):
                raise RunnerError(
                    f"Slurm gave {socket.gethostname()} {len(given)} GPUs, fewer than where redline was started; ask for as many "
                    "on each node, such as by --gpus-per-node"
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

    def answer(number: int, what: str, arguments: tuple[object, ...]) -> None:
        value, raised = None, None
        try:
            value = getattr(host, what)(*arguments)
        except RedlineError as error:
            raised = error
        except Exception as error:  # a fault of this program, to be seen where it is asked
            raised = RunnerError(f"{type(error).__name__}: {error}")
        with lock:
            try:
                connection.send((number, value, raised))
            except OSError:  # nobody listens any more, which `recv` finds
                return
            except Exception as error:  # what cannot be sent
                connection.send((number, None, RunnerError(f"{type(error).__name__}: {error}")))

    while True:
        try:
            asked = connection.recv()
        except (EOFError, OSError):
            return
        threading.Thread(target=answer, args=asked, daemon=True).start()


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.slurm_host import main as serve

    serve()
