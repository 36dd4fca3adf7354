"""Spaces as documents: plain lists and mappings, and YAML files.

Errors name the entry.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..base.errors import SpaceError, unknown
from ..base.reading import LARGEST_DOCUMENT, POWER, Malformed, parse_yaml, path_of, read_named
from ..base.writing import write_atomic
from .expression import Expression
from .grammar import GrammarError, parse
from .knob import DerivedKnob, Knob
from .operators import UNDEFINED
from .rules import Constraint, Predicate, Rule, RuleError
from .structure import Structure, reaching
from .valid_set import ValidSet
from .values import FLAG, INTEGER, Config

KeyPath = tuple[str | int, ...]

MOST_KNOBS, MOST_CONSTRAINTS = 500, 500
"""Largest number of knobs, and of derived knobs, of a space that is read."""
MOST_TERMS = 10_000
"""Largest number of names in the rule of a derived knob after the derived knobs in it are expanded."""
_MOST_NODES = 20_000
"""Largest number of nodes of a file."""
_LONG = 8  # more integers than this are written as a range if they form one
_COMPARED = 10_000  # points at which a lambda and its text are compared
_NAME = re.compile(r"[A-Za-z_]\w*")
_EXAMPLES = {
    "knobs": "; write {name: tp, values: [1, 2]}",
    "derived": "; write {name: dp, value: 8 // tp}",
    "constraints": "; write require: a * b <= 8",
}
_SECTIONS = tuple(_EXAMPLES)
_KEYS = ("name", "type", "values", "default", "when", "help", "monotone_memory")
_BOUNDS = {"integer": ("low", "high", "step", "powers_of_two"), "number": ("low", "high", "log", "count")}
_KNOB_KEYS = {
    "choice": (*_KEYS, "others"),
    "flag": _KEYS,
    **{kind: (*_KEYS, "others", *bounds) for kind, bounds in _BOUNDS.items()},
}


# -- writing -------------------------------------------------------------------------------------------------


def write_dict(
    by_name: Mapping[str, Knob],
    knobs: Iterable[Knob],
    constraints: Iterable[Constraint],
    *,
    describe_callables: bool,
) -> dict[str, Any]:
    """See `Space.to_dict`."""

    def write_rule(rule: Rule, subject: str, *, condition: bool = True) -> Any:
        if isinstance(rule, Expression):
            return rule.text
        same = _as_expression(by_name, rule)
        if same is not None and (same.kind == FLAG or not condition):
            return same.text
        if describe_callables:
            return {"callable": rule.text}
        raise SpaceError(
            f"{subject}, `{rule.text}`, is a Python callable that cannot be written in the grammar; write it "
            "as an expression over the knobs, with & | ~, minimum, maximum and isin"
        )

    sections: dict[str, list[Any]] = {"knobs": [], "derived": [], "constraints": []}
    for knob in knobs:
        if isinstance(knob, DerivedKnob):
            rule = write_rule(knob.rule, f"the rule of derived knob '{knob.name}'", condition=False)
            sections["derived"].append(_without_empty({"name": knob.name, "value": rule, "help": knob.help}))
        else:
            sections["knobs"].append(_entry(knob, write_rule))
    for constraint in constraints:
        rule = write_rule(constraint.rule, "the constraint" + (f" '{constraint.reason}'" if constraint.reason else ""))
        sections["constraints"].append(_without_empty({"require": rule, "reason": constraint.reason}))
    return {section: entries for section, entries in sections.items() if entries or section == "knobs"}


def _without_empty(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value != ""}


def _entry(knob: Knob, write_rule: Callable[[Rule, str], Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": knob.name}
    values = knob.values
    integers = [value for value in values if isinstance(value, int)] if knob.kind == INTEGER else []
    step = integers[1] - integers[0] if len(integers) > _LONG else 0
    if knob.kind == FLAG:
        entry["type"] = "flag"
        if values != (False, True):
            entry["values"] = list(values)
    elif step > 0 and integers == list(range(integers[0], integers[-1] + 1, step)):
        entry |= {"type": "integer", "low": values[0], "high": values[-1]}
        if step > 1:
            entry["step"] = step
    else:
        entry["values"] = list(values)
    if knob.default != values[0]:
        entry["default"] = knob.default
    if knob.when is not None:
        entry["when"] = write_rule(knob.when, f"when= of knob '{knob.name}'")
    if knob.help:
        entry["help"] = knob.help
    if knob.others is not None:
        entry["others"] = list(knob.others)
    if knob.monotone_memory:
        entry["monotone_memory"] = knob.monotone_memory
    return entry


def _as_expression(knobs: Mapping[str, Knob], rule: Predicate) -> Expression | None:
    """The expression of a lambda, if its source is in the grammar and names only its knobs.

    Python and the grammar may differ, for example in a division by zero, so both are compared on the values of the
    rule's knobs: on every combination, or on a sample of 10,000. None if they disagree anywhere.
    """
    if rule.grammar is None:
        return None
    try:
        expression = parse(rule.grammar, {name: knobs[name] for name in rule.names})
        points = ValidSet(Structure(reaching(knobs, rule.names), [])).sample(_COMPARED, 0)
        return expression if all(_agree(expression, rule, point) for point in points) else None
    except (GrammarError, RuleError):
        return None


def _agree(expression: Expression, rule: Predicate, point: Config) -> bool:
    if any(name not in point for name in rule.names):
        return True  # does not apply
    result, value = rule.call(point), expression.scalar(point.__getitem__)
    if result is UNDEFINED or value is UNDEFINED:
        return result is value
    return type(result) is type(value) and result == value


def write_yaml(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """See `Space.to_yaml`; writes the result of `Space.to_dict`."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes lists of values on one line, everything else on separate lines."""

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", POWER, list("-+0123456789"))
    Dumper.add_representer(
        _Inline,
        lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
    )
    for entry in data["knobs"]:
        entry.update({key: _Inline(entry[key]) for key in ("values", "others") if key in entry})
    content = yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
    target = path_of(path)
    try:
        write_atomic(target, content.encode(), durable=False)
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpaceError(f"cannot write the space to {target}: {reason}") from error


