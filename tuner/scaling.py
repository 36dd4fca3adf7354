"""`redline.scale`: scaling of a model's training with the number of devices, tuned for each number."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import RedlineError, SpaceError, UsageError, WorkloadError
from ..base.writing import write_atomic
from ..models import Workload
from ..models.request import TrainingRequest
from ..results.scaling import ScalePoint, Scaling
from ..space import Space
from ..space.grammar import parse
from .listener import SearchListener
from .result import Result
from .tuning import tune

if TYPE_CHECKING:
    from ..estimator.request import EstimateRequest

FARTHEST = 1024
"""Largest number of devices of predictions, for described hardware and for hardware with links to other nodes."""
_TRAINING = tuple(each.name for each in fields(TrainingRequest))


def scale(
    target: Any,
    devices: Sequence[int] | str,
    *,
    global_batch: int | str | None = None,
    weak: bool = False,
    predict_to: int | None = None,
    stop_on_error: bool = False,
    out: str | Path | None = None,
    listening: Callable[[int], AbstractContextManager[SearchListener]] = lambda count: nullcontext(SearchListener()),
    **asked: Any,
) -> Scaling:
    """Tunes a model for several numbers of devices, and predicts the throughput of more devices.

    Every winner is compared with the default configuration, which each search measures first. Measurements correct the
    predictions.

    Args:
        target: as of `redline.tune`.
        devices: numbers of devices, or `pow2:64` for the powers of two up to 64.
        global_batch: samples of a step; an expression of `n`, such as `8*n`, if they grow with the devices.
        weak: let the global batch grow with the devices, from its value for the fewest devices.
        predict_to: largest number of devices of predictions; by default 1,024 on described hardware and on
            accelerators, otherwise the largest number that is tried.
        stop_on_error: stop at the first number of devices without a result.
        out: folder for scale.csv, scale.svg and a subfolder with the run of each number of devices.
        listening: returns a context manager of the listener for the search on a number of devices.
        asked: further arguments of `redline.tune`.

    Raises:
        RedlineError: the request is invalid for every number of devices; nothing was run.
    """
    counts = counts_of(devices)
    if isinstance(target, (str, Path)) or not callable(target) or isinstance(target, Workload):
        batch_of = _batches(target, counts, global_batch, weak, asked)
    else:
        raise UsageError("redline.scale tunes a model or a command; a callable does not depend on devices")
    folder = None if out is None else Path(out)
    points: list[ScalePoint] = []
    results: dict[int, Result] = {}
    refused: RedlineError | None = None
    for count in counts:
        own = None if folder is None else folder / f"devices-{count}"
        given = {**asked, "devices": count, "global_batch": batch_of(count), "out": own}
        given["resume"] = bool(asked.get("resume")) and own is not None and own.exists()
        try:
            with listening(count) as given["listener"]:
                result = tune(target, **given)
        except RedlineError as error:
            refused = refused or error
            points.append(ScalePoint(devices=count, global_batch=batch_of(count), why=str(error)))
        else:
            results[count] = result
            points.append(_measured(count, batch_of(count), result))
            if result.interrupted:
                break
        if stop_on_error and points[-1].why:
            break
    if refused is not None and not results:
        raise refused
    scaling = Scaling(points=tuple(points), weak=weak, interrupted=any(each.interrupted for each in results.values()))
    if not scaling.interrupted:
        scaling = _predicted(scaling, target, batch_of, predict_to, asked, results)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "scale.csv", scaling.csv().encode())
        write_atomic(folder / "scale.svg", scaling.svg().encode())
    return scaling


def counts_of(devices: Sequence[int] | str) -> tuple[int, ...]:
    """Numbers of devices, ascending.

    >>> counts_of("1,2,4"), counts_of("pow2:16")
    ((1, 2, 4), (1, 2, 4, 8, 16))

    Raises:
        UsageError: there are none, or one is not a number of devices.
    """
    found: Sequence[Any] = devices if not isinstance(devices, str) else [each.strip() for each in devices.split(",")]
    if isinstance(devices, str) and (name := devices.partition(":"))[0] == "pow2":
        last = _whole(name[2] or _present())
        found = [1 << i for i in range(last.bit_length())]
    counts = sorted({_whole(each) for each in found})
    if not counts:
        raise UsageError("devices must name at least one number of devices, such as 1,2,4 or pow2:64")
    return tuple(counts)


def _present() -> int:
    from ..base.device import detect

    return detect().count


def _whole(value: Any) -> int:
    if (isinstance(value, str) and value.isdecimal()) or (isinstance(value, int) and not isinstance(value, bool)):
        if int(value) >= 1:
            return int(value)
    raise UsageError(f"devices must be numbers such as 1,2,4 or pow2:64, but got {value!r}")


def _batches(
    target: Any, counts: Sequence[int], asked: int | str | None, weak: bool, rest: dict[str, Any]
) -> Callable[[int], int | None]:
    """Returns the global batch as a function of the number of devices.

    Raises:
        UsageError: the expression is malformed, or its value is not a number of samples.
    """
    if isinstance(asked, str) and not asked.strip().isdecimal():
        if weak:
            raise UsageError(
                f"weak scaling computes the global batch itself; leave it out, or give a number, not '{asked}'"
            )
        return lambda count: _evaluated(asked, count)
    number = None if asked is None else int(asked)
    if number is None and isinstance(target, (str, Path, Workload)):
        number = _estimates(target, counts[0] if weak else counts[-1], None, rest).global_batch
    if number is None or not weak:
        return lambda count: number
    each, left = divmod(number, counts[0])
    if left:
        raise UsageError(
            f"a global batch of {number} cannot grow from {counts[0]} devices: it must be a multiple of {counts[0]}"
        )
    return lambda count: each * count


def _evaluated(text: str, count: int) -> int:
    space = Space()
    try:
        value = parse(text, {"n": space.choice("n", [count])}).evaluate({"n": count})
    except SpaceError as error:
        raise UsageError(
            f"the global batch '{text}' is not an expression of n, the number of devices: {error}"
        ) from None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"the global batch '{text}' is {value!r} for n = {count}; it must be a whole number")
    return value


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


def _estimates(target: Any, count: int, batch: int | None, asked: dict[str, Any]) -> "EstimateRequest":
    from ..estimator.request import estimate_request
    from .budget import parse_memory

    given = {name: asked[name] for name in _TRAINING if name in asked}
    limit = parse_memory(asked.get("memory_limit"))
    given |= {"devices": count, "global_batch": batch}
    return estimate_request(target, asked.get("hardware"), memory_limit_mib=limit, **given)


def _predicted(
    scaling: Scaling,
    target: Any,
    batch_of: Callable[[int], int | None],
    predict_to: int | None,
    asked: dict[str, Any],
    results: dict[int, Result],
) -> Scaling:
    """Adds predictions to the points, and points of more devices."""
    if not isinstance(target, (str, Path, Workload)):
        return scaling
    tried = [each.devices for each in scaling.points]
    most = next((count for count in reversed(tried) if count in results), tried[-1])
    try:
        request = _estimates(target, most, batch_of(most), asked)
        known = request.estimator.calibrate(results[most].all_trials) if most in results else request.estimator
        last = predict_to or (tried[-1] if request.hardware.kind == "cpu" else max(tried[-1], FARTHEST))
        farther = [1 << i for i in range(last.bit_length()) if tried[-1] < 1 << i <= last]
        points = [*scaling.points, *(ScalePoint(devices=each, global_batch=batch_of(each)) for each in farther)]
        return replace(scaling, points=tuple(_with_prediction(each, target, asked, known) for each in points))
    except WorkloadError as error:
        return replace(scaling, notes=(f"nothing is predicted: {error}",))


def _with_prediction(point: ScalePoint, target: Any, asked: dict[str, Any], known: Any) -> ScalePoint:
    from ..estimator.survey import survey

    try:
        request = _estimates(target, point.devices, point.global_batch, asked)
    except (SpaceError, UsageError) as error:
        return replace(point, why=point.why or str(error))
    found = survey(known.on(request.estimator.training, request.hardware), request.space, top=1).best
    if not found:
        return replace(point, why=point.why or "no configuration is predicted to fit")
    estimate = found[0].estimate
    units = estimate.throughput * estimate.step_ms
    return replace(
        point,
        unit=point.unit or estimate.unit,
        config=point.config or found[0].config.to_dict(),
        predicted_throughput=estimate.throughput,
        predicted_low=units / estimate.step_ms_high,
        predicted_high=units / estimate.step_ms_low,
    )
