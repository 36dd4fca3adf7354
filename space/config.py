"""One point of a space."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import SpaceError, unknown
from .values import Value, plain


class Config(Mapping[str, Value]):
    """An immutable mapping of knob to value, in the order of the space's knobs.

    Two configurations are equal when they hold the same knobs with the same values of the same types:
    `Config(tp=1)` differs from `Config(tp=True)` and from `Config(tp=1.0)`. The order does not count.

    Raises:
        SpaceError: a value is not a finite bool, int, float, str or None.
    """

    __slots__ = ("_canonical", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise SpaceError(f"a Config is made of a mapping of knob to value, but got {values!r}")
        merged = {**(values or {}), **more}
        for name in merged:
            if not isinstance(name, str):
                raise SpaceError(f"a knob's name is a text, but got {name!r}")
        self._set({name: plain(value, f"the value of '{name}'") for name, value in merged.items()})

    def _set(self, values: dict[str, Value]) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_canonical", None)

    @classmethod
    def _of(cls, values: dict[str, Value]) -> "Config":
        """Of values that are known to be plain; takes `values` over without a copy."""
        self = object.__new__(cls)
        self._set(values)
        return self

    @property
    def id(self) -> str:
        """Ten hex digits of the SHA-256 of the canonical JSON; the same in every process."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:10]

    def replace(self, **values: Any) -> "Config":
        """A copy with other values for some of its knobs. Derived knobs are not recomputed:
        `space.config(...)` does that.

        Raises:
            SpaceError: a knob that this configuration does not hold.
        """
        for name in values:
            if name not in self._values:
                raise SpaceError(unknown("knob", name, self._values))
        return Config({**self._values, **values})

    def to_dict(self) -> dict[str, Value]:
        """A plain dictionary, ready for JSON and YAML."""
        return dict(self._values)

    def _json(self) -> str:
        if self._canonical is None:
            text = json.dumps(self._values, sort_keys=True, separators=(",", ":"), allow_nan=False)
            object.__setattr__(self, "_canonical", text)
        return self._canonical

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a knob, or `default` where the knob is absent."""
        return self._values.get(name, default)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Config):
            return self._values is other._values or self._json() == other._json()
        if isinstance(other, Mapping):
            return self._values.keys() == other.keys() and all(
                type(value) is type(other[name]) and value == other[name]
                for name, value in self._values.items()
            )
        return NotImplemented

    def __hash__(self) -> int:
        # Not hash(text): sets of configurations iterate alike under every PYTHONHASHSEED.
        return int(self.id, 16)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Config is immutable; use config.replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Config is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (dict(self._values),)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def _restore(values: dict[str, Value]) -> Config:
    return Config._of(values)
