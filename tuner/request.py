"""What is asked of a search: the one form that `redline.tune` and the command line fill in, and the search reads."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from inspect import Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from ..base.errors import RedlineError, UsageError, nearest, unknown
from ..models import Workload
from ..models.request import Asked, ModelRequest, SpaceRequest, TrainingRequest, either
from ..runners import Runner
from ..runners.command.command import Command
from ..runners.registry import RUNNERS
from ..runners.slurm import nodes
from .budget import Budget, parse_duration, parse_memory
from .listener import SearchListener
from .loggers import logger_names
from .samplers import sampler_names

DEFAULT_TRIALS = 16
DEFAULT_PATIENCE = 5
SEARCH_RUNNERS = (*RUNNERS, "simulate", "emulate")
IN_PROCESS = "function"
"""The runner of a callable that is not isolated."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """How candidates are chosen, and when the search ends.

    Args:
        trials: trials in all (16 where neither trials nor time is given).
        time: wall time from this call to the winner, measuring the leaders again included, s or as in `30m`.
            Nothing is started once it is up, so that it is exceeded by one trial at most.
        device_hours: device time of all trials, h.
        patience: stop once so many further trials together are unlikely (5 %) to bring another 1 %; 0 never does.
            By default 5, and 0 for the sampler `grid`, of which all is wanted.
        sampler: see `redline.tuner.sampler_names()`.
        prior: an estimate to begin with: `prior(config) -> Estimate | throughput`, such as a `redline.Estimator`.
            Where it is wrong the search finds out. Samplers other than `bayes` do without. By default a
            workload's is made, where its model can be traced.
        begin_with: configurations tried right after the default one, such as those of a plan of `redline estimate`; knobs
            that they leave out are as near to the default as is valid. A note names those that are not valid here.
        warm_start: folders of earlier runs, of this or another workload: what paid there is expected to pay here.
        headroom: share of a device's memory that is to stay free.
        layerwise: at the end, refine the winner block by block as predictions suggest, and try that beside it: one
            trial more, which wins where it is measured faster.
        soak: before a workload's winner is named, train with it on the worst-length batch and 200 steps of varied lengths:
            where memory runs out or it fails otherwise, the next one is soaked, until one holds up.
        seed: of weights, data and proposals.
    """

    trials: Annotated[
        int | None,
        Asked("Trials in all.  [default: 16, or no limit with --time or --device-hours]", type=int, metavar="N"),
    ] = None
    time: Annotated[
        str | float | None,
        Asked("Wall time to the winner, such as 90s, 30m or 1h30m.", metavar="TIME"),
    ] = None
    device_hours: Annotated[float | None, Asked("Device time of all trials, hours.", type=float, metavar="N")] = None
    patience: Annotated[
        int | None,
        Asked(
            "Stop once N further trials are unlikely to gain another 1 %; 0 never stops early.  [default: 5, 0 for grid]",
            type=range(1 << 31),
            metavar="N",
        ),
    ] = None
    sampler: Annotated[str, Asked(f"How candidates are chosen: {either(sampler_names())}.")] = "bayes"
    prior: Any = None
    begin_with: Sequence[Mapping[str, Any]] = ()
    warm_start: Annotated[
        str | Path | Sequence[str | Path],
        Asked("An earlier run to learn from; repeatable.", metavar="RUN", many=True),
    ] = ()
    headroom: Annotated[float, Asked("Share of memory to keep free.", type=float)] = 0.05
    layerwise: Annotated[bool, Asked("Refine the winner block by block, and try that beside it.")] = False
    soak: Annotated[bool, Asked("Run the winner for 200 steps of varied lengths before naming it.")] = False
    seed: Annotated[int, Asked("Seed of weights, data and proposals.", type=range(1 << 63))] = 0

    @cached_property
    def budget(self) -> Budget:
        """What the search may spend.

        Raises:
            UsageError: a limit is none.
        """
        trials, patience = self.trials, self.patience
        if trials is None and self.time is None and self.device_hours is None:
            trials = DEFAULT_TRIALS
        if patience is None:
            patience = 0 if self.sampler == "grid" else DEFAULT_PATIENCE
        seconds = parse_duration(self.time)
        return Budget(trials=trials, seconds=seconds, device_hours=self.device_hours, patience=patience)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Who runs trials, on what, and within which limits.

    Args:
        runner: `ray` or `local`; `slurm` on the nodes of the allocation that this process is in; `simulate` answers with
            predictions for `hardware`, which need not be here; `emulate` runs some ranks of
            each trial on one device here, and prices their communication. By default `slurm` in an allocation of several nodes,
            else `ray`; for a command else `local`, and for a callable `local`. In Python also a `Runner`, which says itself on
            which devices its trials run.
        isolate: call a callable in a fresh process for each trial, with a deadline and a memory limit: whatever
            ends that is an outcome, not the end of the search. What it prints goes to the trial's log, and what
            it changes is gone afterwards. False calls it in this process, as it must be where it works on state
            or devices that this process holds.
        ranks: with `emulate`, which ranks run: `deciding` or `all` that differ.
        memory_only: with `emulate`, measure memory alone, and predict the time: for models too large to be timed here, or
            hardware other than this machine's.
        emulate_first: before a trial takes its devices, emulate its deciding ranks on one of them; where these run out of memory
            the trial is skipped. Some emulated trials also correct the estimate before the first.
        hardware: a name, a YAML file or a `redline.Hardware`: what is simulated or emulated; with other runners what the
            machine at hand is taken for by the estimate. By default it is looked up, or measured for a second.
        memory_limit: of each device, MiB or as in `8GiB`; by default what the device has.
        trial_timeout: deadline of one trial, s or as in `5m`; None for none. Compilation does not count: it has
            as long again, and five minutes at least.
        measure_time: time for measuring a candidate's steps once they are steady, s or as in `3s`; fewer are
            taken where they agree within 2 %, and never fewer than three.
        concurrency: trials at once.
        ray_address: a Ray cluster to join.
    """

    runner: Annotated[
        str | Runner | None,
        Asked(f"Where trials run: {either(SEARCH_RUNNERS)}.  [default: ray]", metavar="NAME"),
    ] = None
    isolate: bool = True
    ranks: Annotated[str, Asked("Ranks that emulate starts: deciding or all.  [default: deciding]", metavar="NAME")] = (
        "deciding"
    )
    memory_only: Annotated[bool, Asked("With emulate: measure memory, predict the time.")] = False
    emulate_first: Annotated[bool, Asked("Emulate a candidate's ranks on one device before its trial.")] = False
    hardware: Annotated[
        Any,
        Asked("Hardware to simulate or emulate, or to assume for the estimate.", metavar="NAME|FILE"),
    ] = None
    memory_limit: Annotated[
        str | float | None,
        Asked("Memory of a device, such as 8GiB.  [default: what it has]", metavar="SIZE"),
    ] = None
    trial_timeout: Annotated[
        str | float | None,
        Asked("Deadline of one trial, compilation apart.", metavar="TIME"),
    ] = "5m"
    measure_time: Annotated[str | float, Asked("Time to measure one candidate.", metavar="TIME")] = "3s"
    concurrency: Annotated[
        int | None,
        Asked("Trials at once.  [default: what the devices allow]", type=int, metavar="N"),
    ] = None
    ray_address: Annotated[
        str | None,
        Asked("A Ray cluster to join.  [default: RAY_ADDRESS, or a local one]", metavar="ADDRESS"),
    ] = None

    @cached_property
    def limit_mib(self) -> float | None:
        """Memory of a device that was asked for, MiB. Raises UsageError where it is none."""
        return parse_memory(self.memory_limit)

    @cached_property
    def timeout_s(self) -> float | None:
        """Deadline of a trial, s; None for none. Raises UsageError where it is none."""
        return parse_duration(self.trial_timeout, "trial timeout")

    @cached_property
    def measure_s(self) -> float:
        """Time for measuring a candidate, s. Raises UsageError where it is none."""
        return parse_duration(self.measure_time, "measure time") or 0.0


