"""Signals that ask for the end, and what has to wait for them."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a request to end, and a terminal that went away."""


@contextmanager
def late_interrupts() -> Iterator[None]:
    """Holds these back until the end, where Python handles them and this is the main thread.

    What must not be torn is done within: a handler raises wherever it is called, also between the steps by which a
    lock is given back.
    """
    held: list[tuple[int, FrameType | None]] = []
    before: dict[int, Callable[[int, FrameType | None], object]] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if callable(handler := signal.getsignal(number)):
                    before[number] = handler
                    signal.signal(number, lambda number, frame: held.append((number, frame)))
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        if held:
            before[held[0][0]](*held[0])
