"""Where a run took place: versions, machine, driver. Found without importing any of it."""

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
"""The packages whose versions can change what is measured or proposed."""


def versions() -> dict[str, str]:
    """Versions of redline, Python and those of `PACKAGES` that are installed."""
    found = {"redline": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = nvidia_driver()
    return found | {"nvidia_driver": driver} if driver else found


def host() -> dict[str, Any]:
    """Name, operating system, processor cores this process may use, and memory (MiB) of this machine."""
    return {
        "name": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
    }


def nvidia_driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    """Version of the loaded NVIDIA kernel driver; None if there is none."""
    try:
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", Path(path).read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def describe(devices: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The environment as best.yaml and run.yaml keep it.

    Args:
        devices: what the tuner knows of the devices, kept as it is.
    """
    out: dict[str, Any] = {"versions": versions(), "host": host()}
    return out | {"devices": dict(devices)} if devices else out
