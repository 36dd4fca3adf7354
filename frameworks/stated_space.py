"""Builds a space from another tool's file, with notes on what could not be carried over."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import SpaceError, UsageError
from ..base.reading import LARGEST_DOCUMENT, Malformed, parse_json, parse_yaml, read_named, with_power
from ..knobs.strategy import STANDARD
from ..results.schema import shortened
from ..space import Space
from ..space.grammar import check_name
from ..space.values import Value, kind_of_all, python_scalar

_NAME = re.compile(r"\b[A-Za-z_]\w*")
_TEXT = re.compile(r"'[^']*'")


@dataclass(frozen=True, kw_only=True)
class ForeignSpace:
    """Search space of another tool on a known number of devices."""

    space: Space
    """Knobs and rules that were carried over."""
    notes: tuple[str, ...]
    """Notes for the user, including what was not carried over."""
    called: str
    """Description, with the name of its file."""
    stated: frozenset[str]
    """Knobs with a single value, which the file sets rather than varies."""
    options: tuple[tuple[str, str], ...] = ()
    """Options for a command, each with the template of its value."""
    render: tuple[str, ...] = ()
    """Files that a command reads, in the syntax of `--render`."""
    metric: str | None = None
    """Metric to read from its output."""
    direction: str | None = None
    """Direction of the metric."""


@dataclass
class Draft:
    """A space under construction, filled in by the reader of a format.

    Args:
        devices: devices of one trial.
        global_batch: requested samples of a step.
        path: the file; None for a Python object.
    """

    devices: int
    global_batch: int | None = None
    path: Path | None = None
    space: Space = field(default_factory=Space, init=False)
    options: list[tuple[str, str]] = field(default_factory=list, init=False)
    render: list[str] = field(default_factory=list, init=False)
    metric: str | None = field(default=None, init=False)
    direction: str | None = field(default=None, init=False)
    _notes: list[str] = field(default_factory=list, init=False)
    _renamed: list[str] = field(default_factory=list, init=False)
    _off: list[str] = field(default_factory=list, init=False)

    def knob(self, shown: str, values: Sequence[Any], *, name: str = "", when: str | None = None) -> bool:
        """Declares a knob with these values, the first of them its default; adds a note if that is not possible.

        Args:
            shown: name in the file.
            values: values in the file.
            name: name of the knob; by default derived from `shown`.
            when: condition under which it exists.
        """
        name = name or identifiers([shown], taken=self.space.by_name)[shown]
        try:
            declare(self.space, name, plain(values), when=when)
        except SpaceError as error:
            self.leave(shown, str(error))
            return False
        if name != shown:
            self._renamed.append(f"{shown} is {name}")
        return True

    def require(self, rule: str, reason: str) -> None:
        """Declares a condition, if all knobs in it exist.

        Raises:
            SpaceError: no configuration is left.
        """
        if all(name in self.space.by_name or name == "in" for name in _NAME.findall(_TEXT.sub("", rule))):
            self.space.require(rule, reason)

    def off(self, shown: str) -> None:
        """Records a setting that the file leaves off: it is not a knob, and is reported once."""
        self._off.append(shown)

    def leave(self, what: str, reason: str) -> None:
        """Adds a note on what is not carried over, and why."""
        self._notes.append(f"not carried over: {what}: {reason}")

    def leave_all(self, found: Iterable[str], reasons: dict[str, str], within: str = "") -> None:
        """Adds notes on settings that are not carried over, each with its reason; empty ones are ignored."""
        for key in found:
            if reason := reasons.get(key, "this setting is not known here"):
                self.leave(f"{within}{key}", reason)

    def say(self, note: str) -> None:
        """Adds a note on what was carried over differently."""
        self._notes.append(note)

    def finish(self, of: str) -> ForeignSpace:
        """Returns the space.

        Raises:
            UsageError: nothing was carried over.
        """
        knobs = [knob for knob in self.space.knobs if not knob.derived]
        if not knobs:
            reason = "; ".join(self._notes)
            raise UsageError(f"{of}: nothing in it can be tuned here{f'. {reason}' if reason else ''}")
        notes = [f"the space is that of {of}"]
        if self._renamed:
            notes.append(f"by the names of knobs here, {', '.join(self._renamed)}")
        notes += self._notes
        if self._off:
            notes.append(f"off there, and so no knobs: {', '.join(self._off)}")
        return ForeignSpace(
            space=self.space,
            notes=tuple(notes),
            called=of,
            stated=frozenset(knob.name for knob in knobs if len(knob.values) == 1),
            options=tuple(self.options),
            render=tuple(self.render),
            metric=self.metric,
            direction=self.direction,
        )


def plain(values: Sequence[Any]) -> list[Value]:
    """Converts values to those of one knob, in order, without duplicates.

    Raises:
        SpaceError: one is a list or an object, or they are of different kinds.
    """
    scalars = [python_scalar(with_power(each), "a value") for each in values]
    if scalars:
        kind_of_all(scalars, "it")
    return list(dict.fromkeys(scalars))


def identifiers(shown: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """Valid names of knobs for names that may be invalid, such as `optimizer.lr`; distinct for distinct names."""
    out: dict[str, str] = {}
    used = set(taken)
    for each in shown:
        name = re.sub(r"[^A-Za-z0-9_]", "_", each)
        try:
            check_name(name)
        except SpaceError:  # empty, starting with a digit, or a keyword of the grammar
            name = f"_{name}"
        number, base = 1, name
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        out[each] = name
    return out


def declare(space: Space, name: str, values: Sequence[Any], *, when: str | None = None) -> None:
    """Declares a knob by its values, the first of them its default. Numbers are sorted. A knob with a standard name
    declares its standard effect on memory.

    Raises:
        SpaceError: the name or the values are invalid for a knob.
    """
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    along = STANDARD[name].memory if numbers and name in STANDARD else 0
    default = values[0] if values else None
    space.choice(name, sorted(values) if numbers else values, default=default, when=when, monotone_memory=along)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A tool's format of search spaces."""

    name: str
    holds: str
    """Characteristic contents, for messages."""
    recognises: Callable[[Any], bool]
    """True for a document of this format."""
    read: Callable[[Any, Draft], None]
    """Reads a document into a draft."""


