"""`redline.scale`: scaling of a training with the number of devices, tuned for each number."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import RedlineError, UsageError
from ..base.writing import write_atomic
from ..knobs.text import config_text
from ..models import Workload
from ..models.resolve import workload
from ..models.samples import shared
from .listener import SearchListener
from .result import Result
from .tuning import tune

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The results for one number of devices."""

    devices: int
    global_batch: int | None = None
    """Samples per optimizer step."""
    throughput: float | None = None
    """Throughput of the winner over all devices; None if none was measured."""
    unit: str = ""
    """Unit of all throughputs."""
    peak_memory_mib: float | None = None
    """Peak memory of the winner's fullest rank, MiB."""
    default_throughput: float | None = None
    """Throughput of the default configuration, which a trainer runs without tuning."""
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration of the winner."""
    why: str = ""
    """Why nothing was found; empty if a winner was found."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The result of `redline.scale`."""

    points: tuple[ScalePoint, ...]
    """By number of devices, the fewest first."""
    weak: bool = False
    """True if the global batch grows with the devices."""
    interrupted: bool = False
    """True if it was interrupted."""

    @property
    def measured(self) -> tuple[ScalePoint, ...]:
        """The points with a measured winner."""
        return tuple(point for point in self.points if point.throughput is not None)

    @property
    def table(self) -> "pd.DataFrame":
        """A row per point, as in scale.csv: the fields of `ScalePoint`, and `speed_up` and `efficiency` relative to the fewest
        measured devices; an efficiency of 1 means that every device adds as much as the first ones.
        """
        import pandas as pd

        table = pd.DataFrame([asdict(point) for point in self.points]).astype({"global_batch": "Int64"})
        speeds = table.throughput.astype(float)
        first: Any = speeds.first_valid_index()
        table["speed_up"] = speeds / (math.nan if first is None else speeds[first])
        table["efficiency"] = table.speed_up / (table.devices / (1 if first is None else table.devices[first]))
        return table

    def csv(self) -> str:
        """Returns the text of scale.csv. Configurations are written as `knob=value` pairs."""
        table = self.table
        return str(table.assign(config=table.config.map(config_text)).to_csv(index=False, float_format="%.9g"))

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready summary."""
        table = self.table.astype(object)
        points = table.where(table.notna(), None).to_dict("records")
        return {"weak": self.weak, "interrupted": self.interrupted, "points": points}


def scale(
    target: Any,
    devices: Sequence[int] | str,
    *,
    global_batch: int | None = None,
    weak: bool = False,
    out: str | Path | None = None,
    listening: Callable[[int], AbstractContextManager[SearchListener]] = lambda count: nullcontext(SearchListener()),
    **options: Any,
) -> Scaling:
    """Tunes a model for several numbers of devices.

    Every winner is compared with the default configuration, which each search measures first.

    Args:
        target: as of `redline.tune`, except for a callable.
        devices: numbers of devices, or `pow2:64` for the powers of two up to 64.
        global_batch: samples of a step.
        weak: let the global batch grow with the devices, from its value for the fewest devices.
        out: folder for scale.csv and a subfolder with the run of each number of devices.
        listening: returns a context manager of the listener for the search on a number of devices.
        options: further arguments of `redline.tune`.

    Raises:
        RedlineError: the request is invalid for every number of devices; nothing was run.
    """
    if callable(target) and not isinstance(target, Workload):
        raise UsageError("redline.scale tunes a model or a command; a callable does not depend on devices")
    counts = counts_of(devices)
    batch = global_batch
    if batch is None and isinstance(target, (str, Path, Workload)):
        batch = _default_batch(target, counts[0] if weak else counts[-1], options)
    if weak and batch is not None and batch % counts[0]:
        raise UsageError(
            f"a global batch of {batch} cannot grow from {counts[0]} devices: it must be a multiple of {counts[0]}"
        )

    def batch_of(count: int) -> int | None:
        return batch // counts[0] * count if weak and batch is not None else batch

    folder = None if out is None else Path(out)
    points: list[ScalePoint] = []
    results: list[Result] = []
    refused: RedlineError | None = None
    for count in counts:
        run = None if folder is None else folder / f"devices-{count}"
        resume = bool(options.get("resume")) and run is not None and run.exists()
        search = {**options, "resume": resume, "devices": count, "global_batch": batch_of(count), "out": run}
        try:
            with listening(count) as listener:
                results.append(tune(target, **search, listener=listener))
        except RedlineError as error:
            refused = refused or error
            points.append(ScalePoint(devices=count, global_batch=batch_of(count), why=str(error)))
            continue
        points.append(_measured(count, batch_of(count), results[-1]))
        if results[-1].interrupted:
            break
    if refused is not None and not results:
        raise refused
    scaling = Scaling(points=tuple(points), weak=weak, interrupted=any(r.interrupted for r in results))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "scale.csv", scaling.csv().encode())
    return scaling


def counts_of(devices: Sequence[int] | str) -> tuple[int, ...]:
    """Returns the numbers of devices, ascending.

    >>> counts_of("1,2,4"), counts_of("pow2:16")
    ((1, 2, 4), (1, 2, 4, 8, 16))

    Raises:
        UsageError: there are none, or one is not a number of devices.
    """
    values: Sequence[Any] = devices if not isinstance(devices, str) else [item.strip() for item in devices.split(",")]
    if isinstance(devices, str) and (powers := devices.partition(":"))[0] == "pow2":
        from ..base.device import detect

        largest = _count(powers[2] or detect().count)
        values = [1 << exponent for exponent in range(largest.bit_length())]
    counts = sorted({_count(value) for value in values})
    if not counts:
        raise UsageError("devices must name at least one number of devices, such as 1,2,4 or pow2:64")
    return tuple(counts)


def _count(value: Any) -> int:
    if (isinstance(value, str) and value.isdecimal()) or (isinstance(value, int) and not isinstance(value, bool)):
        if int(value) >= 1:
            return int(value)
    raise UsageError(f"devices must be numbers such as 1,2,4 or pow2:64, but got {value!r}")


def _measured(count: int, batch: int | None, result: Result) -> ScalePoint:
    default = result.default.throughput if result.default is not None else None
    point = ScalePoint(devices=count, global_batch=batch, default_throughput=default, why=result.why)
    if (best := result.best) is None:
        return point
    return replace(
        point,
        throughput=best.throughput,
        unit=best.measurement.unit,
        peak_memory_mib=best.measurement.peak_memory_mib,
        config=best.config.to_dict(),
    )


def _default_batch(target: str | Path | Workload, devices: int, options: dict[str, Any]) -> int | None:
    """Returns the samples of a step that a model has by default on a number of devices; None if `grad_accum` is given in their
    place.
    """
    trained = workload(target, seq_len=options.get("seq_len"), lora=options.get("lora"))
    if any("grad_accum" in (options.get(name) or {}) for name in ("fix", "override")):
        return None
    return shared(trained, devices, target=target, requested=None)[0].global_batch
