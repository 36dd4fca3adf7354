"""Forked processes: calls that run beside this one, and processes that end with their parent."""

import ctypes
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from .device import usable_cores

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ForkedCall(Generic[T]):
    """A call in a forked process, which inherits all that is imported and built here, and sends its result back.

    The process is killed when this object is deleted, and when this process ends. `concurrent.futures` and `multiprocessing.Pool`
    are not used: they start threads in this process, beside which it could not fork again.

    Args:
        function: returns something that can be pickled. Changes of this process's objects are lost.

    Raises:
        OSError: the kernel has no memory or no number for another process.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.channel, sender = Pipe(duplex=False)
        """Readable when the process has its result or has ended."""
        # Signals stay blocked until the child has its own handlers: with this process's, SIGTERM would not end it.
        blocked, me = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS), os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                _run(function, sender, me)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sender.close()
        self._end = weakref.finalize(self, _end, me, pid, self.channel)

    def result(self) -> T:
        """The result of the call, once. If the process ended without one, after an exception or killed, the function is called
        again, in this process.

        Raises:
            BaseException: that of the function.
        """
        try:
            outcome: T = self.channel.recv()
            return outcome
        except (EOFError, OSError):
            pass  # called below
        finally:
            self._end()
        return self._function()


def started(function: Callable[[], T]) -> ForkedCall[T] | None:
    """Starts a call in a forked process. Returns None without Linux or a second core, with another thread, which may hold a
    lock, after a backward pass that started autograd's threads, or if the kernel refuses the fork."""
    if sys.platform != "linux" or usable_cores() < 2 or threading.active_count() > 1 or _has_backward_threads():
        return None
    with suppress(OSError):
        return ForkedCall(function)
    return None


def _has_backward_threads() -> bool:
    """True if autograd has started its threads, one for each CUDA device: a fork of this process could not run a backward pass
    (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork)."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_bytes().startswith(b"pt_autograd"):
                return True
    return False


def beside(function: Callable[[], T]) -> Callable[[], T]:
    """Starts a call in a forked process and returns a function that waits for its result. If no process can be started, that
    function makes the call."""
    call = started(function)
    return function if call is None else call.result


def prctl(option: int, value: int) -> None:
    """Calls `prctl` with one argument (`man 2 prctl`).

    Raises:
        OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option}, {value})")


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when `parent`, which forked it, ends (`man 2 PR_SET_PDEATHSIG`)."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _end(parent: int, pid: int, channel: Connection) -> None:
    channel.close()
    if os.getpid() != parent:  # a fork of it deletes its copy
        return
    with suppress(ProcessLookupError, ChildProcessError):  # something else waited for it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run(function: Callable[[], object], sender: Connection, parent: int) -> NoReturn:
    """Calls a function in a forked process."""
    code = 1
    try:
        die_with_parent(parent)
        # The parent ends this process; the parent's signal handlers must not run here.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        gc.freeze()  # a collection would write to all of the parent's objects, and so copy their pages
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        sender.send(function())
        code = 0
    finally:
        os._exit(code)
