"""Forked processes that end with their parent (Linux)."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


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
