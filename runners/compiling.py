"""What a rank compiles: how long it took, and that it is at it."""

import contextlib
import fcntl
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base.device import usable_cores

_ELF64 = struct.Struct("<4s36xQ10xHH2x")
"""Magic number; offset of the section headers, the size of one, and how many, of a 64-bit header."""
LINKING_S = 60.0
"""How long a linker may take where it cannot be told whether one writes, s."""
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Compilers of Inductor that work at the same time, as torch reads it."""


def share_compile_threads(ranks: int) -> None:
    """Divides this host's cores among the compilers of its ranks: each would start one for every core. What a user has set stays.

    Source: `decide_compile_threads` of torch/_inductor/config.py, which reads the variable when it is imported.
    """
    if COMPILE_THREADS in os.environ:
        return
    threads = max(1, usable_cores() // ranks)
    os.environ[COMPILE_THREADS] = str(threads)
    imported: Any = sys.modules.get("torch._inductor.config")
    if imported is not None:
        imported.compile_threads = min(imported.compile_threads, threads)


def sweep_compiled() -> None:
    """Removes libraries from Inductor's cache that a killed compilation has left unfinished; a later one would load them.

    Inductor links a library under its final name and takes one that exists for finished.
    """
    if "torch._inductor.codecache" not in sys.modules:  # nothing compiles in this process
        return
    from ..base._torch import inductor_cache_dir

    for path in Path(inductor_cache_dir()).glob("*/*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps, too
            if is_truncated(path) and not _is_written(path):
                path.unlink()


def is_truncated(path: Path) -> bool:
    """Returns True for a library whose table of sections, which linkers put at its end, is not all there.

    Source: https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html
    """
    with path.open("rb") as file:
        header = file.read(_ELF64.size)
        size = os.fstat(file.fileno()).st_size
    if len(header) < _ELF64.size:
        return True
    magic, sections_at, section_size, sections = _ELF64.unpack(header)
    return magic != b"\x7fELF" or not sections_at or size < sections_at + section_size * sections


def _is_written(path: Path) -> bool:
    """Returns True where a process has the file open for writing: it gets no lease to read then (`man 2 fcntl`)."""
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            return True
        except OSError:  # a file system without leases, or somebody else's file
            return time.time() - path.stat().st_mtime < LINKING_S
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False


class Compilation:
    """Counts the seconds that torch.compile takes in this process, and tells when it begins and ends.

    Args:
        tell: called with whether this rank compiles, or waits for others that may.
        elsewhere: whether the trial has ranks on other hosts. What these compile is not known here, so until
            `settled` this rank counts as waiting for them.
    """

    def __init__(self, tell: Callable[[bool], None], *, elsewhere: bool = False) -> None:
        from ..schedule.primitives.modules import on_compilation

        self._tell = tell
        self._elsewhere = elsewhere
        self._waits = False
        self._told = False
        self._since: float | None = None
        self._seconds = 0.0
        on_compilation(self._began, self._ended)

    @property
    def seconds(self) -> float:
        """Seconds so far, of compilations that have ended."""
        return self._seconds

    def expected(self) -> None:
        """The first steps come, in which models compile."""
        self._waits = self._elsewhere
        self._say()

    def settled(self) -> None:
        """Every rank has made a step without compiling."""
        self._waits = False
        self._say()

    def _began(self) -> None:
        self._since = time.perf_counter()
        self._say()

    def _ended(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None
        self._say()

    def _say(self) -> None:
        now = self._waits or self._since is not None
        if now != self._told:
            self._told = now
            self._tell(now)
