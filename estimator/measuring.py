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

SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of the square products that are timed."""
SHORT_SIZES = {"cpu": (768,), "cuda": (8192,)}
"""Sides in the short measurement."""
COPY_BYTES = {"cpu": 64 * 1024**2, "cuda": 1024**3}
"""Bytes of the copied tensor; it exceeds the caches."""
SECONDS = 0.15
"""Time for each number of the short measurement."""
WINDOWS = 5
"""Number of windows that this time is divided into. The measurements alternate, so that a short disturbance does not affect all
windows of one."""
UNDISTURBED = 0.9
"""Share of a call's time on its thread from which the call counts as undisturbed."""
LEAST_CALLS = 4
"""Undisturbed calls without which a CPU counts as busy."""
SHORT_S = 120
"""Limit on the duration of a short measurement in a process of its own, s."""
MAX_AGE_S = 30 * 24 * 3600
"""Age after which a cached measurement is repeated, s."""
BUSY_AGE_S = 600
"""The same for a measurement of a busy CPU, s."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of this machine."""

    device: Device
    tflops: Mapping[str, Mapping[int, float]]
    """Rate of square products by dtype and side, 1e12 FLOP/s."""
    memory_gb_per_s: float
    """Bytes read and written in a copy, 1e9 bytes/s."""
    host_gb_per_s: float | None = None
    """Between host and device, 1e9 bytes/s; None on a CPU."""
    busy: bool = False
    """True if other processes interrupted nearly all calls on a CPU."""

    @property
    def note(self) -> str:
        """Remarks on the measurement; empty for none."""
        busy = f"{self.device.name} was measured while other processes used its cores, so that its rates may be too low"
        return busy if self.busy else ""

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
            tflops={name: round(max(rates.values()), 5) for name, rates in self.tflops.items() if rates},
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
            note=self.note,
        )  # fmt: skip


def measure(*, short: bool = False) -> Measured:
    """Measures this machine: takes a second or two if `short`, with the largest product and a copy only, otherwise several."""
    device = detect()
    kind = device.type
    seconds_of_calls, busy = _measured(device, short, SECONDS if short else 3 * SECONDS)
    tflops: dict[str, dict[int, float]] = {}
    for (name, size), taken in seconds_of_calls.items():
        if name not in ("copy", "host"):
            tflops.setdefault(name, {})[size] = max(SLOWEST_TFLOPS, 2 * size**3 / taken / 1e12)
    size = COPY_BYTES[kind]
    memory_gb_per_s = max(SLOWEST_GB_PER_S, 2 * size / seconds_of_calls["copy", size] / 1e9)  # read and written
    return Measured(
        device=device,
        tflops=tflops,
        memory_gb_per_s=memory_gb_per_s,
        host_gb_per_s=size // 4 / seconds_of_calls["host", size // 4] / 1e9 if kind == "cuda" else None,
        busy=busy,
    )


def _measured(device: Device, short: bool, seconds: float) -> tuple[dict[tuple[str, int], float], bool]:
    """Seconds of a product of each (dtype, side) and of a copy of each (`copy` or `host`, bytes), and True if other processes
    interrupted nearly all calls of one of them."""
    import torch

    kind = device.type
    on_device = torch.device(kind)
    works: dict[tuple[str, int], Callable[[], object]] = {}
    for name, dtype in _dtypes(device).items():
        for size in (SHORT_SIZES if short else SIZES)[kind]:
            works[name, size] = _product(size, dtype, on_device, tf32=name == "tf32")
    works["copy", COPY_BYTES[kind]] = _copy(COPY_BYTES[kind], on_device, on_device)
    if kind == "cuda":
        works["host", COPY_BYTES[kind] // 4] = _copy(COPY_BYTES[kind] // 4, torch.device("cpu"), on_device)
    taken = {name: _undisturbed(calls, kind == "cpu") for name, calls in _timed(works, on_device, seconds).items()}
    return {name: wall for name, (wall, _) in taken.items()}, any(busy for _, busy in taken.values())


def _kept_under(device: Device) -> Path:
    from ..models.fingerprint import digest

    identity = {"device": device.to_dict(), "cores": usable_cores(), "version": disk_cache.VERSION}
    return Path("hardware", f"{digest(identity)}.json")


def this_machine(folder: Path | None = None, settle: Callable[[], None] = lambda: None) -> Hardware:
    """The hardware of this machine: its GPUs' entry in the table, or a short measurement, cached.

    On a CPU the rate is that of all cores this process may use. A measurement is repeated after 30 days, if the cores or the
    memory have changed, and after ten minutes if other processes kept the cores busy; `note` then states this.

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
        if time.time() - stored.get("measured", 0) < (BUSY_AGE_S if cached.note else MAX_AGE_S):
            return cached
    settle()
    measured = _measured_apart() if device.type == "cuda" else measure(short=True).to_hardware()
    disk_cache.store_json(name, {"measured": time.time(), "hardware": asdict(measured)}, folder)
    return measured


def _measured_apart() -> Hardware:
    """The hardware of this machine by a short measurement in a new process: one that has used a GPU keeps some of its memory
    until it exits, and this process may run as long as a search.

    Raises:
        RunnerError: it failed, or timed out.
    """
    import subprocess
    import sys

    code = f"import json, dataclasses as d, {__name__} as m; print(json.dumps(d.asdict(m.measure(short=True).to_hardware())))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SHORT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunnerError(f"measuring this machine took more than {SHORT_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunnerError(f"measuring this machine failed: {last_line}")
    return Hardware.from_mapping(json.loads(lines[-1]), name="this-machine", where="a short measurement")


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


def _timed(
    works: Mapping[tuple[str, int], Callable[[], object]], on_device: "torch.device", seconds: float
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Seconds of calls of each, and those of the calling thread; each is called for the given time in total."""
    import torch

    def once(work: Callable[[], object]) -> tuple[float, float]:
        if on_device.type == "cuda":
            torch.cuda.synchronize(on_device)
        begin, busy = time.perf_counter(), time.thread_time()
        work()
        if on_device.type == "cuda":
            torch.cuda.synchronize(on_device)
        return time.perf_counter() - begin, time.thread_time() - busy

    taken: dict[tuple[str, int], list[tuple[float, float]]] = {name: [] for name in works}
    for work in works.values():
        once(work)
    for _ in range(WINDOWS):
        for name, work in works.items():
            end = time.perf_counter() + seconds / WINDOWS
            taken[name].append(once(work))
            while time.perf_counter() < end and len(taken[name]) < 200:
                taken[name].append(once(work))
    return taken


def _undisturbed(calls: list[tuple[float, float]], on_cpu: bool) -> tuple[float, bool]:
    """Undisturbed time of a call, from (seconds, seconds of its thread) of several, and True if too few were undisturbed.

    Other load makes a call longer, never shorter, so a low quantile shows the machine's speed: of the calls whose thread hardly
    waited, if there are any.
    """
    undisturbed = [wall for wall, busy in calls if not on_cpu or busy >= UNDISTURBED * wall]
    if len(undisturbed) >= LEAST_CALLS:
        return statistics.quantiles(undisturbed, n=4)[0], False
    return min(undisturbed or [wall for wall, _ in calls]), on_cpu
