"""Frameworks by name. Their modules are imported on demand."""

import functools

from ..base.errors import UsageError, unknown
from .framework import Framework, fields_of, settings_of
from .launcher import Launcher

LAUNCHERS = (
    *("trainer", "accelerate", "deepspeed", "lightning", "llamafactory", "axolotl", "litgpt", "torchtitan", "megatron"),
    "megatron-bridge",
)
"""Names for `--launcher`."""
FRAMEWORKS = (*LAUNCHERS, "trl", "nanotron")
"""Frameworks whose files and commands can be read."""


@functools.cache
def _frameworks() -> dict[str, Framework]:
    from . import (
        accelerate,
        axolotl,
        deepspeed,
        lightning,
        litgpt,
        llamafactory,
        megatron,
        nanotron,
        torchtitan,
        trainer,
        trl,
    )

    modules = (accelerate, axolotl, deepspeed, lightning, litgpt, llamafactory, megatron, nanotron)
    frameworks: list[Framework] = [module.FRAMEWORK for module in (*modules, torchtitan, trainer, trl)]
    return {framework.name: framework for framework in (*frameworks, megatron.BRIDGE)}


def find_launcher(name: str) -> Launcher:
    """Returns the launcher of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in LAUNCHERS:
        raise UsageError(unknown("launcher", name, LAUNCHERS))
    return Launcher(name=name, **fields_of(settings_of(name)["launcher"]))


def find_framework(name: str) -> Framework:
    """Returns the framework of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in FRAMEWORKS:
        raise UsageError(unknown("framework", name, FRAMEWORKS))
    return _frameworks()[name]
