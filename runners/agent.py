"""The host agent: a fork server that has imported torch and transformers but never touched a device.

Run as `python -m redline.runners.agent`. It reads its set-up from standard input, listens on a Unix
socket, and forks a supervisor for every connection. It ends, with everything it started, when its
standard input closes: when the process that started it ends, however that happens.
"""

import gc
import importlib
import os
import pickle
import selectors
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener

from .process import adopt_orphans, die_with_parent, kill_descendants, reap


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSetup:
    """What a host agent is started with."""

    address: str
    """Path of its Unix socket."""
    sys_path: tuple[str, ...] = ()
    """The import path of the process that started it."""
    imports: tuple[str, ...] = ("torch", "transformers")
    """Modules that every rank will need."""


def main() -> None:
    """Serves until standard input closes."""
    setup: AgentSetup = pickle.load(sys.stdin.buffer)
    sys.path[:] = list(dict.fromkeys([*setup.sys_path, *sys.path]))
    adopt_orphans()
    # torch.cuda.is_available() through NVML, so that no import initialises CUDA in the agent.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        for name in setup.imports:
            importlib.import_module(name)
        listener = Listener(setup.address, "AF_UNIX", backlog=128)
    except Exception as error:  # the starter is told, whatever it is
        _tell({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        sys.exit(1)
    gc.collect()
    gc.freeze()  # what is imported is never collected, so its pages stay shared
    _tell({"ready": os.getpid()})
    try:
        _serve(listener)
    finally:
        kill_descendants()


def _tell(message: dict) -> None:
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def _serve(listener: Listener) -> None:
    socket = listener._listener._socket  # Listener offers no fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(socket, selectors.EVENT_READ, "client")
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "stdin")
        while True:
            for key, _ in selector.select():
                if key.data == "stdin":
                    if not os.read(sys.stdin.fileno(), 1):
                        return
                elif key.data == "client":
                    with listener.accept() as client:
                        pid, pidfd = _fork_supervisor(client, listener)
                    selector.register(pidfd, selectors.EVENT_READ, pid)
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    reap()


def _fork_supervisor(client: Connection, listener: Listener) -> tuple[int, int]:
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid, os.pidfd_open(pid)
    code = 1
    try:
        die_with_parent(me)
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        listener._listener._socket.close()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        _supervise(client)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
    return 0, 0


def _supervise(client: Connection) -> None:
    from .supervisor import Supervisor

    try:
        job = client.recv()
    except EOFError:
        return
    outcome = Supervisor(job, client).run()
    if outcome is not None:
        try:
            client.send(outcome)
        except BrokenPipeError:  # the client hung up meanwhile: nobody waits for it
            return


if __name__ == "__main__":
    # Pickles must name this module by its import path, not as __main__.
    from redline.runners.agent import main as serve

    serve()
