"""Measures this machine: the numbers that the hardware table has for known devices."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.device import Device, detect, usable_cores
from ..base.errors import RunnerError
from .facts import disk_cache
from .hardware import LINKS, SLOWEST_GB_PER_S, SLOWEST_TFLOPS, Hardware, Link, recognise

if TYPE_CHECKING:
    import torch

SIDE = {"cpu": 768, "cuda": 8192}
"""Side of the square products that are timed."""
COPY_BYTES = {"cpu": 64 * 1024**2, "cuda": 1024**3}
"""Bytes of the copied tensor; it exceeds the caches."""
SECONDS = 0.15
"""Time for each number."""
LIMIT_S = 120
"""Limit on the duration of a measurement in a process of its own, s."""
MAX_AGE_S = 24 * 3600
"""Age after which a cached measurement is repeated, s: the machine may have been busy."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of this machine."""

    device: Device
    tflops: Mapping[str, float]
    """Rate of square products by dtype, 1e12 FLOP/s."""
    memory_gb_per_s: float
    """Bytes read and written in a copy, 1e9 bytes/s."""
    host_gb_per_s: float | None = None
    """Between host and device, 1e9 bytes/s; None on a CPU."""

    def to_hardware(self) -> Hardware:
        """The measurements as `Hardware`. A device of the table keeps its datasheet's rates and links, which its curves refer to;
        the links of others are assumed: those of PCIe, or of memory."""
        listed = hardware_of(self.device)
        host = {"host_gb_per_s": f"measured on {self.device.name}"}
        if listed is not None and self.host_gb_per_s is not None:
            return listed.replace(host_gb_per_s=round(self.host_gb_per_s, 2), sources={**listed.sources, **host})
        on_cpu = self.device.type == "cpu"
        # Ranks of one machine communicate through memory: a copy out, a sum and a copy in.
        memory = Link(name="shared memory", gb_per_s=round(self.memory_gb_per_s / 8, 3), latency_us=100.0)
        return Hardware(
            name="this-cpu" if on_cpu else "this-machine",
            memory_gib=round(self.device.memory_mib / 1024, 2),
            tflops={name: round(rate, 5) for name, rate in self.tflops.items()},
            memory_gb_per_s=round(self.memory_gb_per_s, 2),
            intra_node=memory if on_cpu else LINKS["PCIe 4 x16"],
            inter_node=Link(name="10 Gbit/s Ethernet", gb_per_s=1.25, latency_us=50.0),
            devices_per_node=max(1, self.device.count),
            host_gb_per_s=round(self.host_gb_per_s or self.memory_gb_per_s, 2),
            achievable=1.0,  # relative to measured rates
            kind="cpu" if on_cpu else "cuda",
            cores=usable_cores() if on_cpu else None,
            sources={
                **dict.fromkeys(("tflops", "memory_gb_per_s"), f"measured on {self.device.name}"), **host,
                "intra_node": "assumed",
            },
        )  # fmt: skip