# -- documents ------------------------------------------------------------------------------------------------


def read_document(path: Path) -> Any:
    """Contents of a file: JSON if its name ends in that, otherwise YAML.

    Raises:
        UsageError: it cannot be read, or is neither.
    """
    kind, parse = ("JSON", parse_json) if path.suffix == ".json" else ("YAML", parse_yaml)
    try:
        return parse(read_named(path, at_most=LARGEST_DOCUMENT))
    except OSError as error:
        raise UsageError(f"the space's file {path} cannot be read: {error.strerror or error}") from error
    except Malformed as error:
        raise UsageError(f"the space's file {path} is not {kind}: {error}") from error


def section(given: Any, shown: str) -> Mapping[str, Any]:
    """A part of a document that is a mapping; empty if it is missing.

    Raises:
        UsageError: it is not a mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"{shown} must be a mapping, but is {given!r}")
    return given


# -- degrees: factors of the number of devices, as in the tuners of Megatron and Paddle ----------------------------

MOST_LISTED = 16
"""Largest number of integers of a range that are all taken."""
LARGEST_SIZE = 1 << 20
"""Largest size in a file whose divisors are values of a knob."""
MOST_VALUES = 1 << 12
"""Largest number of values of a range in a file."""


def listed(given: Any, auto: Sequence[Any]) -> list[Any]:
    """Values of a setting, or `auto`'s values."""
    if isinstance(given, str) and given.lower() == "auto":
        return list(auto)
    return list(given) if isinstance(given, list) else [given]


