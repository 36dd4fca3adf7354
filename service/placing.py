"""On what a search runs: a kind of device of the pool, chosen once, so that all its dry runs compare."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..base.device import Device, detect
from ..base.errors import RunnerError, UsageError
from ..tuner.search_setup import share_of_host
from . import scheduling
from .records import Search, Worker
from .scheduling import matches

if TYPE_CHECKING:
    from ..estimator import Hardware


@dataclass(frozen=True, kw_only=True)
class Placed:
    """On what a search runs."""

    device: Device
    """The kind of device, and how many one host has."""
    hardware: dict[str, Any] | None
    """What its workers know of it, as the fields of `redline.Hardware`, of one device; None where they know nothing."""
    memory_limit_mib: float | None
    """What a rank may take, MiB; None for what the device has."""
    software: dict[str, Any]
    """The versions that its workers run."""
    workers_devices: int
    """Devices of that kind in the pool."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "device": self.device.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Placed":
        """The inverse of `to_dict`."""
        return cls(**{**data, "device": Device.from_dict(data["device"])})

    def machine(self) -> "Hardware | None":
        """The hardware for the estimate."""
        return None if self.hardware is None else hardware_of(self.hardware, self.device.name)


def hardware_of(described: dict[str, Any], name: str) -> "Hardware":
    """The hardware that a worker describes, which may not be based on another: that could be a file of this host.

    Raises:
        UsageError: it is none.
    """
    from ..estimator import Hardware

    if "base" in described:
        raise UsageError("a worker's hardware must be described by all its fields, and not by base")
    try:
        return Hardware.from_mapping(described, name=name, where="the worker's hardware")
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the worker's hardware is none: {type(error).__name__}: {error}"[:500]) from None


def fault(worker: Worker) -> str:
    """What is wrong with a worker's description of its devices, so that no search is placed by it; empty where nothing is."""
    try:
        Device.from_dict(worker.device)
        if (known := worker.device.get("hardware")) is not None:
            hardware_of(known, worker.kind)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def suits(search: Search, worker: Worker) -> bool:
    """Whether a worker can run a search's dry runs."""
    of_its_kind = worker.kind == search.kind if search.kind else matches(search.device, worker.device)
    return worker.left is None and worker.devices >= search.devices and of_its_kind


def obstacle(search: Search, workers: Sequence[Worker]) -> str:
    """Why a search cannot begin, in words; empty where it can."""
    if search.simulated or any(suits(search, each) for each in workers):
        return ""
    there = [each for each in workers if each.left is None]
    return scheduling.obstacle(search.device, search.devices, there, kind=search.kind)


def place(search: Search, workers: Sequence[Worker]) -> Placed | None:
    """On what of the pool a search is to run: the kind with the most devices; None where there is none that suits."""
    kinds: dict[str, list[Worker]] = {}
    for worker in workers:
        if suits(search, worker) and not fault(worker):
            kinds.setdefault(worker.kind, []).append(worker)
    if not kinds:
        return None
    chosen = max(sorted(kinds.items()), key=lambda kind: sum(each.devices for each in kind[1]))[1]
    # What fits where there is least fits on all of them.
    least = min(chosen, key=lambda worker: (worker.memory_mib, worker.id))
    device = Device.from_dict(least.device)
    return Placed(
        device=device,
        hardware=least.device.get("hardware"),
        memory_limit_mib=float(least.memory_mib) if device.type == "cpu" else None,
        software=least.software,
        workers_devices=sum(each.devices for each in chosen),
    )


def described(devices: int) -> tuple[dict[str, Any], int]:
    """This host's device as a worker with so many of them describes it, and the memory that a rank may take, MiB."""
    from ..estimator.measuring import this_machine

    device = detect()
    memory = int(share_of_host(devices)) if device.type == "cpu" else device.memory_mib
    known = device.to_dict()
    try:
        hardware = this_machine()
    except RunnerError:  # a search without an estimate is still one
        return known, memory
    if device.type == "cpu":
        hardware = hardware.shared(devices)
    return {**known, "hardware": asdict(hardware.replace(memory_gib=max(memory / 1024, 0.1)))}, memory
