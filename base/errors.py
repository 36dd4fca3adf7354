"""Every error redline raises on purpose, and the one way it words unknown names."""

import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches


class RedlineError(Exception):
    """Base of every error raised by redline."""


class UsageError(RedlineError, ValueError):
    """An argument or option is invalid; the message says which rule it broke and what to do."""


class SpaceError(UsageError):
    """A search space is declared or used wrongly."""


class ScheduleError(UsageError):
    """A primitive cannot be applied; the schedule is left as it was."""


class TraceError(ScheduleError):
    """A module cannot be traced; names the operation and the line of model code that caused it."""


class WorkloadError(UsageError):
    """A model, its data or its description cannot be turned into a workload."""


class StudyError(UsageError):
    """A run's folder cannot be created, opened or resumed."""


class NothingFound(RedlineError, LookupError):
    """A search has no winner, or nothing fits, and a configuration was asked for; the message says why there is none."""


class RunnerError(RedlineError, RuntimeError):
    """The machinery that runs trials failed, not the trial: a lost agent, a lost node."""


class TrainingFailed(RedlineError, RuntimeError):
    """A training ended before its last step; the message says why, and how to go on."""


class Diverged(RedlineError, ArithmeticError):
    """A training's loss is not finite any more."""


class MissingDependency(RedlineError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class OutOfMemory(RedlineError, MemoryError):
    """Raise from a tuned callable to record the trial as `oom`."""


class ServiceError(RedlineError):
    """Base of what the service refuses, or cannot do."""


class NotFound(ServiceError, LookupError):
    """The service knows no search, dry run, worker, user or token of that name."""


class KeyTaken(ServiceError, ValueError):
    """A key or a name that stands for one thing stands for another already."""


class LeaseOver(ServiceError, RuntimeError):
    """A dry run is not leased under that number any more: it has its outcome, was withdrawn, or another worker has it."""


class AttemptOver(ServiceError, RuntimeError):
    """A search has ended, or was taken up by a later attempt; the earlier one must stop."""


class Refused(ServiceError, PermissionError):
    """The service does not do that, for that user or on that worker; the message says why."""


class StorageAhead(ServiceError, RuntimeError):
    """The database was written by a later version of redline."""


class StorageUnavailable(ServiceError, RuntimeError):
    """The database cannot be reached, is locked, full, read-only or damaged; the message says which."""


def unknown(kind: str, name: object, known: Iterable[object], *, like: str | None = None) -> str:
    """The sentence for an unknown name: what was given, the nearest known name, and all of them.

    With `like` the nearest is looked for by that, where the name as given has more to it.

    >>> unknown("knob", "micro_bach", ["tp", "micro_batch"])
    "unknown knob 'micro_bach'; did you mean 'micro_batch'? Known: micro_batch, tp."
    """
    names = sorted(str(each) for each in known)
    hint = nearest(name if like is None else like, names) or "."
    listing = ", ".join(names) if names else "none"
    return f"unknown {kind} '{name}'{hint} Known: {listing}."


def not_installed(package: str, extra: str) -> str:
    """What to say where an optional package is missing, and how it is installed; empty where it is there."""
    if importlib.util.find_spec(package) is not None:
        return ""
    return f"{package} is not installed: pip install 'redline[{extra}]'"


def nearest(name: object, known: Iterable[object]) -> str:
    """`; did you mean 'NAME'?` of the nearest known name; empty where none is near."""
    near = get_close_matches(str(name), sorted(str(each) for each in known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
