"""Delay of the signals that end a process, around code that must not be interrupted."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a termination request, and a closed terminal."""


@contextmanager
def late_interrupts() -> Iterator[None]:
    """Delays these signals until the block ends, if they have Python handlers and this is the main thread.

    For code that must not be interrupted: a handler can raise anywhere, also between the steps that release a lock.
    """
    held: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, lambda number, frame: held.append((number, frame)))
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        if held:
            handlers[held[0][0]](*held[0])
