"""`redline.scale`: scaling of a training with the number of devices, tuned for each number."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import RedlineError, RunnerError, SpaceError, UsageError
from ..base.writing import write_atomic
from ..knobs.text import config_text
from ..models import Workload
from ..models.request import TrainingRequest
from .budget import parse_memory
from .listener import SearchListener
from .result import Result
from .tuning import tune

if TYPE_CHECKING:
    import pandas as pd

    from ..estimator.request import EstimateRequest

FARTHEST = 1024
"""Largest number of devices of predictions, for described hardware and for hardware with links to other nodes."""
_TRAINING = tuple(member.name for member in fields(TrainingRequest))


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
    predicted_throughput: float | None = None
    """Throughput of the best configuration by the estimate, corrected by measurements."""
    predicted_low: float | None = None
    """Lower end of its 80 % interval."""
    predicted_high: float | None = None
    """Upper end of its 80 % interval."""
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration of the winner, or the predicted one if none was measured."""
    why: str = ""
    """Why nothing was found; empty if a winner was found or nothing was tried."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The result of `redline.scale`."""

    points: tuple[ScalePoint, ...]
    """By number of devices, the fewest first."""
    weak: bool = False
    """True if the global batch grows with the devices."""
    interrupted: bool = False
    """True if it was interrupted."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def measured(self) -> tuple[ScalePoint, ...]:
        """The points with a measured winner."""
        return tuple(point for point in self.points if point.throughput is not None)

    @property
    def table(self) -> "pd.DataFrame":
        """A row per point, as in scale.csv: the fields of `ScalePoint`, and `speed_up`, `efficiency` and
        `predicted_efficiency` relative to the fewest measured devices; an efficiency of 1 means that every device adds as much as
        the first ones.
        """
        import pandas as pd

        table = pd.DataFrame([asdict(point) for point in self.points]).astype({"global_batch": "Int64"})
        speeds, predictions = table.throughput.astype(float), table.predicted_throughput.astype(float)
        measured = speeds.first_valid_index()
        predicted = predictions.where(speeds.notna()).first_valid_index()
        if predicted is None:
            predicted = predictions.first_valid_index()

        def relative(values: "pd.Series[float]", base: Any) -> "pd.Series[float]":
            return values / (math.nan if base is None else values[base])

        table["speed_up"] = relative(speeds, measured)
        table["efficiency"] = relative(speeds / table.devices, measured)
        table["predicted_efficiency"] = relative(predictions / table.devices, predicted)
        return table

    def csv(self) -> str:
        """Returns the text of scale.csv. Configurations are written as `knob=value` pairs."""
        table = self.table
        return str(table.assign(config=table.config.map(config_text)).to_csv(index=False, float_format="%.9g"))

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready summary."""
        table = self.table.astype(object)
        points = table.where(table.notna(), None).to_dict("records")
        return {"weak": self.weak, "interrupted": self.interrupted, "notes": list(self.notes), "points": points}