@dataclass(frozen=True, kw_only=True)
class OutputRequest:
    """What is kept, and who hears of it.

    Args:
        out: folder for the run's files; None keeps none.
        resume: go on with the run in `out`.
        storage: URL of an Optuna storage for the ledger, in place of `study.log`.
        log_to: trackers that each trial is written to, see `redline.tuner.loggers.logger_names()`; needs `out`.
        listener: hears of progress.
    """

    out: Annotated[
        str | Path | None,
        Asked("Folder for the results.  [default: runs/MODEL, or MODEL-2, ...]", metavar="DIR"),
    ] = None
    resume: Annotated[bool, Asked("Continue the run in --out.")] = False
    storage: Annotated[
        str | None,
        Asked("An Optuna storage for the ledger, instead of a file in --out.", metavar="URL"),
    ] = None
    log_to: Annotated[
        str | Sequence[str] | None,
        Asked(f"Log each trial to {either(logger_names())}; repeatable.", metavar="NAME", many=True),
    ] = ()
    listener: SearchListener | None = None


@dataclass(frozen=True, kw_only=True)
class Request(OutputRequest, RunRequest, SearchRequest, TrainingRequest):
    """What is asked of a search, in five sections."""

    @cached_property
    def called(self) -> bool:
        """Whether a callable is tuned rather than a model."""
        return callable(self.target) and not isinstance(self.target, Workload)

    @cached_property
    def runs_by_default_on(self) -> str:
        """The runner's name where none is asked for."""
        if self.called:
            return "local"
        if nodes() > 1 and not self.ray_address and "RAY_ADDRESS" not in os.environ:
            return "slurm"
        return "local" if isinstance(self.target, Command) else "ray"

    @cached_property
    def runs_on(self) -> str:
        """The runner's name: where none is asked for the default one, without isolation `function`.

        Raises:
            UsageError: there is no such runner, or it contradicts `isolate`.
        """
        if isinstance(self.runner, Runner):
            return self.runner.name
        if self.isolate:
            if self.runner is not None and self.runner not in SEARCH_RUNNERS:
                raise UsageError(unknown("runner", self.runner, SEARCH_RUNNERS))
            return self.runner or self.runs_by_default_on
        if not self.called:
            raise UsageError("isolate=False belongs to a callable: trials of a workload are processes of their own")
        if self.runner is not None:
            raise UsageError(
                f"isolate=False calls the function in this process, where the runner '{self.runner}' has no part; "
                "leave one of the two out"
            )
        return IN_PROCESS

    def check_values(self) -> None:
        """Raises UsageError where a value can be seen to be none before anything is looked at."""
        self.check_knobs()
        for each in ("given_space", "source", "runs_on", "budget", "limit_mib", "timeout_s", "measure_s"):
            getattr(self, each)

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the fields of these names that ask for something, and not for the default."""
        defaults = {each.name: each.default for each in fields(self)}
        return {name: value for name in names if (value := getattr(self, name)) is not None and value != defaults[name]}


SECTIONS = (ModelRequest, SpaceRequest, SearchRequest, RunRequest, OutputRequest)
"""Of a request, as they are read."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


