"""The host agent: a fork server that has imported torch and transformers but never touched a device.

Run as `python -m redline.runners.host.agent FD FOLDER` (see `HelperProcess`). Its parent calls it to import modules;
standard output goes to its log, since these may print. It listens on a Unix socket in the folder and forks a process
for every client, which replies to one call: to run a job or a task. It ends, with everything it started, when the
connection closes, that is, when its parent process ends for any reason.
"""

import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from ...base.gpus import gpus_described
from ...base.scratch import remove
from .process import adopt_orphans, die_with_parent, kill_descendants, reap
from .protocol import Channel, Received, receive_call

LONGEST_ADDRESS = 107
"""Longest path of a Unix socket, bytes (`man 7 unix`)."""
SOCKET = "socket"
"""Name of its socket in its folder."""
START, IMPORT = "start", "import"
"""Calls of its parent: the first one, with an `AgentSetup`, and those with further modules to import."""
RUN_JOB = "job"
"""Call of a client, with a `Job`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSetup:
    """The initial settings of a host agent."""

    sys_path: tuple[str, ...] = ()
    """Import path of the parent process."""
    imports: tuple[str, ...] = ("torch", "transformers")
    """Modules that every rank needs."""


def main() -> None:
    """Serves until the parent process closes the connection."""
    parent, folder = Channel(Connection(int(sys.argv[1]))), sys.argv[2]
    os.set_inheritable(parent.fileno(), False)
    start = receive_call(parent)
    setup: AgentSetup
    (setup,) = start.arguments
    sys.path[:] = list(dict.fromkeys([*setup.sys_path, *sys.path]))
    adopt_orphans()
    # torch.cuda.is_available() through NVML, so that no import initialises CUDA in the agent.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with _reporting(start):
        _import(start, setup.imports)
        address = os.path.join(folder, SOCKET)
        if len(os.fsencode(address)) > LONGEST_ADDRESS:
            raise OSError(f"the path of its socket is too long, {address}: set TMPDIR to a folder with a shorter path")
        listener = Listener(address, "AF_UNIX", backlog=128)
    start.done()
    try:
        _serve(listener, parent)
    finally:
        kill_descendants()
    remove(Path(folder))


@contextmanager
def _reporting(call: Received) -> Iterator[None]:
    """Replies with any exception and ends the agent."""
    try:
        yield
    except Exception as error:
        call.fail(error)
        sys.exit(1)


def _import(call: Received, names: tuple[str, ...]) -> None:
    """Imports modules. One that initialises CUDA ends the agent, since no process forked from it could use a GPU; the reply
    then is its name."""
    with gpus_described():
        for name in names:
            importlib.import_module(name)
            if cuda_is_initialised():
                call.done(name)
                sys.exit(0)
    sys.stdout.flush()  # otherwise every fork would write the buffered output of the imports again
    gc.collect()
    gc.freeze()  # excludes imported objects from collection, so that their pages stay shared


def cuda_is_initialised() -> bool:
    """True if this process has initialised CUDA, through any library. The check itself does not initialise it.

    Source: `cuCtxGetCurrent` of the CUDA driver API, which returns CUDA_ERROR_NOT_INITIALIZED before `cuInit`.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # the driver is not loaded
        return False
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 0


def _serve(listener: Listener, parent: Channel) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(_socket_of(listener), selectors.EVENT_READ, "client")
        selector.register(parent, selectors.EVENT_READ, "parent")
        while True:
            for key, _ in selector.select():
                if key.data == "parent":
                    try:
                        call = receive_call(parent)
                    except EOFError:
                        return
                    with _reporting(call):
                        _import(call, *call.arguments)
                    call.done()
                    continue
                if key.data == "client":
                    with listener.accept() as client:
                        pid, pidfd = _fork(client, listener, parent)
                    selector.register(pidfd, selectors.EVENT_READ, pid)
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    reap()


def _socket_of(listener: Listener) -> socket.socket:
    """Returns the socket of a listener, which has no fileno() of its own."""
    return listener._listener._socket  # type: ignore[attr-defined]  # not public


def _fork(client: Connection, listener: Listener, parent: Channel) -> tuple[int, int]:
    agent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid, os.pidfd_open(pid)
    code = 1
    try:
        die_with_parent(agent_pid)
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _socket_of(listener).close()
        parent.close()
        _serve_client(Channel(client), os.path.dirname(listener.address))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
    return 0, 0


def _serve_client(client: Channel, folder: str) -> None:
    try:
        call = receive_call(client)
    except EOFError:
        return
    from .supervisor import Supervisor

    (job,) = call.arguments
    outcome = Supervisor(job, call, folder).run()
    if outcome is not None:
        call.done(outcome)


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.host.agent import main as serve

    serve()
