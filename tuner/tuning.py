"""`redline.tune`: from a model and some devices to the fastest configuration."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import RunnerError, SpaceError, UsageError
from ..base.scratch import Scratch
from ..knobs.strategy import BLOCK_KNOBS
from ..results import RunFolder, summary
from ..runners import Runner
from ..runners.host import PLAIN_IMPORTS, HostAgent
from ..runners.soak import SoakPlan
from ..space import Config
from .budget import Stopwatch
from .earlier_runs import Transferred, read_runs, take
from .feasibility import tight_winner
from .listener import SearchListener
from .loggers import check_trackers, logging_to
from .predicting import check_refinable, described, peak_rate, refiner
from .record import asked_of, command_of, plan_of
from .request import Request, taking
from .result import Result, make_result
from .running import check_honoured, imports_early, make_runner
from .samplers import make_sampler
from .search import Search
from .search_setup import SearchSetup, begin
from .task import Task, resolve_task


@taking(Request)
def tune(request: Request) -> Result:
    """Finds the configuration with the highest throughput.

    Args:
        request: the fields of `redline.tuner.request.Request`, by name.

    Returns:
        The result; `result.best` is None where nothing succeeded, and `result.why` says why, as does a warning
        where there is no listener. After Ctrl-C it holds what was found so far, with `result.interrupted` set.

    Raises:
        UsageError: something asked for is invalid; nothing was written.
        RunnerError: the machinery that runs trials failed. What was found before is in `out`.
    """
    return run_search(request)


def run_search(request: Request) -> Result:
    """What `tune` does, with errors in the words of the command line."""
    request.check_values()
    watch = Stopwatch(request.budget.seconds)
    told = _Told(request.listener or SearchListener())
    with contextlib.ExitStack() as held:
        agent: HostAgent | None = None
        if request.runs_on == "local" and imports_early(request.target):
            agent = held.enter_context(contextlib.closing(HostAgent(PLAIN_IMPORTS)))
        task = resolve_task(
            request,
            cluster=request.runs_on == "slurm"
            or (request.runs_on == "ray" and bool(request.ray_address or os.environ.get("RAY_ADDRESS"))),
            simulated=described(request.hardware) if request.runs_on == "simulate" else None,
            device=request.runner.device if isinstance(request.runner, Runner) else None,
        )
        if request.runs_on == "local" and task.own is not None and agent is None:
            agent = held.enter_context(contextlib.closing(HostAgent(PLAIN_IMPORTS)))
        asked = asked_of(request, task)
        earlier = _check(request, task, asked)
        before = RunFolder.asked(request.out) if request.resume and request.out is not None else {}
        beginning = begin(request, task, earlier, agent, told.warn, earlier_mib=before.get("rank_memory_mib"))
        if beginning.limit_mib is not None:
            asked["rank_memory_mib"] = beginning.limit_mib
        if beginning.first.note:
            asked["first_trial"] = beginning.first.note
        told.listener = held.enter_context(logging_to(request.log_to, request.out, told.listener))
        folder = held.enter_context(_open(request, task, asked, held.enter_context(_folder(request.out)), told))
        wanted = _wanted(request, task, told)
        begun = (beginning.first.note,) if beginning.first.note and not folder.resumed else ()
        for note in (*folder.notes, *task.notes, *begun):
            told.warn(note)
        ended, lost = _search(request, task, beginning, wanted, folder, watch, agent, told)
        return _conclude(request, task, beginning, folder, ended, lost, told, watch)


def _wanted(request: Request, task: Task, told: "_Told") -> list[Config]:
    """The configurations to begin with that are valid here; a note names each of the others."""
    from ..estimator.survey import checked_config

    found = []
    for each in request.begin_with:
        try:
            found.append(checked_config(task.space, each))
        except SpaceError as error:
            what = " ".join(f"{name}={value}" for name, value in each.items())
            told.warn(f"not tried, because it is not valid here: {what} ({' '.join(str(error).split())[:200]})")
    return list(dict.fromkeys(found))


class _Told:
    """What is said while a search runs, to who listens and for the result."""

    def __init__(self, listener: SearchListener) -> None:
        self.listener = listener
        self.notes: list[str] = []
        self.again_s = 0.0
        """What measuring the leaders again took, s."""

    def warn(self, message: str) -> None:
        """Something the user should know."""
        self.notes.append(message)
        self.listener.said(message)


def _check(request: Request, task: Task, asked: Mapping[str, Any]) -> list[Transferred]:
    """Refuses whatever can be refused before anything takes time; what counts of earlier runs.

    Raises:
        UsageError: something asked for contradicts the rest, or means nothing here.
    """
    check_honoured(request, task)
    deadline = request.timeout_s if request.given("trial_timeout") else None
    request.budget.check_against(deadline, request.concurrency or 1, task.devices)
    warm = request.warm_start
    runs = read_runs([warm] if isinstance(warm, (str, Path)) else warm, own=request.out)
    if task.simulated and request.time is not None:
        raise UsageError("simulated trials take no time: limit a simulated search by trials or device_hours")
    if request.layerwise:
        check_refinable(task.own, task.space)
    make_sampler(request.sampler, task.space, seed=request.seed)
    check_trackers(request.log_to, request.out)
    if request.out is not None:
        RunFolder.resumable(request.out, asked, storage=request.storage, resume=request.resume)
    elif request.resume:
        raise UsageError("resume needs out, the folder of the run to go on with")
    return [take(run, task.space, asked, task.own.unit if task.own else "") for run in runs]


def _open(request: Request, task: Task, asked: Mapping[str, Any], path: Path, told: _Told) -> RunFolder:
    knobs: dict[str, Any] = {knob.name: None if knob.derived else knob.values for knob in task.space.knobs}
    if request.layerwise:
        knobs |= dict.fromkeys(name for name in BLOCK_KNOBS if name not in knobs)
    return RunFolder.open(
        path,
        asked,
        knobs=knobs,
        make_config=Config,
        storage=request.storage,
        resume=request.resume,
        warn=told.warn,
    )


def _search(
    request: Request,
    task: Task,
    beginning: SearchSetup,
    wanted: Sequence[Config],
    folder: RunFolder,
    watch: Stopwatch,
    agent: HostAgent | None,
    told: _Told,
) -> tuple[str, BaseException | None]:
    """Tries candidates until the budget ends, then the leaders again; why it ended, and what ended it if not itself."""
    told.listener.waiting("starting workers")
    first, estimator, ended = beginning.first, beginning.estimator, ""
    try:
        with make_runner(
            request,
            task,
            work=beginning.work,
            limit_mib=beginning.limit_mib,
            estimator=estimator,
            earlier=folder.trials(),
            agent=agent,
        ) as runner:
            folder.record_hosts(runner.per_host)
            search = Search(
                run_folder=folder,
                sampler=beginning.sampler,
                runner=runner,
                budget=request.budget,
                first=(first.config, *wanted),
                fallback=first.fallback,
                trial_timeout_s=request.timeout_s,
                listener=told.listener,
                judge=beginning.judge if request.budget.patience else None,
                devices=task.devices,
                user_code_errors="the command" if task.command is not None else "",
                predictor=beginning.predictor,
                peak_rate=peak_rate(estimator) if estimator is not None else None,
                watch=watch,
                soak_plan=SoakPlan() if request.soak else None,
            )
            told.listener.began(plan_of(request, task, folder, runner, default=first.config))
            search.run()
            ended = search.ended
            if request.layerwise:
                search.refine(refiner(estimator, task.space, request.headroom, told.warn))
            try:
                search.confirm()
            finally:
                told.again_s = search.again_s
            search.soak(told.warn)
    except KeyboardInterrupt as interrupt:
        return "interrupted", interrupt
    except RunnerError as lost:
        return "the machinery that runs trials failed", lost
    return ended, None


def _conclude(
    request: Request,
    task: Task,
    beginning: SearchSetup,
    folder: RunFolder,
    ended: str,
    cause: BaseException | None,
    told: _Told,
    watch: Stopwatch,
) -> Result:
    """Writes best.yaml and makes the result.

    Raises:
        RunnerError: that was the cause.
    """
    interrupted = isinstance(cause, KeyboardInterrupt)
    done = folder.trials()
    if (tight := tight_winner(done, request.headroom)) and not interrupted:
        told.warn(tight)
    if task.command is not None and (winner := summary.best(done)) is not None:
        own = folder.path.absolute() / "trials" / str(winner.number)
        hosts = max(1, task.devices // (folder.document["asked"]["devices"].get("per_host") or task.devices))
        told.warn(f"the winner's command: {task.command.whole(winner.config, winner.number, own, hosts=hosts)}")
    command = command_of(request, task, beginning.limit_mib, done)
    folder.write_best(command, devices=task.device.to_dict(), again_s=told.again_s)
    result = make_result(
        done,
        folder.knobs,
        folder=folder.path if request.out is not None else None,
        ended=ended,
        interrupted=interrupted,
        notes=told.notes,
        simulated=task.simulated,
        seconds=watch.elapsed,
        seconds_again=told.again_s,
    )
    told.listener.ended(result)
    if isinstance(cause, RunnerError):
        kept = request.out is not None and any(not trial.pending for trial in done)
        note = f"\nWhat was found before is in '{folder.path}'; resuming goes on from there." if kept else ""
        raise RunnerError(f"{cause}{note}") from cause
    if result.best is None and request.listener is None:
        warnings.warn(f"result.best is None: {result.why}", RuntimeWarning, stacklevel=5)
    return result


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with Scratch("run") as path:
        yield path
