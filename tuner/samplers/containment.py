"""Restores process-wide state that libraries change."""

import random
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

import numpy as np

from ...base.interrupts import late_interrupts

_TURN = threading.Lock()  # two at once would restore each other's state


@contextmanager
def contained(seed: int) -> Iterator[None]:
    """Restores threads, warning filters, random generators, default dtype and device, and mutes stdout.

    It is for libraries that draw from the global generators (seeded with `seed` meanwhile), that print, and that
    swallow Ctrl-C with `except:`.
    """
    import torch

    with _TURN:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        dtype = torch.get_default_dtype()
        # Setting the CPU as the default device again would slow down each call.
        device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        muted = redirect_stdout(_MutedThread())
        with late_interrupts(), one_thread(), device, warnings.catch_warnings(), muted:
            warnings.simplefilter("ignore")
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
            torch.set_default_dtype(torch.float32)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch and BLAS on one thread. The matrices are small, and trials may be running on the other cores, in
    which case threads that wait for each other take up to 25 times as long.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(threads)


def one_blas_thread() -> AbstractContextManager[object]:
    """Runs BLAS on one thread, for the reasons of `one_thread`: on two busy cores a proposal took ten times as long
    with two threads.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=1, user_api="blas")


class _MutedThread:
    """Standard output without the output of the thread that created it; other threads print for trials."""

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._thread = threading.get_ident()

    def write(self, output: str) -> int:
        return len(output) if threading.get_ident() == self._thread else self._stream.write(output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
