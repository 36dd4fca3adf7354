"""The checks of bench/gpu.py, in the order in which they run.

A check is a function of a `Setting` that yields rows: `what`, any values, and `holds` if something is required.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.runners.host.client import HostAgent

Row = dict[str, Any]


class Skipped(Exception):
    """A check cannot run on this machine; the text is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Device and size of the checks."""

    device: str
    """`cuda` or `cpu`."""
    tiny: bool
    """True for tiny sizes, in the tests of the checks."""
    folder: Path
    """Folder of results and logs."""
    agent: HostAgent | None = None
    """The agent that starts the ranks of trials; its creator closes it."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its time limit."""

    run: Callable[[Setting], Iterator[Row]]
    limit_s: float


def _checks() -> dict[str, Check]:
    from . import correct, faults, ranks, speed

    return {
        "versions": Check(correct.versions, 30),
        "tests": Check(correct.tests, 120),
        "attention": Check(correct.attention, 30),
        "weights": Check(correct.weights, 40),
        "trials": Check(faults.trials, 90),
        "exhaustion": Check(faults.exhaustion, 90),
        "timing": Check(speed.timing, 30),
        "probe": Check(correct.probe, 120),
        "models": Check(speed.models, 240),
        "large": Check(speed.large, 100),
        "fsdp": Check(correct.fsdp, 40),
        "sdpa": Check(correct.sdpa, 30),
        "offload": Check(speed.offload, 60),
        "resume": Check(correct.resume, 40),
        "measure": Check(speed.measured, 120),
        "ranks": Check(ranks.ranks, 180),
    }


CHECKS = _checks()
"""Checks by name, in order."""
