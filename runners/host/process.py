"""Process trees on Linux, the deadline of a trial, and child processes with a connection."""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from ...base.reading import tail_inside
from ...base.scratch import Scratch
from ...frameworks.export_input import MEASURED_WITH
from .protocol import hang_up

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # <linux/prctl.h>
LONGEST_NAME = 15
"""Longest name of a process, bytes (`man 2 prctl`)."""


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


def call_this_process(name: str) -> None:
    """Sets the name of this process in `ps` and `top`. A fork otherwise has the name of its parent."""
    buffer = ctypes.create_string_buffer(name.encode()[:LONGEST_NAME])
    prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, so that `kill_descendants` finds them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def offer_to_oom_killer() -> None:
    """Makes the kernel's out-of-memory killer choose this process before the user's other processes.

    Source: `man 5 proc_pid_oom_score_adj`.
    """
    # /proc may be read-only.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def kill_descendants(deadline_s: float = 10.0) -> None:
    """Kills and reaps every descendant of this process. Requires `adopt_orphans`.

    Raises:
        TimeoutError: some do not die, for example in uninterruptible I/O.
    """
    end = time.monotonic() + deadline_s
    # Repeated: a process may fork while it is killed, and orphans of killed ones become children of this process.
    this_process = psutil.Process()
    while reap():
        for process in this_process.children(recursive=True):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            survivors = [process.pid for process in this_process.children(recursive=True)]
            raise TimeoutError(f"processes survive SIGKILL: {survivors}")
        time.sleep(0.001)


@contextlib.contextmanager
def builds_released(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Removes the locks of these processes, which the `with` kills, in torch's cache of compiled extensions.

    Such a lock (`torch.utils.file_baton`) is a file `lock` beside the extension's `build.ninja`, which its owner keeps
    open. A killed owner leaves the lock behind, and every later process that loads the extension waits for ever.
    """
    locks: dict[Path, os.stat_result] = {}
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    file = link.readlink()
                    if file.name == "lock" and file.with_name("build.ninja").exists():
                        locks[file] = file.stat()
    yield
    for file, earlier in locks.items():
        with contextlib.suppress(OSError):
            current = file.stat()
            if (current.st_ino, current.st_ctime_ns) == (
                earlier.st_ino,
                earlier.st_ctime_ns,
            ):  # not another process's by now
                file.unlink()


def family(pid: int) -> list[psutil.Process]:
    """Returns a process and all its descendants, itself first.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def kill_tree(pid: int) -> None:
    """Kills a process and all its descendants, including suspended ones. They are suspended first, so that none can
    fork meanwhile.
    """
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # it ended meanwhile, and its children have another parent
        new_processes = [psutil.Process(pid)]
        while new_processes:
            for process in new_processes:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            tree += new_processes
            new_processes = [process for process in tree[0].children(recursive=True) if process not in tree]
    with builds_released(tree):
        for process in reversed(tree):
            with contextlib.suppress(psutil.Error):
                process.kill()


def reap() -> bool:
    """Reaps the children that have ended. Returns True if others still run.

    A process whose first thread has ended looks like a zombie while other threads still run, so only the kernel's
    answer counts.
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
    """The deadline of a trial. Times are those of one clock, s.

    The trial's time stops while any of its ranks compiles, since the others may wait for that one. All its
    compilations together have a time limit of their own, so that one that hangs ends as well.
    """

    begin: float
    """When the trial began."""
    timeout_s: float | None = None
    """Time limit of the trial; None for no limit, including compilation."""
    compile_timeout_s: float = 0.0
    """Time limit of all its compilations."""
    _compiled_s: float = 0.0
    _compiling_since: float | None = None

    def compiling(self, yes: bool, now: float) -> bool:
        """Records that a rank begins to compile or that none compiles any more. Returns True if that is a change."""
        if yes == self.in_compilation:
            return False
        if self._compiling_since is None:
            self._compiling_since = now
        else:
            self._compiled_s += now - self._compiling_since
            self._compiling_since = None
        return True

    @property
    def in_compilation(self) -> bool:
        """True while the time of compilations runs."""
        return self._compiling_since is not None

    @property
    def at(self) -> float:
        """When the trial must end if nothing changes; infinite for never."""
        if self.timeout_s is None:
            return math.inf
        if self._compiling_since is not None:
            return self._compiling_since + self.compile_timeout_s - self._compiled_s
        return self.begin + self.timeout_s + self._compiled_s

    @property
    def reason(self) -> str:
        """Error text that states which limit was exceeded."""
        if self.in_compilation:
            return f"compilation took more than {self.compile_timeout_s:g} s"
        return f"no result within {self.timeout_s:g} s"


LAST_WORDS = 2000
"""Size of the end of its output that errors show, bytes."""


class HelperProcess:
    """Runs `python -m MODULE FD FOLDER` in its own session. FD is its end of a connection. FOLDER is removed by the
    process when the connection closes, since its parent may have been killed.

    Its output goes to a log in the folder. The connection is not a standard stream, so imported modules may print or
    read there.

    Args:
        module: module to run.
        kind: names its folder (see `Scratch`).
        environment: default values of its environment variables, besides `MEASURED_WITH`.
    """

    def __init__(self, module: str, kind: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._scratch = Scratch(kind)
        self.folder = self._scratch.path
        """Its folder, which `close` removes."""
        self.connection: Connection
        """This end of the connection."""
        self.connection, child_end = Pipe()
        with child_end, open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(child_end.fileno()), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
                env={**MEASURED_WITH, **(environment or {}), **os.environ},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        """True if the process has not ended."""
        return self.process.poll() is None

    def ended(self, within_s: float = 5.0) -> int:
        """Waits for the end and returns the exit code. Kills the process and everything it started after `within_s`."""
        try:
            return self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kills the process and everything it started, suspended or not, and returns its exit code."""
        if self.running:  # a reaped process's id may belong to another one
            kill_tree(self.pid)
        return self.process.wait()

    def close(self, within_s: float) -> None:
        """Ends the process, killing it after `within_s`, and removes its folder. May be called twice."""
        hang_up(self.connection)
        self.ended(within_s)
        self._scratch.close()

    def with_last_words(self, message: str) -> str:
        """Returns the message followed by the end of the process's output."""
        output = ""
        with contextlib.suppress(OSError):  # the process removes the folder when it ends
            output = tail_inside(self.folder, "log", at_most=LAST_WORDS)[0].strip()
        return f"{message}\n{output}" if output else message
