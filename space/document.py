"""Spaces as plain lists and mappings, and back."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..errors import SpaceError, unknown
from .consistency import as_expression
from .expression import Expression
from .grammar import parse
from .knob import Knob
from .rules import Constraint, Rule
from .values import FLAG, INTEGER

KeyPath = tuple[str | int, ...]

_LONG = 8  # more integers than this are written as a range where they are one
MOST_KNOBS, MOST_CONSTRAINTS = 500, 500
"""Of a space that is read, knobs and derived ones each."""
MOST_TERMS = 10_000
"""Names in the rule of a derived knob once the derived knobs it mentions are written out."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_SECTIONS = ("knobs", "derived", "constraints")
_KNOB_KEYS = {
    "choice": ("name", "type", "values", "default", "when", "help", "others", "monotone_memory"),
    "flag": ("name", "type", "values", "default", "when", "help", "monotone_memory"),
    "integer": (
        "name",
        "type",
        "low",
        "high",
        "step",
        "powers_of_two",
        "values",
        "default",
        "when",
        "help",
        "others",
        "monotone_memory",
    ),
}


# -- writing -------------------------------------------------------------------------------------------------


def write_dict(
    by_name: Mapping[str, Knob],
    knobs: Iterable[Knob],
    constraints: Sequence[Constraint],
    *,
    describe_callables: bool,
) -> dict[str, Any]:
    """See `Space.to_dict`."""
    knobs = list(knobs)

    def text(rule: Rule, what: str, *, condition: bool = True) -> Any:
        if isinstance(rule, Expression):
            return rule.text
        same = as_expression(by_name, rule)
        if same is not None and (same.kind == FLAG or not condition):
            return same.text
        if describe_callables:
            return {"callable": rule.text}
        raise SpaceError(
            f"{what}, `{rule.text}`, is a Python callable that no text of the grammar stands for; write it "
            "as an expression over the knobs, with & | ~, minimum, maximum and isin"
        )

    out: dict[str, Any] = {"knobs": [_entry(knob, text) for knob in knobs if not knob.derived]}
    derived = [knob for knob in knobs if knob.derived]
    if derived:
        out["derived"] = [
            {
                "name": knob.name,
                "value": text(knob.rule, f"the rule of derived knob '{knob.name}'", condition=False),
            }
            | ({"help": knob.help} if knob.help else {})
            for knob in derived
        ]
    if constraints:
        out["constraints"] = [
            {"require": text(each.rule, "the constraint" + (f" '{each.reason}'" if each.reason else ""))}
            | ({"reason": each.reason} if each.reason else {})
            for each in constraints
        ]
    return out


