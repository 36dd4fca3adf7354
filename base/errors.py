"""Exceptions that redline raises on purpose, and the wording of errors about unknown names."""

import importlib.util
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path


class RedlineError(Exception):
    """Base of every error raised by redline."""


class UsageError(RedlineError, ValueError):
    """An argument or option is invalid. The message states the rule it broke and the fix."""


class SpaceError(UsageError):
    """A search space is declared or used incorrectly."""


class ScheduleError(UsageError):
    """A primitive cannot be applied. The schedule is left unchanged."""


class MissingModuleError(ScheduleError):
    """A model has no module at a path."""


class TraceError(ScheduleError):
    """A module cannot be traced. The message names the operation and the line of model code that caused it."""


class WorkloadError(UsageError):
    """A model, its data or its description cannot be turned into a workload."""


class StudyError(UsageError):
    """A run's folder cannot be created, opened or resumed."""


class NothingFound(RedlineError, LookupError):
    """A configuration was requested, but the search has no winner or nothing fits. The message states the reason."""


class RunnerError(RedlineError, RuntimeError):
    """The machinery that runs trials failed (a lost agent, a lost node), not the trial."""


class NoRoom(RunnerError):
    """Others use the devices of a cluster, and did so for as long as the search may wait."""


class TrainingFailed(RedlineError, RuntimeError):
    """A training ended before its last step. The message states the reason and how to continue."""


class Diverged(RedlineError, ArithmeticError):
    """The loss of a training is not finite."""


class MissingDependency(RedlineError, ImportError):
    """An optional package is not installed. The message states how to install it."""


class OutOfMemory(RedlineError, MemoryError):
    """Raise from a tuned callable to record the trial as `oom`."""


class ServiceError(RedlineError):
    """Base of the errors that the service raises."""

    code = "unavailable"
    """Names the error in an answer over HTTP."""
    status = 503
    """Status of that answer."""


class NotFound(ServiceError, LookupError):
    """There is no run, training, trial, search, dry run, worker, user or token of that name."""

    code, status = "not_found", 404


class KeyTaken(ServiceError, ValueError):
    """A key or name is already used for something else."""

    code, status = "key_taken", 409


class Refused(ServiceError, PermissionError):
    """The service does not allow this for that user or worker. The message states the reason."""

    code, status = "refused", 403


class StorageAhead(ServiceError, RuntimeError):
    """The database was written by a later version of redline."""

    code = "storage_ahead"


class StorageUnavailable(ServiceError, RuntimeError):
    """The database cannot be reached, is locked, full, read-only or damaged. The message states which."""

    code = "storage_unavailable"


def unknown(kind: str, name: object, known: Iterable[object], *, like: str | None = None) -> str:
    """Returns the error text for an unknown name: the given name, the nearest known name, and all known names; for a name
    of an earlier version, its replacement.

    `like` replaces `name` in the search for the nearest name, for names that are given with a prefix or suffix.

    >>> unknown("knob", "micro_bach", ["tp", "micro_batch"])
    "unknown knob 'micro_bach'; did you mean 'micro_batch'? Known: micro_batch, tp."
    """
    if (advice := replacement(kind, name)) is not None:
        return advice
    names = sorted(str(candidate) for candidate in known)
    hint = nearest(name if like is None else like, names) or "."
    listing = ", ".join(names) if names else "none"
    return f"unknown {kind} '{name}'{hint} Known: {listing}."


@cache
def replacements() -> Mapping[str, Mapping[str, str]]:
    """What to use instead of names of earlier versions, by kind and name."""
    import yaml

    advice: Mapping[str, Mapping[str, str]] = yaml.safe_load(
        Path(__file__).with_name("removed.yaml").read_text("utf-8")
    )
    return advice


def replacement(kind: str, name: object) -> str | None:
    """Returns the error text for a name of an earlier version; None for any other name.

    >>> replacement("option of tune", "--from")
    '--from was removed: write the knobs into --space FILE, or give them by --set KNOB=A,B,C'
    """
    advice = replacements().get(kind, {}).get(str(name))
    return None if advice is None else f"{name} was removed: {advice}"


def not_installed(package: str, extra: str) -> str | None:
    """Returns the error text for a missing optional package, with the command that installs it; None if it is
    installed.
    """
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: pip install 'redline[{extra}]'"


MISSPELT = 0.93
"""Similarity of names, by `difflib`, from which one is a misspelling of the other: a missing letter in 8, a wrong one in 15."""


def meant(name: str, absent: Iterable[str]) -> str | None:
    """Returns the absent name of which a name is most likely a misspelling; None if there is none.

    >>> meant("hidden_sise", ["hidden_act", "hidden_size"]), meant("seed", ["sped"])
    ('hidden_size', None)
    """
    names = sorted(absent)
    slips = [other for other in names if _one_slip(name, other)]
    return next(iter(slips or get_close_matches(name, names, n=1, cutoff=MISSPELT)), None)


def _one_slip(name: str, other: str) -> bool:
    """True if one letter is wrong, missing or too much, or two are exchanged, in names of six letters or more."""
    begin = _shared(name, other)
    end = _shared(name[begin:][::-1], other[begin:][::-1])
    rest, its_rest = name[begin : len(name) - end], other[begin : len(other) - end]
    exchanged = len(rest) == 2 and rest == its_rest[::-1]
    return min(len(name), len(other)) >= 6 and (exchanged or max(len(rest), len(its_rest)) == 1)


def _shared(name: str, other: str) -> int:
    """Returns the number of letters that two names begin with."""
    same = (letter == its_letter for letter, its_letter in zip(name, other))
    return next((place for place, equal in enumerate(same) if not equal), min(len(name), len(other)))


def nearest(name: object, known: Iterable[object]) -> str:
    """Returns `; did you mean 'NAME'?` with the nearest known name; empty if none is similar."""
    near = get_close_matches(str(name), sorted(str(candidate) for candidate in known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
