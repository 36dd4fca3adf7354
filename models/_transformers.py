"""What of transformers is asked for by every module that builds its models."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def quiet() -> Iterator[ModuleType]:
    """transformers, with its warnings off: they speak of checkpoints, and there is none."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(before)


def refusals() -> tuple[type[Exception], ...]:
    """What transformers raises on values that it does not take."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        StrictDataclassError,
        TypeError,
        ValueError,
    )
