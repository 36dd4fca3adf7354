"""Compilation in a rank: its threads, its cache, and the time it takes."""

import contextlib
import fcntl
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...base.device import usable_cores

_ELF64 = struct.Struct("<4s36xQ10xHH2x")
"""Fields of a 64-bit ELF header: magic number; offset, size and number of the section headers."""
LINKING_S = 60.0
"""How long a linker may take if it is unknown whether a process still writes the file, s."""
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variable that limits Inductor's concurrent compilers, read by torch."""


def share_compile_threads(ranks: int) -> None:
    """Divides this host's cores among the compilers of its ranks, each of which would start one per core. A value set
    by the user is kept.

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
    """Removes incomplete libraries, left by a killed compilation, from Inductor's cache. A later compilation would
    load them.

    Inductor links a library under its final name and assumes that an existing one is complete.
    """
    if "torch._inductor.codecache" not in sys.modules:  # this process does not compile
        return
    from ...base._torch import inductor_cache_dir

    for path in Path(inductor_cache_dir()).glob("*/*.so"):
        with contextlib.suppress(OSError):  # another process sweeps as well, or another user owns it
            if is_truncated(path) and not _is_written(path):
                path.unlink()


def is_truncated(path: Path) -> bool:
    """Returns True for a library whose table of sections, which linkers put at its end, is incomplete.

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
    """Returns True if a process has the file open for writing, in which case no read lease is granted (`man 2 fcntl`)."""
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            return True
        except OSError:  # a file system without leases, or another user's file
            return time.time() - path.stat().st_mtime < LINKING_S
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False


class Compilation:
    """Measures the time that torch.compile takes in this process and reports when it begins and ends.

    Args:
        report: called with True when this rank begins to compile or to wait for others that may, with False when that
            ends.
        elsewhere: True if the trial has ranks on other hosts. Their compilations are unknown here, so until `settled`
            this rank counts as waiting for them.
    """

    def __init__(self, report: Callable[[bool], None], *, elsewhere: bool = False) -> None:
        from ...schedule.primitives.modules import on_compilation

        self._report = report
        self._elsewhere = elsewhere
        self._waits = False
        self._reported = False
        self._begun: float | None = None
        self.seconds = 0.0
        """Total time of finished compilations, s."""
        on_compilation(self._on_begin, self._on_end)

    def expected(self) -> None:
        """Records that the next steps may compile."""
        self._waits = self._elsewhere
        self._update()

    def settled(self) -> None:
        """Records that every rank has made a step without compiling."""
        self._waits = False
        self._update()

    def _on_begin(self) -> None:
        self._begun = time.perf_counter()
        self._update()

    def _on_end(self) -> None:
        if self._begun is not None:
            self.seconds += time.perf_counter() - self._begun
            self._begun = None
        self._update()

    def _update(self) -> None:
        compiling_or_waiting = self._waits or self._begun is not None
        if compiling_or_waiting != self._reported:
            self._reported = compiling_or_waiting
            self._report(compiling_or_waiting)
