"""The host agent: a fork server that has imported torch and transformers but never touched a device.

Run as `python -m redline.runners.agent FD FOLDER` (see `HelperProcess`). By the connection it gets its set-up and
says when it is ready; standard output is for whatever the modules that it imports print there, and goes to its
log. It listens on a Unix socket in the folder and forks a process for every client, which supervises its job or does
its task. It ends, with everything it started, when the connection closes: when the process that started it ends,
however that happens. Until then it can be told of more to import.
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
"""Where in its folder it listens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSetup:
    """What a host agent is started with."""

    sys_path: tuple[str, ...] = ()
    """The import path of the process that started it."""
    imports: tuple[str, ...] = ("torch", "transformers")
    """Modules that every rank will need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoreImports:
    """What a host agent is told later on; it answers as it did when it was ready."""

    imports: tuple[str, ...]
    """Further modules that every rank will need."""


def main() -> None:
    """Serves until whoever started it hangs up."""
    starter, folder = Connection(int(sys.argv[1])), sys.argv[2]
    os.set_inheritable(starter.fileno(), False)
    setup: AgentSetup = starter.recv()
    sys.path[:] = list(dict.fromkeys([*setup.sys_path, *sys.path]))
    adopt_orphans()
    # torch.cuda.is_available() through NVML, so that no import initialises CUDA in the agent.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with _telling(starter):
        _import(setup.imports)
        listener = Listener(os.path.join(folder, SOCKET), "AF_UNIX", backlog=128)
    starter.send({"ready": os.getpid()})
    try:
        _serve(listener, starter)
    finally:
        kill_descendants()
    remove(Path(folder))


@contextmanager
def _telling(starter: Connection) -> Iterator[None]:
    """Tells the starter of what fails, whatever it is, and ends the agent then."""
    try:
        yield
    except Exception as error:
        starter.send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        sys.exit(1)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)
        if cuda_is_initialised():
            raise RunnerError(
                f"importing {name} initialises CUDA, which no process forked from the host agent could use then. Move what needs "
                "the device (a tensor on 'cuda', torch.cuda.get_device_name, ...) from the module into a function"
            )
    sys.stdout.flush()  # or every supervisor would write again what the imports printed
    gc.collect()
    gc.freeze()  # what is imported is never collected, so its pages stay shared


def cuda_is_initialised() -> bool:
    """Whether this process has initialised CUDA, by whatever library; asking does not.

    Source: `cuCtxGetCurrent` of the CUDA driver API, which returns CUDA_ERROR_NOT_INITIALIZED before `cuInit`.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nothing has loaded it
        return False
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 0


def _serve(listener: Listener, starter: Connection) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(_socket_of(listener), selectors.EVENT_READ, "client")
        selector.register(starter, selectors.EVENT_READ, "starter")
        while True:
            for key, _ in selector.select():
                if key.data == "starter":
                    try:
                        more: MoreImports = starter.recv()
                    except (EOFError, OSError):  # it hung up
                        return
                    with _telling(starter):
                        _import(more.imports)
                    starter.send({"ready": os.getpid()})
                    continue
                if key.data == "client":
                    with listener.accept() as client:
                        pid, pidfd = _fork(client, listener, starter)
                    selector.register(pidfd, selectors.EVENT_READ, pid)
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    reap()


def _socket_of(listener: Listener) -> socket.socket:
    """What a listener listens on; it offers no fileno() itself."""
    return listener._listener._socket  # type: ignore[attr-defined]  # not public


def _fork(client: Connection, listener: Listener, starter: Connection) -> tuple[int, int]:
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
        starter.close()
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
        asked: Job | AgentTask = client.recv()
    except EOFError:
        return
    if isinstance(asked, AgentTask):
        asked.run(client)
        return
    from .supervisor import Supervisor

    outcome = Supervisor(asked, client, folder).run()
    if outcome is not None:
        try:
            client.send(outcome)
        except BrokenPipeError:  # the client hung up meanwhile: nobody waits for it
            return


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.agent import main as serve

    serve()
