"""`redline.scale`: scaling of a model's training with the number of devices, tuned or planned for each number."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import RedlineError, RunnerError, SpaceError, UsageError
from ..base.reading import path_of
from ..base.writing import write_atomic
from ..models import Workload
from ..models.request import TrainingRequest
from ..results import Trial, View, summary
from ..results.names import holds_run
from ..results.scaling import ScalePoint, Scaling
from ..space import Config, Space
from ..space.grammar import parse
from .listener import SearchListener
from .planning import COMPUTED
from .result import Result
from .trainer_baseline import measured as trainer_measured, predicted as trainer_predicted
from .tuning import tune

if TYPE_CHECKING:
    from ..estimator import Estimator
    from ..estimator.request import EstimateRequest

TRAINER = "trainer"
"""Value of `baseline` that compares with `transformers.Trainer`."""
PLANNED_TRIALS = 2
"""Trials for a number of devices for which a run's winner is planned again: the default configuration and the plan."""
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
    baseline: str | None = None,
    listening: Callable[[int], AbstractContextManager[SearchListener]] = lambda count: nullcontext(SearchListener()),
    **options: Any,
) -> Scaling:
    """Tunes a model for several numbers of devices, and predicts the throughput of more devices.

    Every winner is compared with the default configuration, which each search measures first. Measurements correct the
    predictions. With the folder of a run as target, nothing is searched: its winner is planned again for each number of devices,
    by the estimate that its trials correct, with the same number format, and the plan is measured beside the default
    configuration. The run's own number of devices has its measurements.

    Args:
        target: as of `redline.tune`, or the folder of a run of a model.
        devices: numbers of devices, or `pow2:64` for the powers of two up to 64.
        global_batch: samples of a step; an expression of `n`, such as `8*n`, if they grow with the devices.
        weak: let the global batch grow with the devices, from its value for the fewest devices.
        predict_to: largest number of devices of predictions; by default 1,024 on described hardware and on
            accelerators, otherwise the largest number that is tried.
        stop_on_error: stop at the first number of devices without a result.
        out: folder for scale.csv, scale.svg and a subfolder with the run of each number of devices.
        baseline: `trainer` also compares with `transformers.Trainer` and its default settings: measured where devices are,
            predicted where they are described or more than there are. Other values: as of `redline.tune`.
        listening: returns a context manager of the listener for the search on a number of devices.
        options: further arguments of `redline.tune`.

    Raises:
        RedlineError: the request is invalid for every number of devices; nothing was run.
    """
    counts = counts_of(devices)
    run = _Run.read(target) if isinstance(target, (str, Path)) and holds_run(path_of(target)) else None
    if run is not None:
        target, options, global_batch = run.target, run.options(options), global_batch or run.global_batch
    if baseline != TRAINER:
        options["baseline"] = baseline
    elif not isinstance(target, (str, Path, Workload)):
        raise UsageError(
            f"baseline={TRAINER} trains a model by transformers.Trainer, and cannot be compared with a command"
        )
    if isinstance(target, (str, Path)) or not callable(target) or isinstance(target, Workload):
        batch_of = _batches(target, counts if run is None else (run.devices,), global_batch, weak, options)
    else:
        raise UsageError("redline.scale tunes a model or a command; a callable does not depend on devices")
    folder = None if out is None else Path(out)
    points: list[ScalePoint] = []
    results: dict[int, Result] = {}
    refused: RedlineError | None = None
    for count in counts:
        own = None if folder is None else folder / f"devices-{count}"
        given = {**options, "devices": count, "global_batch": batch_of(count), "out": own}
        if run is not None and run.measured(count, batch_of(count)):
            points.append(run.point(batch_of(count)))
            continue
        given["resume"] = bool(options.get("resume")) and own is not None and own.exists()
        try:
            if run is not None:
                given["begin_with"] = run.planned(target, count, batch_of(count), options)
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
    if refused is not None and not results and run is None:
        raise refused
    scaling = Scaling(points=tuple(points), weak=weak, interrupted=any(each.interrupted for each in results.values()))
    if not scaling.interrupted:
        known = {count: result.all_trials for count, result in results.items()}
        known |= {} if run is None else {run.devices: run.trials}
        _save(scaling, folder)  # the prediction may fail after hours of measurements
        scaling = _predicted(scaling, target, batch_of, predict_to, options, known, trainer=baseline == TRAINER)
    _save(scaling, folder)
    return scaling


