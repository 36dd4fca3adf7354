"""The frameworks by name. Their modules are imported when the first of them is asked for."""

import functools
from types import ModuleType

from ..base.errors import UsageError, unknown
from .launcher import Launcher
from .words import Framework

LAUNCHERS = (
    *("trainer", "accelerate", "deepspeed", "lightning", "llamafactory", "axolotl", "litgpt", "torchtitan", "megatron"),
    *("megatron-bridge", "nemo"),
)
"""What `--launcher` takes."""
FRAMEWORKS = (*LAUNCHERS, "flagscale", "paddle")
"""Those whose files and commands are read."""


@functools.cache
def _modules() -> dict[str, ModuleType]:
    from . import (
        accelerate,
        axolotl,
        deepspeed,
        flagscale,
        lightning,
        litgpt,
        llamafactory,
        megatron,
        megatron_bridge,
        nemo,
        paddle,
        torchtitan,
        trainer,
    )

    found = (accelerate, axolotl, deepspeed, flagscale, lightning, litgpt, llamafactory, megatron, megatron_bridge)
    return {each.FRAMEWORK.name: each for each in (*found, nemo, paddle, torchtitan, trainer)}


def find_launcher(name: str) -> Launcher:
    """The launcher of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in LAUNCHERS:
        raise UsageError(unknown("launcher", name, LAUNCHERS))
    launcher: Launcher = _modules()[name].LAUNCHER
    return launcher


def find_framework(name: str) -> Framework:
    """What is known of a framework.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in FRAMEWORKS:
        raise UsageError(unknown("framework", name, FRAMEWORKS))
    framework: Framework = _modules()[name].FRAMEWORK
    return framework
