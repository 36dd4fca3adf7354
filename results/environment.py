"""The environment of a run: versions, machine, driver. Found without importing the packages."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "optuna",
    "HEBO",
    "botorch",
    "gpytorch",
    "ray",
    "numpy",
    "pandas",
)
"""Packages whose versions can affect measurements or proposals."""


def versions() -> dict[str, str]:
    """Returns the versions of redline, Python and the installed packages of `PACKAGES`."""
    installed = {"redline": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = nvidia_driver()
    return installed | {"nvidia_driver": driver} if driver else installed


def host() -> dict[str, Any]:
    """Returns name, operating system, available CPU cores and memory (MiB) of this machine."""
    return {
        "name": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
    }


def nvidia_driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    """Returns the version of the loaded NVIDIA kernel driver; None if there is none."""
    try:
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", Path(path).read_text())
    except OSError:
        return None
    return match.group(1) if match else None


def describe(devices: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the environment as stored in best.yaml and run.yaml.

    Args:
        devices: the tuner's description of the devices, stored unchanged.
    """
    description: dict[str, Any] = {"versions": versions(), "host": host()}
    return description | {"devices": dict(devices)} if devices else description
