"""The host agent: a fork server that has imported torch and transformers but never touched a device.

Run as `python -m redline.runners.agent FD FOLDER` (see `HelperProcess`). Over the connection it receives its set-up
and reports when it is ready; standard output goes to its log, since imported modules may print. It listens on a Unix
socket in the folder and forks a process for every client, which supervises a job or runs a task. It ends, with
everything it started, when the connection closes, that is, when its parent process ends for any reason. Until then it
accepts further modules to import.
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

from ..base.errors import RunnerError
from ..base.scratch import remove
from .job import AgentTask, Job
from .process import adopt_orphans, die_with_parent, kill_descendants, reap

SOCKET = "socket"
"""Name of its socket in its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSetup:
    """The initial settings of a host agent."""

    sys_path: tuple[str, ...] = ()
    """Import path of the parent process."""
    imports: tuple[str, ...] = ("torch", "transformers")
    """Modules that every rank needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoreImports:
    """A request to import further modules. The agent answers as it did when it became ready."""

    imports: tuple[str, ...]
    """Further modules that every rank needs."""


def main() -> None:
    """Serves until the parent process closes the connection."""
    parent, folder = Connection(int(sys.argv[1])), sys.argv[2]
    os.set_inheritable(parent.fileno(), False)
    setup: AgentSetup = parent.recv()
    sys.path[:] = list(dict.fromkeys([*setup.sys_path, *sys.path]))
    adopt_orphans()
    # torch.cuda.is_available() through NVML, so that no import initialises CUDA in the agent.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with _reporting(parent):
        _import(setup.imports)
        listener = Listener(os.path.join(folder, SOCKET), "AF_UNIX", backlog=128)
    parent.send({"ready": os.getpid()})
    try:
        _serve(listener, parent)
    finally:
        kill_descendants()
    remove(Path(folder))


@contextmanager
def _reporting(parent: Connection) -> Iterator[None]:
    """Reports any exception to the parent and ends the agent."""
    try:
        yield
    except Exception as error:
        parent.send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        sys.exit(1)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)
        if cuda_is_initialised():
            raise RunnerError(
                f"importing {name} initialises CUDA, so that no process forked from the host agent can use it. Move the code "
                "that needs the device (a tensor on 'cuda', torch.cuda.get_device_name, ...) from the module into a function"
            )
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


def _serve(listener: Listener, parent: Connection) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(_socket_of(listener), selectors.EVENT_READ, "client")
        selector.register(parent, selectors.EVENT_READ, "parent")
        while True:
            for key, _ in selector.select():
                if key.data == "parent":
                    try:
                        more: MoreImports = parent.recv()
                    except (EOFError, OSError):  # the parent closed the connection
                        return
                    with _reporting(parent):
                        _import(more.imports)
                    parent.send({"ready": os.getpid()})
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


def _fork(client: Connection, listener: Listener, parent: Connection) -> tuple[int, int]:
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid, os.pidfd_open(pid)
    code = 1
    try:
        die_with_parent(me)
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _socket_of(listener).close()
        parent.close()
        _serve_client(client, os.path.dirname(listener.address))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
    return 0, 0


def _serve_client(client: Connection, folder: str) -> None:
    try:
        request: Job | AgentTask = client.recv()
    except EOFError:
        return
    if isinstance(request, AgentTask):
        request.run(client)
        return
    from .supervisor import Supervisor

    outcome = Supervisor(request, client, folder).run()
    if outcome is not None:
        try:
            client.send(outcome)
        except BrokenPipeError:  # the client closed the connection meanwhile
            return


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.agent import main as serve

    serve()
