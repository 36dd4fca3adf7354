"""Which configurations train something else than asked: less accurate numbers, kept for speed."""

from collections.abc import Mapping
from typing import Any

LOSSY = {"precision": ("bf16_pure", "fp8")}
"""Knob values without fp32 master weights or with coarser products: another training, not only a faster one."""


def lossy(config: Mapping[str, Any]) -> str:
    """The configuration's values that trade accuracy for speed, as `precision=bf16_pure`; empty where it has none."""
    return ", ".join(
        f"{name}={config[name]}" for name, values in LOSSY.items() if name in config and config[name] in values
    )
