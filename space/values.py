"""Values of knobs (valid types, kinds, and conversion of other values), and configurations of them."""

import hashlib
import json
import math
import numbers
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import repeat
from typing import Any, TypeGuard

from ..base.errors import SpaceError, unknown

Value = bool | int | float | str | None

INTEGER_LIMIT = 2**63 - 1
"""Largest magnitude of an integer: that of int64, symmetric."""

FLAG, INTEGER, NUMBER, TEXT = "flag", "integer", "number", "text"
NUMERIC = frozenset({INTEGER, NUMBER})
_ARTICLE = {FLAG: "a flag", INTEGER: "an integer", NUMBER: "a number", TEXT: "text"}


def python_scalar(value: Any, subject: str = "value") -> Value:
    """Converts `value` to a Python scalar, such as numpy's scalars.

    Raises:
        SpaceError: not a bool, int, float, str or None; not finite; or an integer beyond 64 bits.
    """
    kind = type(value)
    if kind is bool or kind is str or value is None:
        return value
    if kind is not int and kind is not float:
        if isinstance(value, str):
            return str(value)
        if getattr(value, "dtype", None) is not None and getattr(value, "ndim", None) == 0:
            value = value.item()
            if type(value) in (bool, str):
                return value
        if isinstance(value, numbers.Integral):
            value = int(value)
        elif isinstance(value, numbers.Real):
            value = float(value)
        else:
            raise SpaceError(
                f"{subject} must be a bool, an int, a float, a text or None, but got {value!r} "
                f"of type {type(value).__name__}{_instead_of(value)}"
            )
    if isinstance(value, int):
        if abs(value) > INTEGER_LIMIT:
            raise SpaceError(f"{subject} must fit 64 bits, but got {value}")
        return value
    if not math.isfinite(value):
        raise SpaceError(f"{subject} must be finite, but got {value}")
    return value + 0.0  # -0.0 and 0.0 are the same value


def _instead_of(value: Any) -> str:
    """The declaration to write for a tuple of plain values; empty for anything else."""
    if (
        not isinstance(value, tuple | list)
        or len(value) < 2
        or not all(isinstance(component, int | float | str) for component in value)
    ):
        return ""
    joined = "x".join(map(str, value))
    names = [f"part{number}" for number in range(1, len(value) + 1)]
    row = ", ".join(f"'{name}': {component!r}" for name, component in zip(names, value))
    return (
        f". Declare a knob for each part and space.require_one_of([{{{row}}}, ...]), which lets the search learn from "
        f"each part, or give texts such as '{joined}' and split them: config[...].split('x')"
    )


def kind_of(value: Value) -> str:
    """Kind of one plain value; None counts as text."""
    if isinstance(value, bool):
        return FLAG
    if isinstance(value, int):
        return INTEGER
    return NUMBER if isinstance(value, float) else TEXT


def is_number(value: Value) -> TypeGuard[int | float]:
    """True if a plain value is an integer or a float; a flag is neither."""
    return kind_of(value) in NUMERIC


def kind_of_all(values: Iterable[Value], subject: str) -> str:
    """The common kind of all `values`; integers among floats are numbers.

    Raises:
        SpaceError: the values are of different kinds.
    """
    kinds: dict[str, Value] = {}
    for value in values:
        kinds.setdefault(kind_of(value), value)
    if set(kinds) == NUMERIC:
        return NUMBER
    if len(kinds) > 1:
        texts = [f"{value!r}" if value is None else f"{value!r} ({_ARTICLE[kind]})" for kind, value in kinds.items()]
        raise SpaceError(
            f"{subject}: {' and '.join(texts)} are of different kinds; a knob's values must be of one kind"
        )
    return next(iter(kinds))


def coerce(value: Any, kind: str | None, subject: str) -> Value:
    """Converts `value` to the type of a knob of `kind`: 0 becomes 0.0 for a number, 2.0 becomes 2 for an integer.

    Raises:
        SpaceError: `value` is of another kind. True is not 1, and '2' is not 2.
    """
    value = python_scalar(value, subject)
    value_kind = kind_of(value)
    if kind is None or value_kind == kind:
        return value
    if kind == NUMBER and value_kind == INTEGER:
        return float(value)
    if kind == INTEGER and value_kind == NUMBER and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    nature = "" if value is None else f", which is {_ARTICLE[value_kind]}"
    raise SpaceError(f"{subject} is {_ARTICLE[kind]}, but got {value!r}{nature}")


