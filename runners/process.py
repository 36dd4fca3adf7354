"""Process trees that end when they should (Linux)."""

import contextlib
import ctypes
import os
import signal
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
LONGEST_NAME = 15
"""Bytes of a process's name."""
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


def call_this_process(name: str) -> None:
    """Gives this process a name by which `ps` and `top` show it: a fork else has that of what it was forked from."""
    text = ctypes.create_string_buffer(name.encode()[:LONGEST_NAME])
    _prctl(_PR_SET_NAME, ctypes.addressof(text))


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process, so that none can hide from `kill_descendants`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def offer_to_oom_killer() -> None:
    """The kernel takes this process first when memory runs out, not the user's own.

    Source: `man 5 proc_pid_oom_score_adj`.
    """
    # /proc may be read-only.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def kill_descendants(deadline_s: float = 10.0) -> None:
    """Kills every descendant of this process and reaps it. Requires `adopt_orphans`.

    Raises:
        TimeoutError: some would not die, for example in uninterruptible I/O.
    """
    end = time.monotonic() + deadline_s
    me = psutil.Process()
    while reap():
        for each in me.children(recursive=True):
            try:
                os.kill(each.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            left = [each.pid for each in me.children(recursive=True)]
            raise TimeoutError(f"processes survive SIGKILL: {left}")
        time.sleep(0.001)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def kill_tree(pid: int) -> None:
    """Kills a process and all its descendants, stopped ones as well; none can fork while the others are found."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # it ended meanwhile, and what it had started is another's now
        found = [psutil.Process(pid)]
        while found:
            for each in found:
                with contextlib.suppress(psutil.Error):
                    each.suspend()
            tree += found
            found = [each for each in tree[0].children(recursive=True) if each not in tree]
    for each in reversed(tree):
        with contextlib.suppress(psutil.Error):
            each.kill()


def reap() -> bool:
    """Collects the children that have ended; whether there are any left.

    A process whose first thread has ended looks like a zombie while the others still run, so only the
    kernel's own answer counts.
    """
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
