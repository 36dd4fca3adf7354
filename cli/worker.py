"""`redline worker`: adds the devices of this host to the pool of a server."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from ..base.errors import UsageError
from .server_options import NO_TOKEN, with_server

FROM_STDIN = "-"


@click.command(
    epilog="""\b
Examples:
  redline worker --server https://redline.example.org
  redline worker --devices 4
  redline worker --runner ray --ray-address auto --devices 16
  sudo -E redline worker --code-user nobody
  srun redline worker                 in a Slurm allocation, on each of its hosts
""",
)
@with_server
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Number of devices.  [default: all]")
@click.option(
    "--runner", type=click.Choice(["local", "ray"]), default="local", show_default=True, help="Runner of the ranks."
)
@click.option("--ray-address", metavar="ADDRESS", help="A Ray cluster, for the runner ray.")
@click.option("--code-user", metavar="NAME", help="Unix user that runs code.  [default: the user who starts this]")
@click.option("--pinned", hidden=True, metavar="FILE", help="The only trusted certificate; its names are not checked.")
@click.option("--name", metavar="TEXT", help="Name of the worker.  [default: the host's name]")
def worker(
    server: str,
    token: str | None,
    trust: str | None,
    devices: int | None,
    name: str | None,
    code_user: str | None,
    pinned: str | None,
    **runner_options: Any,
) -> None:
    """Lease dry runs from a server and run them on this host's devices until the worker is ended.

    Dry runs that are still running then return to the queue. If the worker is killed, another one takes them over
    after some seconds. With `--code-user` workloads and commands from users run as that Unix user, who cannot read
    this process: start it as root then, and do not pass the token on the command line, which every user can see. A
    token `-` is read from standard input, and the worker ends when that closes.
    """
    from ..base.device import detect
    from ..runners.unix_user import unix_user
    from ..service.pool import ServerPool
    from ..service.worker import Worker

    watched = token == FROM_STDIN
    if watched:
        token = sys.stdin.readline().strip()
    if not token:
        raise UsageError(NO_TOKEN)
    user = None
    if code_user is not None:
        if not watched and click.get_current_context().get_parameter_source("token") is ParameterSource.COMMANDLINE:
            raise UsageError(
                "every user of this host can see a command line: with --code-user give the token by REDLINE_TOKEN, or as the "
                "first line of standard input, which stays open (--token -)"
            )
        user = unix_user(code_user)
    host = socket.gethostname()
    pool = ServerPool(server, token, trust, pinned=pinned)
    count = devices or detect().count
    leasing = Worker(pool, name=name or host, host=host, devices=count, code_user=user, **runner_options)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: leasing.stop())
    if watched:
        threading.Thread(target=_end_with_stdin, args=(leasing.stop,), daemon=True).start()
    else:
        click.echo(f"{host} joins {server} with {count} {detect().name}")
    leasing.run()


def _end_with_stdin(stop: Callable[[], None]) -> None:
    """Ends when the parent process has ended: it cannot receive results, and another worker will be started."""
    sys.stdin.read()
    if os.getpgrp() == os.getpid():  # started by a server, in a group of its own
        os.killpg(0, signal.SIGKILL)
    click.echo("standard input was closed, so this worker ends; keep it open, or use REDLINE_TOKEN", err=True)
    stop()
