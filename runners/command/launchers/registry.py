"""The launcher of a name."""

from importlib import import_module

from ....base.errors import UsageError, unknown
from . import LAUNCHERS
from .launcher import Launcher


def find_launcher(name: str) -> Launcher:
    """The launcher of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in LAUNCHERS:
        raise UsageError(unknown("launcher", name, LAUNCHERS))
    return import_module(f".{LAUNCHERS[name]}", __package__).LAUNCHER
