"""One search of the service in its own process: `redline.tune` on the service's Ray cluster.

`python -m redline.service.searcher` reads a `SearchTask` from its standard input, as JSON. It does not know the database:
it appends what happens to a file of events in the search's folder, which the server reads, and its last event is the
outcome. It may be killed at any moment and started again: finished trials are in the folder, and are not repeated.

SIGINT ends the search, and the trials in progress with it. SIGTERM pauses it: trials in progress end first, and their
results count.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ..base.errors import NoRoom, RedlineError, RunnerError, StudyError, UsageError
from ..results import Trial
from ..results.names import holds_run
from ..runners.host.process import call_this_process
from ..runners.trial.failure import is_oom
from ..runners.trial.memory import HostMemoryMeter
from ..tuner import Result, tune
from ..tuner.listener import SearchListener, SearchPlan
from .records import SearchState
from .request import arguments

EVENTS = "events.jsonl"
"""File of events in a search's folder."""
OUTCOME = "outcome"
"""Kind of the last event: `state` is one of `SearchState`, `queued` for a search that can continue later; `again` is True if
it should continue at once, since its machinery failed.
"""
HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that are blocked when its process starts, until it has handlers for them."""
CPU_S = 12 * 3600
"""CPU time of a process, s. Models that users describe are resolved and traced in it."""
LOCKED_S = 30.0
"""How long an earlier process of the search may keep its folder locked, s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTask:
    """What a process needs to run a search."""

    search: str
    """Its id."""
    folder: str
    request: Mapping[str, Any]
    """As it was submitted, with secrets, which are in no file."""
    kind: str
    """Name of the kind of device."""
    concurrency: int
    """Trials at once."""
    seconds: float | None
    """Time that is left to it, s; None for no limit."""
    address: str
    """Of the Ray cluster."""
    memory_mib: float
    """Memory of the process, beyond what all processes of this kind need, MiB."""
    earlier: tuple[str, ...] = ()
    """Folders of earlier searches of the same model to begin with."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class EventFile(SearchListener):
    """Appends the events of a search to a file, each as a line in one write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._end_last_line(path)
        self._in_progress = 0
        self._finished = 0
        self._pausing = False

    def _end_last_line(self, path: Path) -> None:
        """Ends a line that a killed process has left incomplete."""
        data = path.read_bytes()[-1:]
        if data not in (b"", b"\n"):
            os.write(self._file, b"\n")

    def write(self, kind: str, **data: Any) -> None:
        os.write(self._file, json.dumps({"time": time.time(), "kind": kind, "data": data}).encode() + b"\n")

    def pause(self) -> None:
        """Ends the process now, or when the trials in progress have ended."""
        if self._in_progress == 0:
            self.write(OUTCOME, state=SearchState.QUEUED, reason="paused", again=False)
            os._exit(0)
        self._pausing = True

    def pauses(self) -> bool:
        return self._pausing

    def on_start(self, plan: SearchPlan) -> None:
        self._finished = plan.done
        fields = ("name", "where", "valid", "trials", "seconds", "done", "sampler")
        self.write("plan", **{field: getattr(plan, field) for field in fields})

    def on_wait(self, stage: str) -> None:
        self.write("waiting", what=stage)

    def on_trial_start(self, trial: Trial) -> None:
        self._in_progress += 1
        self.write(
            "started",
            trial=trial.number,
            config=trial.config.to_dict(),
            sampler=trial.sampler,
            predicted_throughput=_finite(trial.predicted_throughput),
            predicted_memory_mib=_finite(trial.predicted_memory_mib),
        )

    def on_trial_end(self, trial: Trial) -> None:
        self._in_progress = max(0, self._in_progress - 1)  # a skipped trial was not started
        self._finished += 1
        measured = trial.measured
        self.write(
            "finished",
            trial=trial.number,
            config=trial.config.to_dict(),
            status=str(measured.status),
            reason=measured.reason,
            throughput=_finite(measured.throughput),
            unit=measured.unit,
            peak_memory_mib=_finite(measured.peak_memory_mib),
            done=self._finished,
        )

    def on_remeasure(self, leaders: list[Trial], done: int, total: int, seconds: float = 0.0) -> None:
        self.write("remeasuring", leaders=[trial.number for trial in leaders], done=done, total=total)

    def on_message(self, message: str) -> None:
        self.write("said", message=message)

    def on_end(self, result: Result) -> None:
        best = result.best
        self.write("ended", why=result.ended, best=None if best is None else best.trial.number)


