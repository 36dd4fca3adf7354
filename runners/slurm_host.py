"""A host of a trial in a Slurm allocation: a task of `srun` with a host agent, controlled over a connection.

Run as `python -m redline.runners.slurm_host PORT` by `srun`, once on each node. It connects to the process that
started `srun`, at the address set by Slurm and with the key in its environment, and replies to that process's calls
until the connection closes.
"""

import os
import socket
import sys
from dataclasses import replace
from multiprocessing.connection import Client

from ..base.device import visible_gpus
from ..base.errors import RunnerError
from .job import Job, Outcome
from .process import adopt_orphans, kill_descendants
from .protocol import Channel, receive_call, serve
from .worker_group import Host

KEY = "REDLINE_SLURM_KEY"
"""Environment variable with the key of the connection, hexadecimal."""
START = "start"
"""The first call, with the import path and the imports of the agent. The reply is the number and name of the node."""


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
        with socket.socket(fileno=os.dup(connection.fileno())) as own_socket:
            address = own_socket.getsockname()[0]
        channel = Channel(connection)
        start = receive_call(channel)
        sys_path, imports = start.arguments
        start.done((int(os.environ["SLURM_NODEID"]), os.environ.get("SLURMD_NODENAME", address)))
        sys.path[:] = list(dict.fromkeys([*sys_path, *sys.path]))
        host = SlurmHost(imports, address)
        try:
            serve(channel, lambda call: getattr(host, call.method)(*call.arguments))
        finally:
            host.close()
            kill_descendants()


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners import slurm_host

    slurm_host.main()
