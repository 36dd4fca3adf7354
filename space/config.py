"""A point of a space."""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

from ..base.errors import SpaceError, unknown
from .values import Value, python_scalar


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