def _finite(value: float | None) -> float | None:
    """Returns the value, or None for infinity and NaN, which JSON lacks."""
    return value if value is None or abs(value) < float("inf") else None


def run(task: SearchTask, events: EventFile, cancelled: threading.Event) -> None:
    """Runs a search and writes its outcome."""

    def end(state: SearchState, reason: str, result: Result | None = None, *, again: bool = False) -> None:
        best = None if result is None else result.to_dict()["best"]
        events.write(OUTCOME, state=state, reason=reason, best=best, again=again)

    try:
        result = _tuned(task, events)
    except NoRoom as error:
        end(SearchState.QUEUED, str(error))
    except (RunnerError, StudyError) as error:  # the cluster or the disk may recover
        end(SearchState.QUEUED, str(error), again=True)
    except RedlineError as error:
        end(SearchState.FAILED, str(error))
    except KeyboardInterrupt:  # before the first trial
        end(SearchState.CANCELLED if cancelled.is_set() else SearchState.QUEUED, "")
    except Exception as error:
        # Extensions that cannot allocate also return an error without an exception.
        if not (is_oom(error) or isinstance(error, SystemError)):
            raise
        HostMemoryMeter().lift()
        traceback.print_exc()
        limit_text = f"{task.memory_mib / 1024:g} GiB"
        end(
            SearchState.FAILED, f"its process needed more memory than its limit of {limit_text}; submit a smaller model"
        )
    else:
        if cancelled.is_set():
            end(SearchState.CANCELLED, "", result)
        elif result.interrupted:
            end(SearchState.QUEUED, "paused")
        else:
            end(SearchState.DONE, result.why if result.best is None else result.ended, result)


def _tuned(task: SearchTask, events: EventFile) -> Result:
    folder = Path(task.folder)
    search_arguments = arguments(task.request, folder / "asked")
    search_arguments |= {
        "out": folder,
        "listener": events,
        "runner": "ray",
        "ray_address": task.address,
        "device_kind": task.kind,
        "concurrency": task.concurrency,
        "time": task.seconds,
    }
    target = search_arguments.pop("target")
    warm_start = task.earlier
    begin = time.monotonic()
    while True:
        try:
            return tune(target, **search_arguments, warm_start=warm_start, resume=holds_run(folder))
        except UsageError:
            if not warm_start:
                raise
            warm_start = ()  # the earlier searches may have another space; otherwise the error comes again
        except StudyError as error:
            if "is in use by" not in str(error) or time.monotonic() - begin > LOCKED_S:
                raise
            time.sleep(0.5)


def main() -> None:
    """Runs the search that standard input describes. Does nothing if the server has died before it was sent."""
    described = sys.stdin.buffer.read()
    try:
        fields = json.loads(described)
    except ValueError:
        return
    task = SearchTask(**{**fields, "earlier": tuple(fields["earlier"])})
    call_this_process(f"rl-{task.search}")
    events, cancelled = EventFile(Path(task.folder) / EVENTS), threading.Event()

    def cancel(number: int, frame: FrameType | None) -> None:
        cancelled.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, cancel)
    signal.signal(signal.SIGTERM, lambda number, frame: events.pause())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    HostMemoryMeter().limit(task.memory_mib)
    with contextlib.suppress(ValueError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    run(task, events, cancelled)


if __name__ == "__main__":
    main()