def from_text(text: str, kind: str | None, subject: str) -> Value:
    """Parses `text` for a knob of `kind`, as on a command line.

    Raises:
        SpaceError: `text` is not of that kind.
    """
    text = text.strip()
    if kind == TEXT:
        return text
    lowered = text.lower()
    if kind in (FLAG, None) and lowered in _FLAGS:
        return _FLAGS[lowered]
    if kind != FLAG:
        for read in (int, float):
            try:
                return coerce(read(text), kind, subject)
            except ValueError:  # a SpaceError is a ValueError too
                continue
    if kind is None:
        return text
    hint = "; give true or false" if kind == FLAG else ""
    raise SpaceError(f"{subject} is {_ARTICLE[kind]}, but got {text!r}{hint}")


_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def nearest(value: Value, values: Iterable[Value]) -> Value:
    """Member of `values` closest to `value`; None if nothing is close."""
    values = list(values)
    if is_number(value):
        close = [member for member in values if is_number(member)]
        return min(close, key=lambda number: abs(number - value)) if close else None
    match = get_close_matches(str(value), [str(member) for member in values], n=1, cutoff=0.4)
    return next((member for member in values if str(member) == match[0]), None) if match else None


def listing(values: Iterable[Value], most: int = 12) -> str:
    """Formats the values, shortened in the middle."""
    texts = [value if isinstance(value, str) else str(value) for value in values]
    if len(texts) > most:
        texts = [*texts[: most - 2], "...", texts[-1]]
    return ", ".join(texts)


def article(kind: str) -> str:
    """`kind` with its article, for messages."""
    return _ARTICLE[kind]


class Config(Mapping[str, Value]):
    """An immutable mapping of knob to value, in the order of the space's knobs.

    Two configurations are equal if they have the same knobs with the same values of the same types: `Config(tp=1)`
    differs from `Config(tp=True)` and from `Config(tp=1.0)`. The order does not count.

    Raises:
        SpaceError: a value is not a finite bool, int, float, str or None.
    """

    # Configurations of one space share `_places`: a million of them need little more memory than their values.
    __slots__ = ("_hash", "_places", "_row")
    _hash: int
    _places: dict[str, int]
    _row: tuple[Value, ...]

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise SpaceError(f"a Config is made of a mapping of knob to value, but got {values!r}")
        merged = {**(values or {}), **more}
        for name in merged:
            if not isinstance(name, str):
                raise SpaceError(f"a knob's name is a text, but got {name!r}")
        _set_row(self, tuple([python_scalar(value, f"the value of '{name}'") for name, value in merged.items()]))
        _set_places(self, {name: place for place, name in enumerate(merged)})

    @property
    def id(self) -> str:
        """Ten hex digits of the SHA-256 of the canonical JSON; the same in every process."""
        return f"{hash(self):010x}"

    def replace(self, **values: Any) -> "Config":
        """A copy with other values for some of its knobs. Derived knobs are not recomputed: `space.config(...)` does
        that.

        Raises:
            SpaceError: this configuration does not have the knob.
        """
        for name in values:
            if name not in self._places:
                raise SpaceError(unknown("knob", name, self._places))
        return Config({**self, **values})

    def to_dict(self) -> dict[str, Value]:
        """A plain dictionary, ready for JSON and YAML."""
        return dict(zip(self._places, self._row))

    def __getitem__(self, name: str) -> Value:
        return self._row[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._row)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Config) and self._places is other._places:
            return self._row == other._row  # of one space, in which a knob's values have one type
        if isinstance(other, Mapping):
            return self._places.keys() == other.keys() and all(
                type(value) is type(other[name]) and value == other[name] for name, value in self.items()
            )
        return NotImplemented

    def __hash__(self) -> int:
        # Not hash(text): sets of configurations have the same order under every PYTHONHASHSEED.
        try:
            return self._hash
        except AttributeError:
            canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
            _set_hash(self, int(hashlib.sha256(canonical.encode()).hexdigest()[:10], 16))
            return self._hash

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Config is immutable; use config.replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Config is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (tuple(self._places), self._row)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.items())})"


# The slots themselves: a Config's own attributes cannot be set.
_set_hash = Config.__dict__["_hash"].__set__
_set_places = Config.__dict__["_places"].__set__
_set_row = Config.__dict__["_row"].__set__


def configs(names: Iterable[str], rows: Iterable[tuple[Value, ...]]) -> list[Config]:
    """Returns a configuration for every row of plain values, one per name."""
    rows = list(rows)
    instances = list(map(object.__new__, repeat(Config, len(rows))))
    # Loops in C: this takes most of the time of listing a space.
    deque(map(_set_row, instances, rows), maxlen=0)
    deque(map(_set_places, instances, repeat({name: place for place, name in enumerate(names)})), maxlen=0)
    return instances


def _restore(names: tuple[str, ...], row: tuple[Value, ...]) -> Config:
    return configs(names, [row])[0]
