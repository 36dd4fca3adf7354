"""Text of configurations."""

from collections.abc import Collection, Mapping
from typing import Any


def exact_text(value: Any) -> str:
    """Returns a knob's value as the command line takes it, with its type: `true`, `1.0` or `sdpa`; None is `none`."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def value_text(value: Any) -> str:
    """Returns a knob's value for people and for other programs, as `true`, `1`, `0.25` or `sdpa`."""
    return exact_text(value).removesuffix(".0") if isinstance(value, float) else exact_text(value)


def marked_text(value: Any, *, lossy: bool) -> str:
    """Returns a knob's value for people, marked if it trades accuracy for speed: `bf16_pure (lossy)`."""
    return f"{value_text(value)} (lossy)" if lossy else value_text(value)


def config_text(config: Mapping[str, Any], lossy: Collection[str] = (), *, between: str = " ") -> str:
    """Returns the knobs of a configuration for people, as `tp=2 precision=bf16_pure (lossy)`.

    Args:
        config: values by knob.
        lossy: knobs to mark: their values trade accuracy for speed.
        between: separator of knobs.
    """
    return between.join(f"{name}={marked_text(value, lossy=name in lossy)}" for name, value in config.items())
