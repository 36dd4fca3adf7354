"""The launchers by name; each module is imported when its launcher is asked for."""

from importlib import import_module

from ..base.errors import UsageError, unknown
from .launcher import Launcher

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
"""What `--launcher` takes, to the file."""


def find_launcher(name: str) -> Launcher:
    """The launcher of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in LAUNCHERS:
        raise UsageError(unknown("launcher", name, LAUNCHERS))
    return import_module(f".{LAUNCHERS[name]}", __package__).LAUNCHER