def measure() -> Measured:
    """Measures this machine with products and copies, in a second or two."""
    import torch

    device = detect()
    kind, size, side = device.type, COPY_BYTES[device.type], SIDE[device.type]
    on_device = torch.device(kind)
    works = {name: _product(side, dtype, on_device, tf32=name == "tf32") for name, dtype in _dtypes(device).items()}
    works["copy"] = _copy(size, on_device, on_device)
    if kind == "cuda":
        works["host"] = _copy(size // 4, torch.device("cpu"), on_device)
    seconds = {name: _seconds(work) for name, work in works.items()}
    return Measured(
        device=device,
        tflops={name: max(SLOWEST_TFLOPS, 2 * side**3 / seconds[name] / 1e12) for name in _dtypes(device)},
        memory_gb_per_s=max(SLOWEST_GB_PER_S, 2 * size / seconds["copy"] / 1e9),  # read and written
        host_gb_per_s=size // 4 / seconds["host"] / 1e9 if kind == "cuda" else None,
    )


def _kept_under(device: Device) -> Path:
    from ..models.fingerprint import digest

    identity = {"device": device.to_dict(), "cores": usable_cores(), "version": disk_cache.VERSION}
    return Path("hardware", f"{digest(identity)}.json")


def this_machine(folder: Path | None = None, settle: Callable[[], None] = lambda: None) -> Hardware:
    """The hardware of this machine: its GPUs' entry in the table, or a measurement, cached.

    On a CPU the rate is that of all cores this process may use. A measurement is repeated after a day, or if the cores or the
    memory have changed.

    Args:
        folder: of the cache; None for the user's.
        settle: called before a measurement; returns when the other work of this process is paused.
    """
    device = detect()
    listed = hardware_of(device)
    if listed is not None:
        return listed
    name = _kept_under(device)
    stored = disk_cache.load_json(name, folder)
    if isinstance(stored, dict):
        cached = Hardware.from_mapping(stored["hardware"], name="this-cpu", where=f"the cached measurement {name}")
        if time.time() - stored.get("measured", 0) < MAX_AGE_S:
            return cached
    settle()
    measured = _measured_apart() if device.type == "cuda" else measure().to_hardware()
    disk_cache.store_json(name, {"measured": time.time(), "hardware": asdict(measured)}, folder)
    return measured


def _measured_apart() -> Hardware:
    """The hardware of this machine by a measurement in a new process: one that has used a GPU keeps some of its memory
    until it exits, and this process may run as long as a search.

    Raises:
        RunnerError: it failed, or timed out.
    """
    import subprocess
    import sys

    code = f"import json, dataclasses as d, {__name__} as m; print(json.dumps(d.asdict(m.measure().to_hardware())))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunnerError(f"measuring this machine took more than {LIMIT_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunnerError(f"measuring this machine failed: {last_line}")
    return Hardware.from_mapping(json.loads(lines[-1]), name="this-machine", where="a measurement")


def table_entry(device: Device) -> Hardware | None:
    """The table's entry for a detected GPU, by its marketing name and memory; None if there is none."""
    return recognise(device.name, device.memory_mib) if device.type == "cuda" else None


def hardware_of(device: Device) -> Hardware | None:
    """The table's entry for a detected GPU, with its own memory and number; None if there is none."""
    entry = table_entry(device)
    return entry and entry.replace(memory_gib=device.memory_mib / 1024, devices_per_node=max(1, device.count))


def _dtypes(device: Device) -> "dict[str, torch.dtype]":
    import torch

    if device.type == "cpu":
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return {"fp32": torch.float32, **{name: half[name] for name in sorted(device.features & set(half))}}
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    if (device.capability or (0, 0)) >= (8, 0):
        dtypes |= {"tf32": torch.float32, "bf16": torch.bfloat16}
    return dtypes


def _product(size: int, dtype: "torch.dtype", on_device: "torch.device", *, tf32: bool = False) -> Callable[[], object]:
    """Returns a call that computes a square product."""
    import torch

    left_operand = torch.randn(size, size, device=on_device).to(dtype)
    right_operand = torch.randn(size, size, device=on_device).to(dtype)
    product = torch.empty(size, size, device=on_device, dtype=dtype)

    def work() -> None:
        tf32_setting = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            torch.mm(left_operand, right_operand, out=product)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32_setting

    return work


def _copy(size: int, source: "torch.device", target: "torch.device") -> Callable[[], object]:
    """Returns a call that copies `size` bytes."""
    import torch

    original = torch.zeros(size, dtype=torch.uint8, device=source, pin_memory=source != target)
    copied = torch.empty(size, dtype=torch.uint8, device=target)
    return lambda: copied.copy_(original, non_blocking=True)


def _seconds(work: Callable[[], object]) -> float:
    """Time of a call that nothing disturbs: a low quantile, since other load makes a call longer, never shorter."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    times = timer.blocked_autorange(min_run_time=SECONDS).times
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]