def _save(scaling: Scaling, folder: Path | None) -> None:
    """Writes scale.csv and scale.svg into a folder, if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "scale.csv", scaling.csv().encode())
        write_atomic(folder / "scale.svg", scaling.svg().encode())


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run of a model, whose winner is planned for other numbers of devices."""

    target: str
    devices: int
    global_batch: int | None
    winner: Trial
    default: Trial | None
    trials: tuple[Trial, ...]
    given: dict[str, Any]
    """Arguments of `redline.tune` that describe its training and its devices."""

    @staticmethod
    def read(folder: str | Path) -> "_Run":
        """Reads the run of a folder.

        Raises:
            StudyError: the folder has no run.
            UsageError: the run has no winner, or did not train a model that can be found again.
        """
        view = View(folder, Config)
        trials = [trial for trial in view.trials() if not trial.pending]
        asked = (view.document or {}).get("asked") or {}
        winner, what, used = summary.best(trials), asked.get("workload") or {}, asked.get("devices") or {}
        if winner is None:
            raise UsageError(f"the run in '{folder}' has no winner to plan again: {summary.why_nothing(trials)}")
        if not what.get("spec") or "command" in what:
            raise UsageError(f"the run in '{folder}' names no model to plan for other devices: give MODEL instead")
        given = {"seq_len": asked.get("seq_len"), "lora": what.get("lora"), "trials": PLANNED_TRIALS}
        if asked.get("memory_limit_mib"):
            given["memory_limit"] = float(asked["memory_limit_mib"])
        if asked.get("simulated"):
            given |= {"runner": "simulate", "hardware": used.get("name")}
        return _Run(
            target=str(what["spec"]),
            devices=int(used.get("used") or 1),
            global_batch=asked.get("global_batch"),
            winner=winner,
            default=summary.default(trials),
            trials=tuple(trials),
            given={name: value for name, value in given.items() if value is not None},
        )

    def options(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `redline.tune`: the requested ones, else the run's. Formats that change results stay the winner's."""
        budget = any(asked.get(name) for name in ("trials", "time", "device_hours"))
        own = {name: value for name, value in self.given.items() if name != "trials" or not budget}
        free = {*(asked.get("override") or ()), *(asked.get("fix") or ())}
        kept = {name: self.winner.config[name] for name in COMPUTED if name in self.winner.config and name not in free}
        given = {name: value for name, value in asked.items() if value is not None}
        return {**own, **given, "fix": {**kept, **(asked.get("fix") or {})}}

    def measured(self, count: int, batch: int | None) -> bool:
        """True if the run was on so many devices with this global batch."""
        return count == self.devices and batch == self.global_batch

    def point(self, batch: int | None) -> ScalePoint:
        """The run's own measurements."""
        winner = self.winner.measured
        return ScalePoint(
            devices=self.devices,
            global_batch=batch,
            unit=winner.unit,
            throughput=self.winner.throughput,
            peak_memory_mib=winner.peak_memory_mib,
            default_throughput=self.default.throughput if self.default is not None and self.default.ok else None,
            config=dict(self.winner.config),
        )

    def planned(self, target: str, count: int, batch: int | None, options: dict[str, Any]) -> tuple[Config, ...]:
        """The winner planned for so many devices: the best by the estimate that the run's trials correct; empty if nothing is
        predicted to fit."""
        from ..estimator.plans import fastest

        known = _estimates(target, self.devices, self.global_batch, options).estimator.calibrate(self.trials)
        request = _estimates(target, count, batch, options)
        best = fastest(known.on(request.estimator.training, request.hardware), request.space)
        return () if best is None else (best.config,)


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
    target: Any, counts: Sequence[int], requested: int | str | None, weak: bool, rest: dict[str, Any]
) -> Callable[[int], int | None]:
    """Returns the global batch as a function of the number of devices.

    Raises:
        UsageError: the expression is malformed, or its value is not a number of samples.
    """
    if isinstance(requested, str) and not requested.strip().isdecimal():
        if weak:
            raise UsageError(
                f"weak scaling computes the global batch itself; leave it out, or give a number, not '{requested}'"
            )
        return lambda count: _evaluated(requested, count)
    number = None if requested is None else int(requested)
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


