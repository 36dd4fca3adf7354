"""Text of configurations, as the command line takes them."""

from collections.abc import Collection, Mapping
from typing import Any


def value_text(value: Any) -> str:
    """Returns a knob's value exactly, as `true`, `0.5` or `sdpa`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def config_text(config: Mapping[str, Any], lossy: Collection[str] = (), *, between: str = " ") -> str:
    """Returns the knobs of a configuration, as `tp=2 precision=bf16_pure (lossy)`.

    Args:
        config: values by knob.
        lossy: knobs to mark: their values trade accuracy for speed.
        between: separator of knobs.
    """
    return between.join(
        f"{name}={value_text(value)}{' (lossy)' if name in lossy else ''}" for name, value in config.items()
    )
