"""`redline worker`: join this host's devices to a server's pool."""

import os
import signal
import socket
import sys
import threading
from typing import Any

import click
from click.core import ParameterSource

from ..base.errors import UsageError
from .server_options import NO_TOKEN, reached

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
    short_help="Join this host's devices to a server's pool.",
)
@reached
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="How many devices.  [default: all present]")
@click.option(
    "--runner", type=click.Choice(["local", "ray"]), default="local", show_default=True, help="Who places their ranks."
)
@click.option("--ray-address", metavar="ADDRESS", help="A Ray cluster, for the runner ray.")
@click.option("--code-user", metavar="NAME", help="Unix user as whom code runs.  [default: who starts this]")
@click.option("--pinned", hidden=True, metavar="FILE", help="The one certificate to trust, whatever names it has.")
@click.option("--name", metavar="TEXT", help="What it calls itself.  [default: the host's name]")
def worker(
    server: str,
    token: str | None,
    trust: str | None,
    devices: int | None,
    name: str | None,
    code_user: str | None,
    pinned: str | None,
    **given: Any,
) -> None:
    """Lease dry runs from a server and run them on this host's devices, until it is ended.

    What runs then goes back to the queue. If it is killed, its dry runs are taken up by another worker some seconds later.
    With `--code-user` workloads and commands that are somebody's code run as that user, who can read nothing of this process:
    start it as root then, and the token must not stand on the command line, which every user can see.
    A token that is `-` is read from standard input, and the worker ends when that closes.
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
                "a command line is seen by every user of this host: with --code-user give the token by REDLINE_TOKEN, or as the "
                "first line of standard input (--token -)"
            )
        user = unix_user(code_user)
    host = socket.gethostname()
    pool = ServerPool(server, token, trust, pinned=pinned)
    count = devices or detect().count
    made = Worker(pool, name=name or host, host=host, devices=count, code_user=user, **given)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: made.stop())
    if watched:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    else:
        click.echo(f"{host} joins {server} with {count} {detect().name}")
    made.run()


def _end_with_stdin() -> None:
    """Ends at once when whoever started this is gone: it cannot be told anything, and another will be started."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)
