"""Request of a search: the arguments of `redline.tune` and of the command line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from inspect import Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from ...base.errors import UsageError, nearest, replacement, unknown
from ...base.option import Option, either, option, options_of
from ...estimator.hardware import find_hardware
from ...models import Workload
from ...models.request import ModelRequest, SpaceRequest, TrainingRequest
from ...models.resolve import check_name
from ...results import RunFolder
from ...runners import Runner
from ...runners.command.command import Command
from ...runners.registry import RUNNERS
from ...space import Config
from ..budget import Budget, parse_duration, parse_memory
from ..history import leaders_of
from ..listener import SearchListener
from ..samplers import sampler_names
from ..trackers import TRACKERS, check_trackers

DEFAULT_TRIALS = 16
DEFAULT_PATIENCE = 5
SEARCH_RUNNERS = (*RUNNERS, "emulate")
"""Names for `--runner`."""
IN_PROCESS = "function"
"""Runner of a callable that is not isolated."""


def known_sampler(name: str, subject: str = "sampler") -> None:
    """Raises UsageError if the sampler does not exist."""
    if name not in sampler_names():
        raise UsageError(unknown(subject, name, sampler_names()))


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """How candidates are chosen, and when the search ends.

    Args:
        trials: number of trials (16 if neither trials nor time is given).
        time: wall time from this call to the winner, including the re-measurement of the leaders, s or as in `30m`.
            Nothing is started after it, so it is exceeded by one trial at most.
        patience: stop when this many further trials together are unlikely (5 %) to gain another 1 %; 0 never stops
            early. By default 5, and 0 for the sampler `grid`, which tries all configurations.
        sampler: see `redline.tuner.sampler_names()`.
        prior: an estimate to begin with: `prior(config) -> Estimate | throughput`, such as a `redline.Estimator`. The
            search corrects a wrong prior. Only the sampler `bayes` uses it. By default the estimator of the workload,
            if its model can be traced.
        begin_with: configurations tried right after the default one, such as those of a plan of `redline estimate`.
            Missing knobs get the valid values closest to the default. Configurations that are not valid here are
            skipped with a note.
        warm_start: folders of earlier runs, whose fastest configurations, three in all, are tried after those of `begin_with`.
        layerwise: at the end, refine the winner block by block according to predictions and try it in a further trial,
            which wins if it is measured faster.
        seed: seed of weights, data and proposals.
    """

    trials: Annotated[
        int | None,
        Option("Trials in all.  [default: 16, or no limit with --time]", type=int, least=1, metavar="N"),
    ] = None
    time: Annotated[
        str | float | None,
        Option("Wall time to the winner, such as 90s, 30m or 1h30m.", check=parse_duration, metavar="TIME"),
    ] = None
    patience: Annotated[
        int | None,
        Option(
            "Stop once N further trials are unlikely to gain another 1 %; 0 never stops early.  [default: 5, 0 for grid]",
            type=int,
            least=0,
            metavar="N",
        ),
    ] = None
    sampler: Annotated[str, Option(f"How candidates are chosen: {either(sampler_names())}.", check=known_sampler)] = (
        "bayes"
    )
    prior: Any = None
    begin_with: Sequence[Mapping[str, Any]] = ()
    warm_start: Annotated[
        str | Path | Sequence[str | Path],
        Option("An earlier run whose fastest configurations are tried first; repeatable.", metavar="RUN", many=True),
    ] = ()
    layerwise: Annotated[bool, Option("Refine the winner block by block, and try that beside it.")] = False
    seed: Annotated[int, Option("Seed of weights, data and proposals.", type=int, least=0)] = 0

    @cached_property
    def budget(self) -> Budget:
        """Limits of the search. Raises UsageError if one is invalid."""
        trials, patience = self.trials, self.patience
        if trials is None and self.time is None:
            trials = DEFAULT_TRIALS
        if patience is None:
            patience = 0 if self.sampler == "grid" else DEFAULT_PATIENCE
        seconds = parse_duration(self.time)
        return Budget(trials=trials, seconds=seconds, patience=patience)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Runner of the trials, and their limits.

    Args:
        runner: `ray` or `local`; `emulate` runs some ranks of each trial on one device here, and prices their
            communication. By default `ray`, but `local` for a command or a callable. In Python also a `Runner`, which
            decides on which devices its trials run.
        direction: `max` or `min` of the number that a callable returns. With `min` the throughput is its reciprocal, so
            that it must be positive, and `result.best.value` is the number itself.
        isolate: call a callable in a fresh process for each trial, with a deadline and a memory limit: whatever ends
            that process is an outcome, not the end of the search. Its output goes to the trial's log, and its changes
            are lost. False calls it in this process, which is necessary if it works on state or devices of this
            process.
        hardware: a name, a YAML file or a `redline.Hardware`: the hardware to emulate, of which memory is measured and
            time predicted if it is not this machine's; with other runners, the hardware that the estimate assumes. By
            default it is looked up, or measured for a second.
        memory_limit: memory of each device, MiB or as in `8GiB`; by default all of it.
        trial_timeout: deadline of one trial, s or as in `5m`; None for none. Compilation does not count: it may take
            the same time again, and five minutes at least.
        measure_time: time for measuring a candidate's steps once they are steady, s or as in `3s`. Fewer steps are
            measured if they agree within 2 %, but never fewer than three.
        concurrency: number of concurrent trials.
        ray_address: a Ray cluster to join.
        device_kind: name, or a part of it, of the devices to use in a cluster with several kinds of them; by default those
            that it has most of.
    """

    runner: Annotated[
        str | Runner | None,
        Option(f"Where trials run: {either(SEARCH_RUNNERS)}.  [default: ray; local for a command]", metavar="NAME"),
    ] = None
    direction: str | None = None
    isolate: bool = True
    hardware: Annotated[Any, Option("Hardware to emulate, or to assume for the estimate.", metavar="NAME|FILE")] = None
    memory_limit: Annotated[
        str | float | None,
        Option("Memory of a device, such as 8GiB.  [default: what it has]", check=parse_memory, metavar="SIZE"),
    ] = None
    trial_timeout: Annotated[
        str | float | None, Option("Deadline of one trial, compilation apart.", check=parse_duration, metavar="TIME")
    ] = "5m"
    measure_time: Annotated[
        str | float, Option("Time to measure one candidate.", check=parse_duration, metavar="TIME")
    ] = "3s"
    concurrency: Annotated[
        int | None, Option("Trials at once.  [default: what the devices allow]", type=int, least=1, metavar="N")
    ] = None
    ray_address: Annotated[
        str | None, Option("A Ray cluster to join.  [default: RAY_ADDRESS, or a local one]", metavar="ADDRESS")
    ] = None
    device_kind: Annotated[
        str | None,
        Option("Devices to use in a cluster of several kinds.  [default: those it has most of]", metavar="NAME"),
    ] = None

    @cached_property
    def limit_mib(self) -> float | None:
        """Requested memory limit of a device, MiB. Raises UsageError if it is invalid."""
        return parse_memory(self.memory_limit)

    @cached_property
    def timeout_s(self) -> float | None:
        """Deadline of a trial, s; None for none. Raises UsageError if it is invalid."""
        return parse_duration(self.trial_timeout, "trial timeout")

    @cached_property
    def measure_s(self) -> float:
        """Time for measuring a candidate, s. Raises UsageError if it is invalid."""
        return parse_duration(self.measure_time, "measure time") or 0.0


