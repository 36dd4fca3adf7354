"""Chooses the kind of device that a search runs on. It is chosen once, so that all dry runs of a search are comparable."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..base.device import Device, detect, share_of_host
from ..base.errors import RunnerError, UsageError
from . import scheduling
from .records import Search, Worker
from .scheduling import matches

if TYPE_CHECKING:
    from ..estimator import Hardware


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The devices that a search runs on."""

    device: Device
    """The kind of device, with the number that one host has."""
    hardware: dict[str, Any] | None
    """The hardware as described by its workers, one device, as the fields of `redline.Hardware`; None if unknown."""
    memory_limit_mib: float | None
    """Memory limit of a rank, MiB; None for the device's memory."""
    software: dict[str, Any]
    """Versions that its workers run."""
    workers_devices: int
    """Devices of that kind in the pool."""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready mapping."""
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "device": self.device.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Placed":
        """The inverse of `to_dict`."""
        return cls(**{**data, "device": Device.from_dict(data["device"])})

    def machine(self) -> "Hardware | None":
        """Returns the hardware for the estimate."""
        return None if self.hardware is None else hardware_of(self.hardware, self.device.name)


def hardware_of(described: dict[str, Any], name: str) -> "Hardware":
    """Returns the hardware that a worker describes. `base` is rejected, as it could name a file of this host.

    Raises:
        UsageError: the description is invalid.
    """
    from ..estimator import Hardware

    if "base" in described:
        raise UsageError("a worker's hardware must give all its fields and must not have base")
    try:
        return Hardware.from_mapping(described, name=name, where="the worker's hardware")
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"the worker's description of its hardware is invalid: {type(error).__name__}: {error}"[:500]
        ) from None


def fault(worker: Worker) -> str:
    """Returns the error in a worker's description of its devices, which excludes the worker from placement; empty if
    valid.
    """
    try:
        Device.from_dict(worker.device)
        if (known := worker.device.get("hardware")) is not None:
            hardware_of(known, worker.kind)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def suits(search: Search, worker: Worker) -> bool:
    """True if a worker can run a search's dry runs."""
    of_its_kind = worker.kind == search.kind if search.kind else matches(search.device, worker.device)
    return worker.left is None and worker.devices >= search.devices and of_its_kind


def obstacle(search: Search, workers: Sequence[Worker]) -> str:
    """Returns the reason why a search cannot start; empty if it can."""
    if search.simulated or any(suits(search, each) for each in workers):
        return ""
    present = [each for each in workers if each.left is None]
    return scheduling.obstacle(search.device, search.devices, present, kind=search.kind)


def place(search: Search, workers: Sequence[Worker]) -> Placed | None:
    """Chooses the suitable kind of device with the most devices in the pool; None if there is none."""
    kinds: dict[str, list[Worker]] = {}
    for worker in workers:
        if suits(search, worker) and not fault(worker):
            kinds.setdefault(worker.kind, []).append(worker)
    if not kinds:
        return None
    chosen = max(sorted(kinds.items()), key=lambda kind: sum(each.devices for each in kind[1]))[1]
    # A dry run that fits on the worker with the least memory fits on all of them.
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
    """Returns this host's device as described by a worker with `devices` of them, and the memory limit of a rank, MiB."""
    from ..estimator.measuring import this_machine

    device = detect()
    memory = int(share_of_host(devices)) if device.type == "cpu" else device.memory_mib
    known = device.to_dict()
    try:
        hardware = this_machine()
    except RunnerError:  # a search also works without an estimate
        return known, memory
    if device.type == "cpu":
        hardware = hardware.shared(devices)
    return {**known, "hardware": asdict(hardware.replace(memory_gib=max(memory / 1024, 0.1)))}, memory