_PYTHON = {"set": "override", "from": "taken_from"}
"""Arguments of `redline.tune` whose options have another name."""
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")


def in_python(message: str) -> str:
    """A message with arguments of `redline.tune` in place of the command line's options.

    >>> in_python("continue it with --resume, or give another --out")
    'continue it with resume=True, or give another out'
    """
    defaults = {each.name: each.default for each in fields(Request)}

    def argument(match: re.Match[str]) -> str:
        name = _PYTHON.get(match[1], match[1].replace("-", "_"))
        if name not in defaults:
            return match[0]
        return f"{name}=True" if defaults[name] is False else name

    return _OPTION.sub(argument, message)


def taking(made: Callable[Given, Request]) -> Callable[[Callable[[Request], Answer]], Callable[Given, Answer]]:
    """Has a function that takes a request take what makes one, with the signature and the documentation of that."""

    def decorate(function: Callable[[Request], Answer]) -> Callable[Given, Answer]:
        @wraps(function)
        def called(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
            names = {each.name for each in fields(Request)}
            for name in kwargs:
                if name not in names:
                    raise TypeError(
                        f"{function.__name__}() got an unknown argument '{name}'{nearest(name, names) or '.'}"
                    )
            try:
                return function(made(*args, **kwargs))
            except RedlineError as error:
                error.args = tuple(in_python(each) if isinstance(each, str) else each for each in error.args)
                raise

        begin, _, rest = cleandoc(function.__doc__ or "").partition("\nArgs:\n")
        told = "\n".join(cleandoc(each.__doc__ or "").partition("\nArgs:\n")[2] for each in SECTIONS)
        called.__doc__ = f"{begin}\nArgs:\n{told}\n\n{rest.partition(chr(10) * 2)[2]}"
        types = get_type_hints(made)
        plain = [each.replace(annotation=types[each.name]) for each in signature(made).parameters.values()]
        answers = signature(function).return_annotation
        called.__signature__ = Signature(plain, return_annotation=answers)  # type: ignore[attr-defined]
        return called

    return decorate