@dataclass(frozen=True, kw_only=True)
class OutputRequest:
    """Outputs of a search, and the listener of its events.

    Args:
        out: folder for the run's files; None saves nothing.
        resume: continue the run in `out`.
        storage: URL of an Optuna storage for the ledger, in place of `study.log`.
        log_to: trackers that each trial is logged to, see `redline.tuner.trackers.TRACKERS`; needs `out`.
        listener: receives the events of the search.
    """

    out: Annotated[
        str | Path | None, Option("Folder for the results.  [default: runs/MODEL, or MODEL-2, ...]", metavar="DIR")
    ] = None
    resume: Annotated[bool, Option("Continue the run in --out.")] = False
    storage: Annotated[
        str | None, Option("An Optuna storage for the ledger, instead of a file in --out.", metavar="URL")
    ] = None
    log_to: Annotated[
        str | Sequence[str] | None,
        Option(f"Log each trial to {either(TRACKERS)}; repeatable.", metavar="NAME", many=True),
    ] = ()
    listener: SearchListener | None = None


@dataclass(frozen=True, kw_only=True)
class Request(OutputRequest, RunRequest, SearchRequest, TrainingRequest):
    """Request of a search, in five sections."""

    @cached_property
    def called(self) -> bool:
        """True if a callable is tuned rather than a model."""
        return callable(self.target) and not isinstance(self.target, Workload)

    @cached_property
    def runs_by_default_on(self) -> str:
        """Name of the default runner."""
        return "local" if self.called or isinstance(self.target, Command) else "ray"

    @cached_property
    def runs_on(self) -> str:
        """Name of the runner: the requested or the default one, or `function` without isolation.

        Raises:
            UsageError: the runner does not exist, or it contradicts `isolate`.
        """
        if isinstance(self.runner, Runner):
            return self.runner.name
        if self.isolate:
            if self.runner is not None and self.runner not in SEARCH_RUNNERS:
                raise UsageError(unknown("runner", self.runner, SEARCH_RUNNERS))
            return self.runner or self.runs_by_default_on
        if not self.called:
            raise UsageError("isolate=False is for a callable: each trial of a workload runs in its own processes")
        if self.runner is not None:
            raise UsageError(
                f"isolate=False calls the function in this process and does not use the runner '{self.runner}'; "
                "leave one of the two out"
            )
        return IN_PROCESS

    @cached_property
    def earlier_leaders(self) -> tuple[Config, ...]:
        """The fastest configurations of the runs of `warm_start`. Raises UsageError if one cannot be read."""
        folders = self.warm_start
        return leaders_of([folders] if isinstance(folders, (str, Path)) else folders, own=self.out)

    def check_values(self) -> None:
        super().check_values()
        _ = self.earlier_leaders
        assert self.runs_on, "a runner has a name"
        if self.hardware is not None:
            find_hardware(self.hardware)
        check_trackers(self.log_to, self.out)
        if self.out is not None:
            RunFolder.check(self.out, resume=self.resume)
        elif self.resume:
            raise UsageError(f"{option('resume', True)} needs {option('out')}, the folder of the run to continue")
        if self.names_model:
            check_name(str(self.target))

    def given(self, *names: str) -> dict[str, Any]:
        """Returns the values of the named fields that differ from their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name in names if (value := getattr(self, name)) is not None and value != defaults[name]}


SECTIONS = (ModelRequest, SpaceRequest, SearchRequest, RunRequest, OutputRequest)
"""Sections of a request, in reading order."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def taking(make_request: Callable[Given, Request]) -> Callable[[Callable[[Request], Answer]], Callable[Given, Answer]]:
    """Decorates a function of a request so that it takes the request's fields as arguments, with their signature and
    documentation.
    """

    def decorate(function: Callable[[Request], Answer]) -> Callable[Given, Answer]:
        @wraps(function)
        def called(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
            names = {field.name for field in fields(Request)}
            for name in kwargs.keys() - names:
                if (advice := replacement("argument", name)) is not None:
                    raise TypeError(f"{function.__name__}(): {advice}")
                of_flag = {option.flag: field.name for field, option in options_of(Request)}
                if name in of_flag:
                    raise TypeError(f"{function.__name__}(): the option --{name} is the argument {of_flag[name]}")
                raise TypeError(f"{function.__name__}() got an unknown argument '{name}'{nearest(name, names) or '.'}")
            return function(make_request(*args, **kwargs))

        begin, _, after_arguments = cleandoc(function.__doc__ or "").partition("\nArgs:\n")
        sections = "\n".join(cleandoc(section.__doc__ or "").partition("\nArgs:\n")[2] for section in SECTIONS)
        called.__doc__ = f"{begin}\nArgs:\n{sections}\n\n{after_arguments.partition(chr(10) * 2)[2]}"
        types = get_type_hints(make_request)
        plain = [
            parameter.replace(annotation=types[parameter.name])
            for parameter in signature(make_request).parameters.values()
        ]
        answers = signature(function).return_annotation
        called.__signature__ = Signature(plain, return_annotation=answers)  # type: ignore[attr-defined]
        return called

    return decorate