def _estimates(
    target: Any,
    count: int,
    batch: int | None,
    options: dict[str, Any],
    framework: str = "redline",
    like: "EstimateRequest | None" = None,
) -> "EstimateRequest":
    from ..estimator.request import estimate_request
    from .budget import parse_memory

    given = {name: options[name] for name in _TRAINING if name in options}
    limit = parse_memory(options.get("memory_limit"))
    given |= {"devices": count, "global_batch": batch}
    return estimate_request(
        target, options.get("hardware"), memory_limit_mib=limit, framework=framework, like=like, **given
    )


def _predicted(
    scaling: Scaling,
    target: Any,
    batch_of: Callable[[int], int | None],
    predict_to: int | None,
    options: dict[str, Any],
    known_trials: dict[int, tuple[Trial, ...]],
    trainer: bool,
) -> Scaling:
    """Adds predictions to the points, points of more devices, and the throughput of `transformers.Trainer` if requested."""
    if not isinstance(target, (str, Path, Workload)):
        return scaling
    tried = [each.devices for each in scaling.points]
    most = max(known_trials, default=tried[-1])
    try:
        request = _estimates(target, most, batch_of(most), options)
        known = request.estimator.calibrate(known_trials.get(most, ()))
        last = predict_to or (tried[-1] if request.hardware.kind == "cpu" else max(tried[-1], FARTHEST))
        farther = [1 << i for i in range(last.bit_length()) if tried[-1] < 1 << i <= last]
        points = [*scaling.points, *(ScalePoint(devices=each, global_batch=batch_of(each)) for each in farther)]
        scaling = replace(
            scaling, points=tuple(_with_prediction(each, target, options, known, request) for each in points)
        )
        return _with_trainer(scaling, target, options, known) if trainer else scaling
    except (UsageError, RunnerError) as error:  # the model cannot be traced, or the machine cannot be measured
        return replace(scaling, notes=(f"nothing is predicted: {error}",))


def _with_trainer(
    scaling: Scaling, target: "str | Path | Workload", options: dict[str, Any], known: "Estimator"
) -> Scaling:
    """Adds the throughput of `transformers.Trainer`: measured for numbers of devices with a measured winner, otherwise predicted
    with the corrections of the measurements."""
    notes: dict[str, None] = {}
    points = []
    for point in scaling.points:
        try:
            found, reason = _trainer(point, target, options, known)
        except (UsageError, RunnerError) as error:
            found, reason = None, f"Trainer on {point.devices} devices: {error}"
        if found is None:
            notes[reason] = None
        points.append(replace(point, trainer_throughput=found))
    return replace(scaling, points=tuple(points), notes=(*scaling.notes, *notes))


def _trainer(
    point: ScalePoint, target: "str | Path | Workload", options: dict[str, Any], known: "Estimator"
) -> tuple[float | None, str]:
    from ..models.resolve import workload
    from .budget import parse_memory

    if point.throughput is None or options.get("runner") in ("simulate", "emulate"):
        request = _estimates(target, point.devices, point.global_batch, options, framework=TRAINER)
        return trainer_predicted(replace(request, estimator=request.estimator.with_corrections_of(known)))
    sizes = {"seq_len": options.get("seq_len"), "global_batch": point.global_batch}
    trained = workload(target, **sizes, data=options.get("data"), lora=options.get("lora"))
    return trainer_measured(trained, point.devices, parse_memory(options.get("memory_limit")))


def _with_prediction(
    point: ScalePoint, target: Any, options: dict[str, Any], known: "Estimator", like: "EstimateRequest"
) -> ScalePoint:
    from ..estimator.plans import fastest

    try:
        request = _estimates(target, point.devices, point.global_batch, options, like=like)
    except (SpaceError, UsageError) as error:
        return replace(point, why=point.why or str(error))
    best = fastest(known.on(request.estimator.training, request.hardware), request.space)
    if best is None:
        return replace(point, why=point.why or "no configuration is predicted to fit")
    estimate = best.estimate
    units = estimate.throughput * estimate.step_ms
    return replace(
        point,
        unit=point.unit or estimate.unit,
        config=point.config or best.config.to_dict(),
        predicted_throughput=estimate.throughput,
        predicted_low=units / estimate.step_ms_high,
        predicted_high=units / estimate.step_ms_low,
    )
