"""`redline.scale`: scaling of a training with the number of devices, tuned for each number."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import RedlineError, RunnerError, SpaceError, UsageError
from ..base.writing import write_atomic
from ..models import Workload
from ..models.request import TrainingRequest
from ..results.scaling import ScalePoint, Scaling
from .listener import SearchListener
from .result import Result
from .tuning import tune

if TYPE_CHECKING:
    from ..estimator.request import EstimateRequest

FARTHEST = 1024
"""Largest number of devices of predictions, for described hardware and for hardware with links to other nodes."""
_TRAINING = tuple(field.name for field in fields(TrainingRequest))


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
        out: folder for scale.csv, scale.svg and a subfolder with the run of each number of devices.
        listening: returns a context manager of the listener for the search on a number of devices.
        options: further arguments of `redline.tune`.

    Raises:
        RedlineError: the request is invalid for every number of devices; nothing was run.
    """
    if callable(target) and not isinstance(target, Workload):
        raise UsageError("redline.scale tunes a model or a command; a callable does not depend on devices")
    counts = counts_of(devices)
    batch_of = _batches(target, counts, global_batch, weak, options)
    folder = None if out is None else Path(out)
    points: list[ScalePoint] = []
    results: dict[int, Result] = {}
    refused: RedlineError | None = None
    for count in counts:
        run = None if folder is None else folder / f"devices-{count}"
        resume = bool(options.get("resume")) and run is not None and run.exists()
        try:
            with listening(count) as listener:
                result = tune(
                    target,
                    **{**options, "resume": resume},
                    devices=count,
                    global_batch=batch_of(count),
                    out=run,
                    listener=listener,
                )
        except RedlineError as error:
            refused = refused or error
            points.append(ScalePoint(devices=count, global_batch=batch_of(count), why=str(error)))
            continue
        results[count] = result
        points.append(_measured(count, batch_of(count), result))
        if result.interrupted:
            break
    if refused is not None and not results:
        raise refused
    scaling = Scaling(points=tuple(points), weak=weak, interrupted=any(r.interrupted for r in results.values()))
    _save(scaling, folder)  # the prediction may fail after hours of measurements
    if not scaling.interrupted and isinstance(target, (str, Path, Workload)):
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
        largest = _count(powers[2] or _present())
        values = [1 << exponent for exponent in range(largest.bit_length())]
    counts = sorted({_count(value) for value in values})
    if not counts:
        raise UsageError("devices must name at least one number of devices, such as 1,2,4 or pow2:64")
    return tuple(counts)


def _present() -> int:
    from ..base.device import detect

    return detect().count


def _count(value: Any) -> int:
    if (isinstance(value, str) and value.isdecimal()) or (isinstance(value, int) and not isinstance(value, bool)):
        if int(value) >= 1:
            return int(value)
    raise UsageError(f"devices must be numbers such as 1,2,4 or pow2:64, but got {value!r}")


def _batches(
    target: Any, counts: Sequence[int], requested: int | None, weak: bool, options: dict[str, Any]
) -> Callable[[int], int | None]:
    """Returns the global batch as a function of the number of devices.

    Raises:
        UsageError: it cannot grow in proportion.
    """
    batch = requested
    if batch is None and isinstance(target, (str, Path, Workload)):
        batch = _estimates(target, counts[0] if weak else counts[-1], None, options).global_batch
    if batch is None or not weak:
        return lambda count: batch
    per_device, remainder = divmod(batch, counts[0])
    if remainder:
        raise UsageError(
            f"a global batch of {batch} cannot grow from {counts[0]} devices: it must be a multiple of {counts[0]}"
        )
    return lambda count: per_device * count


def _save(scaling: Scaling, folder: Path | None) -> None:
    """Writes scale.csv and scale.svg into a folder, if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "scale.csv", scaling.csv().encode())
        write_atomic(folder / "scale.svg", scaling.svg().encode())


def _measured(count: int, batch: int | None, result: Result) -> ScalePoint:
    best, default = result.best, result.default
    point = ScalePoint(
        devices=count,
        global_batch=batch,
        default_throughput=default.throughput if default is not None else None,
        why=result.why,
    )
    if best is None:
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
    from .budget import parse_memory

    training = {name: options[name] for name in _TRAINING if name in options}
    return estimate_request(
        target,
        options.get("hardware"),
        memory_limit_mib=parse_memory(options.get("memory_limit")),
        like=like,
        **{**training, "devices": count, "global_batch": batch},
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

    tried = [point.devices for point in scaling.points]
    most = max(results)
    try:
        request = _estimates(target, most, batch_of(most), options)
        calibrated = request.estimator.calibrate(results[most].all_trials)
    except (UsageError, RunnerError) as error:  # the model cannot be traced, or the machine cannot be measured
        return replace(scaling, notes=(f"nothing is predicted: {error}",))
    farthest = predict_to or (tried[-1] if request.hardware.kind == "cpu" else max(tried[-1], FARTHEST))
    farther = [1 << exponent for exponent in range(farthest.bit_length()) if tried[-1] < 1 << exponent <= farthest]
    points = [*scaling.points, *(ScalePoint(devices=count, global_batch=batch_of(count)) for count in farther)]

    def with_prediction(point: ScalePoint) -> ScalePoint:
        try:
            point_request = _estimates(target, point.devices, point.global_batch, options, like=request)
        except (SpaceError, UsageError) as error:
            return replace(point, why=point.why or str(error))
        best = fastest(calibrated.on(point_request.estimator.training, point_request.hardware), point_request.space)
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

    return replace(scaling, points=tuple(map(with_prediction, points)))