def _entry(knob: Knob, text: Callable[[Rule, str], Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"name": knob.name}
    values = knob.values
    step = values[1] - values[0] if knob.kind == INTEGER and len(values) > _LONG else 0
    if knob.kind == FLAG:
        out["type"] = "flag"
        if values != (False, True):
            out["values"] = list(values)
    elif step > 0 and values == tuple(range(values[0], values[-1] + 1, step)):
        out |= {"type": "integer", "low": values[0], "high": values[-1]} | (
            {"step": step} if step > 1 else {}
        )
    else:
        out["values"] = list(values)
    if knob.default != values[0]:
        out["default"] = knob.default
    if knob.when is not None:
        out["when"] = text(knob.when, f"when= of knob '{knob.name}'")
    if knob.help:
        out["help"] = knob.help
    if knob.others is not None:
        out["others"] = list(knob.others)
    if knob.monotone_memory:
        out["monotone_memory"] = knob.monotone_memory
    return out


# -- reading -------------------------------------------------------------------------------------------------


class Declarations(Protocol):
    """What declares the knobs and constraints that are read: a Space."""

    @property
    def by_name(self) -> Mapping[str, Knob]:
        """Those declared so far."""

    def choice(self, name: str, values: Sequence[Any], **options: Any) -> Knob:
        """A knob of these values."""

    def integer(self, name: str, low: int, high: int, **options: Any) -> Knob:
        """A knob of these integers."""

    def derive(self, name: str, rule: Any, help: str = "") -> Knob:
        """A derived knob."""

    def require(self, rule: Any, reason: str = "") -> None:
        """A constraint."""

    def arrange(self, derived: Sequence[str]) -> None:
        """The order of the derived knobs."""


Declared = TypeVar("Declared", bound=Declarations)


def read_dict(space: Declared, data: Any, places: "Places | None" = None) -> Declared:
    """See `Space.from_dict`; `places` words where an entry stands."""
    _Reader(space, places or Places()).read(data)
    return space


class Places:
    """Where an entry stands, for messages: its path of keys."""

    def locate(self, path: KeyPath, error: SpaceError | None = None) -> str:
        """The start of a message about the entry at `path`, or about a place inside its text."""
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        return f"{keys}: " if keys else ""

    def message(self, path: KeyPath, error: SpaceError) -> str:
        """The whole message of an error about the entry at `path`."""
        return f"{self.locate(path)}{error}"


class _Reader(Mapping[str, Knob]):
    """Builds a space out of plain data. It is also the knobs that the grammar sees: derived knobs come into
    being when the first rule mentions them, so that the sections of a file need no order among them."""

    def __init__(self, space: Declarations, places: Places) -> None:
        self.space = space
        self.places = places
        self.pending: dict[
            str, int
        ] = {}  # derived knobs that are not declared yet, by their place in the list
        self.entered: list[str] = []
        self.derived: list[Any] = []
        self.terms: dict[str, int] = {}

    # What the grammar asks for.

    def __getitem__(self, name: str) -> Knob:
        if name in self.pending:
            self.derive(name)
        return self.space.by_name[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.space.by_name
        yield from self.pending

    def __len__(self) -> int:
        return len(self.space.by_name) + len(self.pending)

    def items(self) -> Any:
        """The declared knobs; asking for values must not declare any."""
        return self.space.by_name.items()

    # Reading.

    def read(self, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise self.error(
                (), f"a space is a mapping with the keys {', '.join(_SECTIONS)}, but got {_short(data)}"
            )
        self.keys((), data, _SECTIONS)
        if "knobs" not in data:
            raise self.error((), "the key 'knobs' is missing")
        knobs, self.derived, constraints = (self.entries(data, section) for section in _SECTIONS)
        for at, entry in enumerate(self.derived):
            path = ("derived", at)
            self.keys(path, entry, ("name", "value", "help"))
            name = self.text(path, entry, "name")
            if name in self.pending:
                raise self.error((*path, "name"), f"knob '{name}' is declared already")
            self.pending[name] = at
        names = list(self.pending)
        for at, entry in enumerate(knobs):
            self.declare(("knobs", at), entry)
        for name in names:
            if name in self.pending:
                self.derive(name)
        self.space.arrange(names)
        for at, entry in enumerate(constraints):
            path = ("constraints", at)
            self.keys(path, entry, ("require", "reason"))
            rule = self.rule(path, entry, "require")
            reason = self.text(path, entry, "reason") if "reason" in entry else ""
            self.located((*path, "require"), self.space.require, rule, reason)

    def entries(self, data: Mapping[str, Any], section: str) -> list[Any]:
        found = data.get(section)
        if found is None and section != "knobs":
            return []
        if not isinstance(found, list | tuple):
            raise self.error((section,), f"'{section}' must be a list, but got {_short(found)}")
        most = MOST_CONSTRAINTS if section == "constraints" else MOST_KNOBS
        if len(found) > most:
            raise self.error((section,), f"'{section}' has {len(found):,} entries; {most} are the most")
        for at, entry in enumerate(found):
            if not isinstance(entry, Mapping):
                raise self.error(
                    (section, at), f"an entry of '{section}' is a mapping, but got {_short(entry)}"
                )
        return list(found)

    def declare(self, path: KeyPath, entry: Mapping[str, Any]) -> None:
        kind = entry.get("type", "integer" if "low" in entry or "high" in entry else "choice")
        if not isinstance(kind, str) or kind not in _KNOB_KEYS:
            raise self.error((*path, "type"), unknown("type", kind, _KNOB_KEYS))
        self.keys(path, entry, _KNOB_KEYS[kind])
        name = self.text(path, entry, "name")
        if name in self.pending:
            raise self.error((*path, "name"), f"knob '{name}' is declared twice: here and in 'derived'")
        options = {key: entry[key] for key in ("default", "monotone_memory", "others") if key in entry}
        if "when" in entry:
            options["when"] = self.rule(path, entry, "when")
        if "help" in entry:
            options["help"] = self.text(path, entry, "help")
        if kind == "integer" and "values" not in entry:
            missing = [key for key in ("low", "high") if key not in entry]
            if missing:
                raise self.error(path, f"knob '{name}' needs '{missing[0]}', or 'values'")
            options |= {key: entry[key] for key in ("step", "powers_of_two") if key in entry}
            if not isinstance(options.get("powers_of_two", False), bool):
                raise self.error((*path, "powers_of_two"), "'powers_of_two' is true or false")
            self.located(path, self.space.integer, name, entry["low"], entry["high"], **options)
            return
        if kind == "integer" and not {"low", "high", "step", "powers_of_two"}.isdisjoint(entry):
            raise self.error(path, f"knob '{name}' has both 'values' and bounds; give one of them")
        if "values" not in entry and kind != "flag":
            raise self.error(path, f"knob '{name}' needs 'values'")
        values = entry.get("values", [False, True])
        if kind == "flag" and (
            not isinstance(values, list | tuple) or any(type(each) is not bool for each in values)
        ):
            raise self.error(
                (*path, "values"), f"the values of flag '{name}' are true and false, but got {_short(values)}"
            )
        if kind == "flag":
            options.setdefault("default", False if False in values else None)
        self.located(path, self.space.choice, name, values, **options)

    def derive(self, name: str) -> None:
        path = ("derived", self.pending[name])
        if name in self.entered:
            cycle = " -> ".join([*self.entered[self.entered.index(name) :], name])
            raise self.error(path, f"derived knobs depend on each other: {cycle}")
        entry = self.derived[self.pending[name]]
        self.entered.append(name)
        rule = self.rule(path, entry, "value")
        self.terms[name] = sum(self.terms.get(each, 1) for each in _NAME.findall(entry["value"]))
        if self.terms[name] > MOST_TERMS:
            raise self.error(
                (*path, "value"),
                f"written out, the rule of derived knob '{name}' has {self.terms[name]:,} terms; {MOST_TERMS:,} are the most",
            )
        self.entered.pop()
        del self.pending[name]
        help_text = self.text(path, entry, "help") if "help" in entry else ""
        self.located(path, self.space.derive, name, rule, help_text)

    def rule(self, path: KeyPath, entry: Mapping[str, Any], key: str) -> Expression:
        if key not in entry:
            raise self.error(path, f"the key '{key}' is missing")
        given = entry[key]
        if isinstance(given, Mapping) and "callable" in given:
            raise self.error(
                (*path, key),
                f"`{given['callable']}` was a Python callable: only its source was kept, "
                "and a file is never run as Python; write it as an expression",
            )
        if not isinstance(given, str):
            raise self.error(
                (*path, key),
                f"'{key}' is an expression as text, such as tp * pp <= 8, but got {_short(given)}",
            )
        return self.located((*path, key), parse, given, self)

    def text(self, path: KeyPath, entry: Mapping[str, Any], key: str) -> str:
        if key not in entry:
            raise self.error(path, f"the key '{key}' is missing")
        if not isinstance(entry[key], str):
            raise self.error((*path, key), f"'{key}' must be a text, but got {_short(entry[key])}")
        return entry[key]

    def keys(self, path: KeyPath, entry: Mapping[str, Any], allowed: Sequence[str]) -> None:
        for key in entry:
            if key not in allowed:
                raise self.error(
                    path if not isinstance(key, str) else (*path, key), unknown("key", key, allowed)
                )

    def located(self, path: KeyPath, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except _Located:
            raise
        except SpaceError as error:
            raise _Located(self.places.message(path, error)) from error

    def error(self, path: KeyPath, problem: str) -> SpaceError:
        return _Located(self.places.locate(path) + problem)


class _Located(SpaceError):
    """An error that says where it is already."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