class _Inline(list[Any]):
    """A list written on one line."""


# -- reading -------------------------------------------------------------------------------------------------


def read_dict(space: Any, data: Any) -> None:
    """See `Space.from_dict`; declares the contents of `data` in an empty `Space`."""
    _Reader(space).read(data)


def read_yaml(space: Any, path: str | os.PathLike[str]) -> None:
    """See `Space.from_yaml`; declares the contents of a file in an empty `Space`."""
    try:
        content = read_named(path_of(path), at_most=LARGEST_DOCUMENT)
        data = parse_yaml(content, nodes=_MOST_NODES, ours=True)
    except OSError as error:
        raise SpaceError(f"cannot read the space from {path}: {error.strerror or error}") from error
    except Malformed as error:
        raise SpaceError(f"{path}: not valid YAML: {error}") from error
    if data is None:
        raise SpaceError(f"{path} is empty; a space has at least the key 'knobs'")
    _Reader(space, str(path)).read(data)


class _Reader(Mapping[str, Knob]):
    """Builds a space from plain data. It is also the grammar's mapping of knobs: derived knobs are declared when the
    first rule mentions them, so that the sections of a file need no order.
    """

    def __init__(self, space: Any, file: str = "") -> None:
        self.space = space
        self.file = file
        self.pending: dict[str, int] = {}  # derived knobs not declared yet, by their place in the list
        self.entered: list[str] = []
        self.derived: list[Any] = []
        self.terms: dict[str, int] = {}

    # Mapping interface of the grammar.

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
            listed = ", ".join(_SECTIONS)
            raise self.error((), f"a space is a mapping with the keys {listed}, but got {_short(data)}")
        self.refuse_unknown((), data, _SECTIONS)
        if "knobs" not in data:
            raise self.error((), "the key 'knobs' is missing")
        knobs, self.derived, constraints = (self.entries(data, section) for section in _SECTIONS)
        for index, entry in enumerate(self.derived):
            path = ("derived", index)
            self.refuse_unknown(path, entry, ("name", "value", "help"))
            name = self.text(path, entry, "name")
            if name in self.pending:
                raise self.error((*path, "name"), f"knob '{name}' is declared already")
            self.pending[name] = index
        names = list(self.pending)
        for index, entry in enumerate(knobs):
            self.declare(("knobs", index), entry)
        for name in names:
            if name in self.pending:
                self.derive(name)
        self.space.arrange(names)
        for index, entry in enumerate(constraints):
            path = ("constraints", index)
            self.refuse_unknown(path, entry, ("require", "reason"))
            rule = self.rule(path, entry, "require")
            reason = self.text(path, entry, "reason", "")
            self.located((*path, "require"), self.space.require, rule, reason)

    def entries(self, data: Mapping[str, Any], section: str) -> list[Any]:
        entries = data.get(section)
        if entries is None and section != "knobs":
            return []
        if not isinstance(entries, list | tuple):
            raise self.error((section,), f"'{section}' must be a list, but got {_short(entries)}")
        most = MOST_CONSTRAINTS if section == "constraints" else MOST_KNOBS
        if len(entries) > most:
            raise self.error((section,), f"'{section}' has {len(entries):,} entries; {most} are the most")
        for index, entry in enumerate(entries):
            if not isinstance(entry, Mapping):
                problem = f"an entry of '{section}' is a mapping, but got {_short(entry)}{_EXAMPLES[section]}"
                raise self.error((section, index), problem)
        return list(entries)

    def declare(self, path: KeyPath, entry: Mapping[str, Any]) -> None:
        bounded = "low" in entry or "high" in entry
        real = any(isinstance(entry.get(key), float) for key in ("low", "high")) or "log" in entry
        kind = entry.get("type", ("number" if real else "integer") if bounded else "choice")
        if not isinstance(kind, str) or kind not in _KNOB_KEYS:
            raise self.error((*path, "type"), unknown("type", kind, _KNOB_KEYS))
        self.refuse_unknown(path, entry, _KNOB_KEYS[kind])
        name = self.text(path, entry, "name")
        if name in self.pending:
            raise self.error((*path, "name"), f"knob '{name}' is declared twice: here and in 'derived'")
        options = {key: entry[key] for key in ("default", "monotone_memory", "others") if key in entry}
        if "when" in entry:
            options["when"] = self.rule(path, entry, "when")
        options["help"] = self.text(path, entry, "help", "")
        bounds = {key: entry[key] for key in _BOUNDS.get(kind, ()) if key in entry}
        if kind in _BOUNDS and "values" not in entry:
            if "low" not in bounds or "high" not in bounds:
                missing = "high" if "low" in bounds else "low"
                raise self.error(path, f"knob '{name}' needs '{missing}', or 'values'")
            for switch in ("powers_of_two", "log"):
                if not isinstance(bounds.get(switch, False), bool):
                    raise self.error((*path, switch), f"'{switch}' is true or false")
            self.located(path, getattr(self.space, kind), name, **bounds, **options)
            return
        if bounds:
            raise self.error(path, f"knob '{name}' has both 'values' and bounds; give one of them")
        if "values" not in entry and kind != "flag":
            raise self.error(path, f"knob '{name}' needs 'values'")
        values = entry.get("values", [False, True])
        if kind == "flag":
            if not isinstance(values, list | tuple) or any(type(value) is not bool for value in values):
                problem = f"the values of flag '{name}' are true and false, but got {_short(values)}"
                raise self.error((*path, "values"), problem)
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
        terms = self.terms[name] = sum(self.terms.get(term, 1) for term in _NAME.findall(entry["value"]))
        if terms > MOST_TERMS:
            problem = f"the rule of derived knob '{name}' has {terms:,} terms; {MOST_TERMS:,} are the most"
            raise self.error((*path, "value"), f"written out, {problem}")
        self.entered.pop()
        del self.pending[name]
        self.located(path, self.space.derive, name, rule, self.text(path, entry, "help", ""))

    # One entry of a mapping.

    def required(self, path: KeyPath, entry: Mapping[str, Any], key: str) -> Any:
        if key not in entry:
            raise self.error(path, f"the key '{key}' is missing")
        return entry[key]

    def rule(self, path: KeyPath, entry: Mapping[str, Any], key: str) -> Expression:
        source, place = self.required(path, entry, key), (*path, key)
        if isinstance(source, Mapping) and "callable" in source:
            raise self.error(
                place,
                f"`{source['callable']}` was a Python callable: only its source was kept, "
                "and a file is never run as Python; write it as an expression",
            )
        if not isinstance(source, str):
            problem = f"'{key}' is an expression as text, such as tp * pp <= 8, but got {_short(source)}"
            raise self.error(place, problem)
        return self.located(place, parse, source, self)

    def text(self, path: KeyPath, entry: Mapping[str, Any], key: str, default: str | None = None) -> str:
        if key not in entry and default is not None:
            return default
        value = self.required(path, entry, key)
        if not isinstance(value, str):
            raise self.error((*path, key), f"'{key}' must be a text, but got {_short(value)}")
        return value

    def refuse_unknown(self, path: KeyPath, entry: Mapping[str, Any], allowed: Sequence[str]) -> None:
        for key in entry:
            if key not in allowed:
                raise self.error((*path, key) if isinstance(key, str) else path, unknown("key", key, allowed))

    def located(self, path: KeyPath, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except _Located:
            raise
        except SpaceError as error:
            raise self.error(path, str(error)) from error

    def error(self, path: KeyPath, problem: str) -> SpaceError:
        """Returns the error of the entry at a path of keys."""
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        return _Located(f"{', '.join(filter(None, (self.file, keys)))}: {problem}".removeprefix(": "))


class _Located(SpaceError):
    """An error that already contains its location."""


def _short(value: Any) -> str:
    excerpt = repr(value)
    return excerpt if len(excerpt) <= 80 else excerpt[:77] + "..."
