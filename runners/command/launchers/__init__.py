"""Launchers that are known, one a file."""

from ....errors import UsageError, unknown
from . import (
    accelerate,
    axolotl,
    bridge,
    deepspeed,
    lightning,
    litgpt,
    llamafactory,
    megatron,
    nemo,
    torchtitan,
    trainer,
)
from .launcher import Launcher

LAUNCHERS: dict[str, Launcher] = {
    each.LAUNCHER.name: each.LAUNCHER
    for each in (
        trainer,
        accelerate,
        deepspeed,
        lightning,
        llamafactory,
        axolotl,
        litgpt,
        torchtitan,
        megatron,
        bridge,
        nemo,
    )
}


def find_launcher(name: str) -> Launcher:
    """The launcher of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in LAUNCHERS:
        raise UsageError(unknown("launcher", name, LAUNCHERS))
    return LAUNCHERS[name]
