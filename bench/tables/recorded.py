"""Recorded tables, on which search methods are tested without a device.

A table is a CSV with a row for each configuration that was run, and a YAML beside it with model, training and
hardware. Columns that are not results are knobs; `status` is `ok`, `oom`, `crash`, `timeout` or `failed` (the cause
was not recorded). The objective is the first one present of `throughput`, `tokens_per_second`, `samples_per_second`
and `step_ms` (lower is better).
"""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from redline.base.errors import UsageError
from redline.knobs.strategy import STANDARD
from redline.results import Measurement, Status
from redline.space import Config, Space

OBJECTIVES = ("throughput", "tokens_per_second", "samples_per_second", "step_ms")
RESULTS = {
    *OBJECTIVES, "status", "reason", "unit", "peak_memory_gib", "peak_memory_mib", "memory_limit_mib", "mfu_percent", "mfu",
    "step_ms_spread", "seconds_total", "measured", "loss", "trial",
}  # fmt: skip


INDEX = "tables.csv"


@dataclass(frozen=True)
class Surface:
    """A recorded table."""

    name: str
    space: Space
    """A space whose valid set is exactly the rows."""
    rows: Mapping[Config, Measurement]
    """The result of each configuration."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The YAML beside the table; empty without one."""
    path: Path | None = None
    """The file of the table."""

    @property
    def best(self) -> float | None:
        """The highest recorded throughput; None if every row failed."""
        return max((each.reached for each in self.rows.values() if each.ok), default=None)

    @property
    def causes_known(self) -> bool:
        """True if failures are recorded with their cause, so that an OOM is certain."""
        return not any(each.reason.startswith("cause not recorded") for each in self.rows.values())


def read_folder(folder: str | Path) -> list[Surface]:
    """Returns every table in a folder by name. A file `tables.csv` is an index of the others.

    Raises:
        UsageError: there is none, or one cannot be read.
    """
    paths = [path for path in sorted(Path(folder).glob("*.csv")) if path.name != INDEX]
    if not paths:
        raise UsageError(f"there is no table (*.csv) in '{folder}'")
    return [read_surface(path) for path in paths]


def read_surface(path: str | Path) -> Surface:
    """Returns the table in a CSV file.

    Raises:
        UsageError: it has no rows, no objective, an unknown status, or a configuration twice; or the YAML beside it is
            not a mapping.
    """
    path = Path(path)
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    if not table:
        raise UsageError(f"'{path}' has no rows")
    objective = next((name for name in OBJECTIVES if name in table[0]), None)
    if objective is None:
        raise UsageError(f"'{path}' has no objective; it needs one of the columns {', '.join(OBJECTIVES)}")
    beside = path.with_suffix(".yaml")
    facts = (yaml.safe_load(beside.read_text()) if beside.is_file() else None) or {}
    if not isinstance(facts, dict):
        raise UsageError(f"'{beside}' should hold a mapping and holds a {type(facts).__name__}")
    names = [name for name in table[0] if name not in RESULTS and not name.startswith("seconds_")]
    points = [{name: _value(row[name]) for name in names} for row in table]
    limit = _limit_mib(facts)
    space = _space(points)
    rows: dict[Config, Measurement] = {}
    for number, (point, row) in enumerate(zip(points, table), 2):
        config = space.config(point)
        if config in rows:
            raise UsageError(f"'{path}', line {number}: {point} is there twice")
        rows[config] = _measurement(row, point, objective, limit, f"'{path}', line {number}")
    return Surface(name=path.stem, space=space, rows=rows, facts=facts, path=path)


def _value(text: str) -> Any:
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()


def _space(points: list[dict[str, Any]]) -> Space:
    """Returns the space of exactly these points; replicas and accumulation are derived if they follow from other knobs."""
    space = Space()
    names = list(points[0])
    derived = {}
    if {"tp", "pp", "dp"} <= set(names):
        counts = {p["tp"] * p["pp"] * p["dp"] for p in points}
        if len(counts) == 1 and "gpus" not in names:
            derived["dp"] = f"{counts.pop()} // (tp * pp)"
    if {"micro_batch", "dp", "grad_accum"} <= set(names):
        batches = {p["micro_batch"] * p["dp"] * p["grad_accum"] for p in points}
        if len(batches) == 1:
            derived["grad_accum"] = f"{batches.pop()} // (micro_batch * dp)"
    free = [name for name in names if name not in derived]
    for name in free:
        values = list(dict.fromkeys(p[name] for p in points))
        try:
            values.sort()
        except TypeError:
            values.sort(key=str)
        if all(isinstance(value, bool) for value in values) and len(values) == 2:
            space.flag(name)
        else:
            space.choice(name, values, monotone_memory=STANDARD[name].memory if name in STANDARD else 0)
    for name, text in derived.items():
        space.derive(name, text)
    space.require_one_of([{name: point[name] for name in free} for point in points], "recorded in the table")
    return space


def _measurement(
    row: Mapping[str, str], point: Mapping[str, Any], objective: str, limit: float | None, where: str
) -> Measurement:
    status = row.get("status", "ok") or "ok"
    peak = _float(row.get("peak_memory_mib"))
    if peak is None and (gib := _float(row.get("peak_memory_gib"))) is not None:
        peak = gib * 1024
    limit = _float(row.get("memory_limit_mib")) or limit
    made = partial(
        Measurement,
        peak_memory_mib=peak,
        memory_limit_mib=limit,
        seconds_total=_float(row.get("seconds_total")),
    )
    if status == "failed":
        # Most of these are out of memory, so that the search receives that.
        return made(status=Status.OOM, reason="cause not recorded")
    if status not in {*Status}:
        raise UsageError(f"{where}: the status must be ok, failed, oom, crash or timeout, but got '{status}'")
    if status != Status.OK:
        return made(status=Status(status), reason=row.get("reason") or "as recorded")
    value = _float(row[objective])
    if value is None or value <= 0:
        raise UsageError(f"{where}: {objective} must be a positive number where the status is ok")
    if objective == "step_ms":
        rate = 1000.0 / value * float(point.get("global_batch", 1))
        return made(status=Status.OK, throughput=rate, unit="samples/s", step_ms=value)
    unit = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}.get(objective, row.get("unit") or "")
    return made(status=Status.OK, throughput=value, unit=unit)


def _float(text: str | None) -> float | None:
    if text is None or not text.strip():
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def _limit_mib(facts: Mapping[str, Any]) -> float | None:
    """Returns the memory of a device from the name of the hardware, such as `h100-80gb-sxm`, or from `memory_limit_mib`."""
    hardware = facts.get("hardware") or {}
    if hardware.get("memory_limit_mib"):
        return float(hardware["memory_limit_mib"])
    found = re.search(r"(\d+)gb", str(hardware.get("device", "")), re.IGNORECASE)
    return float(found[1]) * 1024 if found else None