def scale(
    target: Any,
    devices: Sequence[int] | str,
    *,
    global_batch: int | None = None,
    weak: bool = False,
    predict_to: int | None = None,
    out: str | Path | None = None,
    listening: Callable[[int], AbstractContextManager[SearchListener]] = lambda count: nullcontext(SearchListener()),
    **options: Any,
) -> Scaling:
    """Tunes a model for several numbers of devices, and predicts the throughput of more devices.

    Every winner is compared with the default configuration, which each search measures first. The trials on the most
    devices correct the predictions.

    Args:
        target: as of `redline.tune`, except for a callable.
        devices: numbers of devices, or `pow2:64` for the powers of two up to 64.
        global_batch: samples of a step.
        weak: let the global batch grow with the devices, from its value for the fewest devices.
        predict_to: largest number of devices of predictions; by default 1,024 on described hardware and on
            accelerators, otherwise the largest number that is tried.
        out: folder for scale.csv and a subfolder with the run of each number of devices.
        listening: returns a context manager of the listener for the search on a number of devices.
        options: further arguments of `redline.tune`.

    Raises:
        RedlineError: the request is invalid for every number of devices; nothing was run.
    """
    if callable(target) and not isinstance(target, Workload):
        raise UsageError("redline.scale tunes a model or a command; a callable does not depend on devices")
    counts = counts_of(devices)
    is_traced = isinstance(target, (str, Path, Workload))
    batch = global_batch
    if batch is None and is_traced:
        batch = _estimates(target, counts[0] if weak else counts[-1], None, options).global_batch
    if weak and batch is not None and batch % counts[0]:
        raise UsageError(
            f"a global batch of {batch} cannot grow from {counts[0]} devices: it must be a multiple of {counts[0]}"
        )

    def batch_of(count: int) -> int | None:
        return batch // counts[0] * count if weak and batch is not None else batch

    folder = None if out is None else Path(out)
    points: list[ScalePoint] = []
    results: dict[int, Result] = {}
    refused: RedlineError | None = None
    for count in counts:
        run = None if folder is None else folder / f"devices-{count}"
        resume = bool(options.get("resume")) and run is not None and run.exists()
        search = {**options, "resume": resume, "devices": count, "global_batch": batch_of(count), "out": run}
        try:
            with listening(count) as listener:
                results[count] = tune(target, **search, listener=listener)
        except RedlineError as error:
            refused = refused or error
            points.append(ScalePoint(devices=count, global_batch=batch_of(count), why=str(error)))
            continue
        points.append(_measured(count, batch_of(count), results[count]))
        if results[count].interrupted:
            break
    if refused is not None and not results:
        raise refused
    scaling = Scaling(points=tuple(points), weak=weak, interrupted=any(r.interrupted for r in results.values()))
    _save(scaling, folder)  # the prediction may fail after hours of measurements
    if is_traced and not scaling.interrupted:
        scaling = _predicted(scaling, target, batch_of, predict_to, options, results)
        _save(scaling, folder)
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


def _save(scaling: Scaling, folder: Path | None) -> None:
    """Writes scale.csv into a folder, if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "scale.csv", scaling.csv().encode())


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


def _estimates(
    target: Any, count: int, batch: int | None, options: dict[str, Any], like: "EstimateRequest | None" = None
) -> "EstimateRequest":
    from ..estimator.request import estimate_request

    training = {name: options[name] for name in _TRAINING if name in options}
    limit_mib = parse_memory(options.get("memory_limit"))
    sizes = {"devices": count, "global_batch": batch}
    return estimate_request(
        target, options.get("hardware"), memory_limit_mib=limit_mib, like=like, **{**training, **sizes}
    )


def _predicted(
    scaling: Scaling,
    target: str | Path | Workload,
    batch_of: Callable[[int], int | None],
    predict_to: int | None,
    options: dict[str, Any],
    results: dict[int, Result],
) -> Scaling:
    """Adds predictions to the points, and points of more devices."""
    from ..estimator.plans import fastest

    largest, most = scaling.points[-1].devices, max(results)
    try:
        request = _estimates(target, most, batch_of(most), options)
        calibrated = request.estimator.calibrate(results[most].all_trials)
    except (UsageError, RunnerError) as error:  # the model cannot be traced, or the machine cannot be measured
        return replace(scaling, notes=(f"nothing is predicted: {error}",))
    farthest = predict_to or (largest if request.hardware.kind == "cpu" else max(largest, FARTHEST))
    farther = [1 << exponent for exponent in range(farthest.bit_length()) if largest < 1 << exponent <= farthest]

    def with_prediction(point: ScalePoint) -> ScalePoint:
        try:
            at_count = _estimates(target, point.devices, point.global_batch, options, like=request)
        except (SpaceError, UsageError) as error:
            return replace(point, why=point.why or str(error))
        best = fastest(calibrated.on(at_count.estimator.training, at_count.hardware), at_count.space)
        if best is None:
            return replace(point, why=point.why or "no configuration is predicted to fit")
        estimate = best.estimate
        units_per_step = estimate.throughput * estimate.step_ms
        return replace(
            point,
            unit=point.unit or estimate.unit,
            config=point.config or best.config.to_dict(),
            predicted_throughput=estimate.throughput,
            predicted_low=units_per_step / estimate.step_ms_high,
            predicted_high=units_per_step / estimate.step_ms_low,
        )

    points = [*scaling.points, *(ScalePoint(devices=count, global_batch=batch_of(count)) for count in farther)]
    return replace(scaling, points=tuple(map(with_prediction, points)))
