"""transformers as it is asked for everywhere, and what of it is not public and is needed all the same.

Checked with transformers 5.0 to 5.23. Nothing here imports it before it is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

OF_MODELS = ("_supports_sdpa", "_supports_flash_attn", "_init_weights")
"""Attributes of its models that are read or called here."""


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


def refusals(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What transformers raises on values that it does not take, and others."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        StrictDataclassError,
        TypeError,
        ValueError,
        *others,
    )


def supports_sdpa(model_class: Any) -> bool:
    """Whether a family has attention by `torch.nn.functional.scaled_dot_product_attention`."""
    return bool(model_class._supports_sdpa)


def supports_flash(model_class: Any) -> bool:
    """Whether a family has attention by the flash-attn package."""
    return bool(model_class._supports_flash_attn)


def initialise(model: Any, module: "nn.Module") -> None:
    """Gives a module of a model the values that its family begins training with."""
    model._init_weights(module)


def experts_by_shapes_alone(config: Any) -> None:
    """Has a mixture of experts computed such that the shapes of results do not depend on values, where it is one.

    Of transformers' ways through it the others sort the tokens by expert.
    """
    if getattr(config, "_experts_implementation", None):
        config._experts_implementation = "batched_mm"