def whole_numbers(values: Sequence[Any], shown: str) -> list[int]:
    """Checks values of a degree or a batch.

    Raises:
        UsageError: one is not a whole number of at least 1, or there are none.
    """
    if invalid := [each for each in values if type(each) is not int or each < 1]:
        raise UsageError(f"{shown} must be whole numbers of at least 1 or 'auto', but contains {invalid[0]!r}")
    if not values:
        raise UsageError(f"{shown} must have values, but is empty")
    return list(values)


def whole_range(low: int, high: int, shown: str) -> list[int]:
    """Whole numbers from `low` to `high`, both included.

    Raises:
        UsageError: they are more than `MOST_VALUES`.
    """
    if high - low >= MOST_VALUES:
        raise UsageError(
            f"{shown} from {shortened(low)} to {shortened(high)} has more than {MOST_VALUES:,} values: give fewer, or a list"
        )
    return list(range(low, high + 1))


def declare_degrees(draft: Draft, degrees: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """Declares degrees whose product divides the devices. Returns the expression of that product, empty if all are 1.

    Args:
        draft: the space.
        degrees: for each knob its name in the file, and its values.

    Raises:
        UsageError: no value of one degree divides the devices.
    """
    factors = []
    for name, (shown, values) in degrees.items():
        fitting = divisors(draft.devices, values)
        left = [str(each) for each in values if each not in fitting]
        if not fitting:
            raise UsageError(f"{shown} {', '.join(left)}: none of them divides {draft.devices} devices; see --devices")
        if left:
            draft.leave(f"{shown} {', '.join(left)}", f"it does not divide the {draft.devices} devices")
        if fitting == [1]:
            draft.off(f"{shown}=1")
        elif draft.knob(shown, fitting, name=name):
            factors.append(name)
    return " * ".join(factors)


def declare_micro_batch(draft: Draft, shown: str, given: Any, total: int | None, asked: bool) -> bool:
    """Declares `micro_batch`. Returns True if that was possible.

    Args:
        draft: the space.
        shown: name in the file.
        given: its values, or `auto`: the divisors of the global batch.
        total: samples of a step; None if unknown.
        asked: True if they were requested apart from the file.
    """
    auto = isinstance(given, str) and given.lower() == "auto"
    if auto and total is None:
        draft.leave(
            shown,
            "its range ends at the global batch, which is not given: --global-batch B, or --set micro_batch=1,2,4",
        )
        return False
    values = whole_numbers(divisors(total) if auto and total else listed(given, ()), shown)
    if auto and len(values) > MOST_LISTED:
        powers = [each for each in values if each & (each - 1) == 0 or each == total]
        draft.say(f"{shown}: {', '.join(map(str, powers))} of the {len(values)} divisors of the global batch {total}")
        values = powers
    elif not auto and total and not asked:
        draft.say(f"the global batch is {total}, as the file has it; --global-batch for another")
    return draft.knob(shown, values, name="micro_batch")


def share(draft: Draft, total: int, replicas: str) -> None:
    """Fixes the samples of a step, regardless of the micro-batch.

    Args:
        draft: the space, with a micro-batch.
        total: samples of a step.
        replicas: an expression for the number of replicas.
    """
    together = f"micro_batch * {replicas}"
    draft.space.derive("grad_accum", f"{total} // ({together})", help="micro-batches per optimizer step")
    draft.space.require(f"{together} * grad_accum == {total}", f"global batch {total}")


def divisors(total: int, among: Sequence[int] | None = None) -> list[int]:
    """Divisors of a number, or those of some numbers that divide it.

    >>> divisors(12), divisors(12, [5, 4, 2])
    ([1, 2, 3, 4, 6, 12], [4, 2])

    Raises:
        UsageError: all divisors of a number above `LARGEST_SIZE` are asked for.
    """
    if among is not None:
        return [each for each in among if each > 0 and total % each == 0]
    if total > LARGEST_SIZE:
        raise UsageError(f"a size must be at most {LARGEST_SIZE:,} for 'auto', but is {shortened(total)}: give a list")
    low = [each for each in range(1, math.isqrt(total) + 1) if total % each == 0]
    return sorted({*low, *(total // each for each in low)})
