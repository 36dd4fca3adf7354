"""Work without the cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python's cyclic collector is off while it is open; counted references are freed as always.

    Importing frameworks and tracing make some hundred thousand objects that live on, among which each full
    collection searches anew, a quarter of a second each time: a second in all of a first estimate.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
