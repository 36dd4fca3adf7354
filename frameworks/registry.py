"""The frameworks by name. The module of one is imported when it is asked for."""

from collections.abc import Mapping
from importlib import import_module

from ..base.errors import UsageError, unknown
from .launcher import Launcher
from .words import Framework

LAUNCHERS = {
    "trainer": "trainer",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "llamafactory": "llamafactory",
    "axolotl": "axolotl",
    "litgpt": "litgpt",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
    "megatron-bridge": "megatron_bridge",
    "nemo": "nemo",
}
"""What `--launcher` takes, to the module."""
FRAMEWORKS: Mapping[str, str] = {**LAUNCHERS, "flagscale": "flagscale", "paddle": "paddle"}
"""Those whose files and commands are read, to the module."""


def find_launcher(name: str) -> Launcher:
    """The launcher of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in LAUNCHERS:
        raise UsageError(unknown("launcher", name, LAUNCHERS))
    launcher: Launcher = import_module(f".{LAUNCHERS[name]}", __package__).LAUNCHER
    return launcher


def find_framework(name: str) -> Framework:
    """What is known of a framework.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in FRAMEWORKS:
        raise UsageError(unknown("framework", name, FRAMEWORKS))
    framework: Framework = import_module(f".{FRAMEWORKS[name]}", __package__).FRAMEWORK
    return framework
