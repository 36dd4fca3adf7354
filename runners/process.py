"""Process trees that end when they should (Linux)."""

import ctypes
import os
import signal
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option}, {value})")


def die_with_parent(parent: int) -> None:
    """This process is killed when `parent`, which forked it, ends (`man 2 PR_SET_PDEATHSIG`)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process, so that none can hide from `kill_descendants`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(deadline_s: float = 10.0) -> None:
    """Kills every descendant of this process and reaps it. Requires `adopt_orphans`.

    Raises:
        TimeoutError: some would not die, for example in uninterruptible I/O.
    """
    end = time.monotonic() + deadline_s
    me = psutil.Process()
    while True:
        while _reap():
            continue
        alive = [each for each in me.children(recursive=True) if each.is_running()]
        alive = [each for each in alive if _state(each) != psutil.STATUS_ZOMBIE]
        if not alive:
            while _reap():
                continue
            return
        for each in alive:
            try:
                os.kill(each.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise TimeoutError(f"processes survive SIGKILL: {[each.pid for each in alive]}")
        time.sleep(0.002)


def _state(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _reap() -> bool:
    try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return pid != 0
