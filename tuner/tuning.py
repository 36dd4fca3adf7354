"""`redline.tune`: finds the fastest configuration of a model on some devices."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..base.errors import NoRoom, RunnerError
from ..base.scratch import Scratch
from ..base.writing import cannot_write
from ..knobs.strategy import BLOCK_KNOBS
from ..results import RunFolder, Trial, summary
from ..runners.command.comparison import of_other_samples, without_effect
from ..runners.command.work import Commands
from ..space import Config
from .budget import Stopwatch
from .feasibility import HEADROOM, tight_winner
from .listener import SearchListener
from .refinement import refiner
from .request.options import Request, taking
from .request.record import command_of, keep_command, plan_of
from .result import Result, make_result
from .search import Search
from .setup import SearchSetup, peak_rate, set_up
from .trackers import logging_to


@taking(Request)
def tune(request: Request) -> Result:
    """Finds the configuration with the highest throughput.

    Args:
        request: the fields of `redline.tuner.request.options.Request`, by name.

    Returns:
        The result; `result.best` is None if no trial succeeded; `result.why` has the reason, as does a warning without a
            listener. After Ctrl-C it contains the trials so far, with `result.interrupted` set.

    Raises:
        UsageError: the request is invalid; nothing was written.
        RunnerError: the machinery that runs trials failed. Earlier trials are in `out`.
    """
    return run_search(request)


def run_search(request: Request) -> Result:
    """Runs a search as `tune` does; errors use the names of the command line's options."""
    request.check_values()
    watch = Stopwatch(request.budget.seconds)
    messages = _Messages(request.listener or SearchListener())
    with contextlib.ExitStack() as stack:
        setup = set_up(request, stack, messages.warn)
        messages.listener = stack.enter_context(logging_to(request.log_to, request.out, messages.listener))
        folder = stack.enter_context(_open(setup, stack.enter_context(_folder(request.out)), messages.warn))
        first_note = (setup.initial.note,) if setup.initial.note and not folder.resumed else ()
        if setup.task.command is not None:
            keep_command(setup.task.command.requested, folder.path)
        for note in (*folder.notes, *setup.task.notes, *setup.notes, *first_note):
            messages.warn(note)
        ended, lost = _search(setup, folder, watch, messages)
        return _conclude(setup, folder, ended, lost, messages, watch)


class _Messages:
    """Messages of a search, collected for its result and passed to its listener."""

    def __init__(self, listener: SearchListener) -> None:
        self.listener = listener
        self.notes: list[str] = []
        self.again_s = 0.0
        """Time of measuring the leaders again, s."""

    def warn(self, message: str) -> None:
        self.notes.append(message)
        self.listener.on_message(message)


def _open(setup: SearchSetup, path: Path, warn: Callable[[str], None]) -> RunFolder:
    request, task = setup.request, setup.task
    knobs: dict[str, Any] = {knob.name: None if knob.derived else knob.values for knob in task.space.knobs}
    if request.layerwise:
        knobs |= dict.fromkeys(name for name in BLOCK_KNOBS if name not in knobs)
    return RunFolder.open(
        path,
        setup.request_document,
        knobs=knobs,
        make_config=Config,
        storage=request.storage,
        resume=request.resume,
        warn=warn,
    )


def _search(
    setup: SearchSetup, folder: RunFolder, watch: Stopwatch, messages: _Messages
) -> tuple[str, BaseException | None]:
    """Runs trials until the budget ends, then measures the leaders again.

    Returns why the search ended, and the exception that ended it, or None.
    """
    messages.listener.on_wait("starting workers")
    request, task, ended = setup.request, setup.task, ""
    try:
        user_code = "the command" if task.command is not None else "the callable" if task.function is not None else ""
        with setup.runner() as runner:
            watch.exclude(runner.waited_s)
            folder.record_hosts(runner.per_host)
            search = Search(
                run_folder=folder,
                sampler=setup.sampler,
                runner=runner,
                budget=request.budget,
                first=(setup.initial.config, *setup.begin_with),
                fallback=setup.initial.fallback,
                trial_timeout_s=request.timeout_s,
                listener=messages.listener,
                judge=setup.judge,
                user_code_errors=user_code,
                peak_rate=peak_rate(setup.estimator) if setup.estimator is not None else None,
                watch=watch,
            )
            messages.listener.on_start(plan_of(request, task, folder, runner, default=setup.initial.config))
            search.run()
            ended = search.ended
            if request.layerwise:
                search.refine(refiner(setup.estimator, task.space, HEADROOM, messages.warn))
            try:
                search.confirm()
            finally:
                messages.again_s = search.again_s
    except KeyboardInterrupt as interrupt:
        return "interrupted", interrupt
    except RunnerError as lost:
        no_room = isinstance(lost, NoRoom)
        return "no room on the cluster" if no_room else "the machinery that runs trials failed", lost
    return ended, None


def _conclude(
    setup: SearchSetup,
    folder: RunFolder,
    ended: str,
    cause: BaseException | None,
    messages: _Messages,
    watch: Stopwatch,
) -> Result:
    """Writes best.yaml and returns the result.

    Raises:
        RunnerError: `cause` is one.
    """
    request, task = setup.request, setup.task
    interrupted = isinstance(cause, KeyboardInterrupt)
    done = folder.trials()
    if (tight := tight_winner(done, HEADROOM)) and not interrupted:
        messages.warn(tight)
    for sentence in filter(None, [*without_effect(done), of_other_samples(done)]):
        messages.warn(sentence)
    if task.command is not None and (winner := summary.best(done)) is not None:
        hosts = max(1, task.devices // (folder.document["asked"]["devices"].get("per_host") or task.devices))
        messages.warn(_winner_s_command(task.command, winner, request.out, hosts))
    command = command_of(request, task, setup.limit_mib, done)
    folder.write_best(command, devices=task.device.to_dict(), again_s=messages.again_s, stopped=ended if cause else "")
    result = make_result(
        done,
        folder.knobs,
        folder=folder.path if request.out is not None else None,
        ended=ended,
        interrupted=interrupted,
        notes=messages.notes,
        emulated=task.emulated,
        seconds=watch.elapsed,
        seconds_again=messages.again_s,
    )
    messages.listener.on_end(result)
    if isinstance(cause, RunnerError):
        saved = request.out is not None and any(not trial.pending for trial in done)
        note = f"\nThe trials so far are in '{folder.path}'; resuming continues from there." if saved else ""
        raise type(cause)(f"{cause}{note}") from cause
    if result.best is None and request.listener is None:
        warnings.warn(f"result.best is None: {result.why}", RuntimeWarning, stacklevel=5)
    return result


def _winner_s_command(command: Commands, winner: Trial, out: str | Path | None, hosts: int) -> str:
    """Returns a message with the command that trains as the winner did, which it writes beside its files."""
    folder = Path(out or "", "winner")
    command_text = command.training_command(winner.config, winner.number, folder, hosts=hosts)
    try:
        command.write_files(winner.config, winner.number, folder)
        if out is not None:
            folder.mkdir(exist_ok=True)
            (folder / "command.sh").write_text(f"{command_text}\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write(folder, error) from error
    per_host_text = ", on each host with its NODE_RANK and the first one's MASTER_ADDR" if hosts > 1 else ""
    return f"the winner's command{per_host_text}: {command_text}"


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with Scratch("run") as path:
        yield path
