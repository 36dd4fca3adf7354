"""Process trees (Linux): ended as a whole, within a trial's deadline."""

import contextlib
import ctypes
import math
import os
import signal
import time
from dataclasses import dataclass

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


@dataclass
class Deadline:
    """Tells when a trial is to be ended; moments are those of one clock, s.

    The trial's own time stands still while any of its ranks compiles: the others may wait for that one. All
    its compilations together may take their own time and no more, so that one that hangs ends as well.
    """

    begin: float
    """When the trial began."""
    timeout_s: float | None = None
    """Its own time; None for no end, of compilation neither."""
    compile_timeout_s: float = 0.0
    """Time of all its compilations."""
    _compiled: float = 0.0
    _since: float | None = None

    def compiling(self, yes: bool, now: float) -> bool:
        """Takes note of whether any rank compiles from now on; whether that is news."""
        if yes == self.in_compilation:
            return False
        if self._since is None:
            self._since = now
        else:
            self._compiled += now - self._since
            self._since = None
        return True

    @property
    def in_compilation(self) -> bool:
        """Whether it is compilation's time that runs."""
        return self._since is not None

    @property
    def at(self) -> float:
        """The moment at which the trial is to be ended if nothing changes; infinite for never."""
        if self.timeout_s is None:
            return math.inf
        if self._since is not None:
            return self._since + self.compile_timeout_s - self._compiled
        return self.begin + self.timeout_s + self._compiled

    @property
    def reason(self) -> str:
        """What took too long, in words."""
        if self.in_compilation:
            return f"compilation took more than {self.compile_timeout_s:g} s"
        return f"no result within {self.timeout_s:g} s"
