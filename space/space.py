"""Spaces: knobs and constraints, and the set of configurations they allow."""

import copy
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from os import PathLike
from typing import Any

import numpy as np

from ..base.errors import SpaceError, unknown
from .document import read_dict, read_yaml, write_dict, write_yaml
from .enumeration import Choices
from .explanation import Point, check_alone, describe, emptied_by, has_value, resolve
from .knob import GRID, DerivedKnob, Knob, integer_values, number_values
from .rules import Constraint, Listed, Rule, RuleError, holds, read_condition, read_rule
from .structure import Structure, reaching
from .valid_set import ValidSet
from .values import Config, listing, nearest

DECLARING = ("choice", "integer", "flag", "derive")
"""Methods of a space that declare a knob."""


class Space:
    """Knobs and constraints, and the set of configurations they allow.

        >>> space = Space()
        >>> tp = space.choice("tp", [1, 2, 4, 8])
        >>> micro = space.choice("micro_batch", [1, 2, 4, 8])
        >>> dp = space.derive("dp", 8 // tp)
        >>> space.require(micro * dp <= 16, "memory")
        >>> len(space), space.explain({"tp": 1, "micro_batch": 8, "dp": 8})
        (13, 'violates `micro_batch * dp <= 16` (memory) with micro_batch=8, dp=8: 64 <= 16 is false')

    Rules are expressions (operators over knobs), texts of the same grammar, or callables whose parameters are knobs. A
    rule that mentions an absent knob (its `when=` is false) does not apply; a knob derived from an absent knob is
    absent. A division by zero, an overflow, None or NaN is not a value: a condition without a value is false, and a
    configuration with a derived knob without a value is not valid.

    Invalid declarations raise at once and do not change the space.
    """

    def __init__(self) -> None:
        self._knobs: dict[str, Knob] = {}  # in declaration order: each after those it depends on
        self._derived: list[str] = []  # in listing order
        self._constraints: list[Constraint] = []
        self.beyond: Any = None
        """Facts that the rules of a default space read beside knobs (`redline.knobs.rules.RuleContext`), for knobs that
        are added later."""
        self._valid: ValidSet | None = None
        # Choices that were valid at the last check: they answer most checks.
        self._witness: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        example = 'space.choice("lr", [1e-4, 3e-4])'
        raise AttributeError(
            f"a Space has no method '{name}'; {', '.join(DECLARING[:-1])} and {DECLARING[-1]} declare knobs; for other kinds, "
            f"give a list of values: {example}"
        )

    # -- declaration -----------------------------------------------------------------------------------------

    def choice(
        self,
        name: str,
        values: Sequence[Any],
        *,
        default: Any = None,
        when: Any = None,
        help: str = "",
        others: Sequence[Any] | None = None,
        monotone_memory: int = 0,
    ) -> Knob:
        """Declares a knob with these values, all flags, all numbers, or all texts (with or without None).

        Args:
            name: an identifier.
            values: at least one, in the order of enumeration.
            default: the value before tuning; the first of `values` if not given.
            when: condition on earlier knobs under which the knob exists.
            help: description, in a line.
            others: the only further values that `fix` and `override` accept; None for any of the same kind.
            monotone_memory: 1 if larger values need more memory, -1 if less.

        Raises:
            SpaceError: the name is taken, or there are no values, mixed values, or duplicates.
        """
        rule = None if when is None else read_condition(when, f"when= of knob '{name}'", self._knobs)
        options = {"default": default, "when": rule, "help": help, "others": others}
        return self._declare(Knob(name, values, monotone_memory=monotone_memory, **options))

    def integer(
        self,
        name: str,
        low: int,
        high: int,
        *,
        step: int = 1,
        powers_of_two: bool = False,
        default: Any = None,
        when: Any = None,
        help: str = "",
        others: Sequence[Any] | None = None,
        monotone_memory: int = 0,
    ) -> Knob:
        """Declares a knob with the integers from `low` to `high`, inclusive, by step or powers of two.

        Raises:
            SpaceError: the name is taken, or the bounds leave no value.
        """
        values = integer_values(name, low, high, step, powers_of_two)
        options = {"default": default, "when": when, "help": help, "others": others}
        return self.choice(name, values, monotone_memory=monotone_memory, **options)

    def number(
        self,
        name: str,
        low: float,
        high: float,
        *,
        log: bool = False,
        count: int = GRID,
        default: Any = None,
        when: Any = None,
        help: str = "",
        others: Sequence[Any] | None = None,
        monotone_memory: int = 0,
    ) -> Knob:
        """Declares a knob with `count` floats from `low` to `high`, inclusive, at equal distances, or with `log` at equal
        ratios.

        The default sampler first tries distant values, then those near the best. For values between two of them,
        declare a smaller range around the winner and tune again.

        Raises:
            SpaceError: the name is taken, or the bounds are not ascending, or not positive with `log`.
        """
        values = number_values(name, low, high, count, log)
        options = {"default": default, "when": when, "help": help, "others": others}
        return self.choice(name, values, monotone_memory=monotone_memory, **options)

    def flag(
        self, name: str, *, default: bool = False, when: Any = None, help: str = "", monotone_memory: int = 0
    ) -> Knob:
        """Declares a knob that is False or True.

        Raises:
            SpaceError: the name is taken.
        """
        return self.choice(name, [False, True], default=default, when=when, help=help, monotone_memory=monotone_memory)

    def derive(self, name: str, rule: Rule | str | Callable[..., Any], help: str = "") -> Knob:
        """Declares a knob derived from earlier ones, by an expression or a callable with their names.

        Its value may be of any kind. Without a value, the configuration is not valid.

        Raises:
            SpaceError: the name is taken, the rule names an unknown knob, or no configuration is left.
        """
        resolved = read_rule(rule, f"the rule of derived knob '{name}'", self._knobs)
        knob = DerivedKnob(name, resolved, help)
        with self._change(f"derived knob '{name}' = `{resolved.text}` has no value in any configuration"):
            self._declare(knob)
        self._valid_defaults(knob)
        return knob

    def _valid_defaults(self, derived: DerivedKnob) -> None:
        """Replaces defaults that leave a derived knob without a value by the nearest values that give it one."""
        concerned = reaching(self._knobs, [derived.name])
        if not resolve(concerned, (), {}, complete=True).problems:
            return
        for name, knob in concerned.items():
            if knob.derived or has_value(concerned, name, knob.default):
                continue
            candidates = [value for value in knob.values if has_value(concerned, name, value)]
            if candidates:
                near = nearest(knob.default, candidates) if knob.ordered else None
                knob.default = candidates[0] if near is None else near

    def require(self, rule: Rule | str | Callable[..., Any], reason: str = "") -> None:
        """Declares a condition that every configuration must satisfy.

        Args:
            rule: an expression, its text, another knob's `when`, or a callable with knobs as parameters that returns a
                truth value. `ZeroDivisionError` counts as false; any other exception is raised with the values that
                caused it.
            reason: explanation, which `explain` quotes.

        Raises:
            SpaceError: the rule names an unknown knob, can never hold, or leaves no configuration.
        """
        self._require(Constraint(read_condition(rule, "a constraint", self._knobs), str(reason)))

    def require_one_of(self, rows: Sequence[Mapping[str, Any]], reason: str = "") -> None:
        """Declares that the knobs must have the values of one of these rows, as for a table of measurements.

        Unlike a callable, this is checked knob by knob, so that a few thousand rows among billions of combinations
        are listed at once. `to_yaml` cannot write it.

        Args:
            rows: values by knob, the same knobs in each. A knob to choose, not a derived one.
            reason: explanation, which `explain` quotes.

        Raises:
            SpaceError: no rows, rows of different knobs, an unknown or derived knob, or a value that a knob does not have.
        """
        if not rows:
            raise SpaceError("require_one_of needs at least one row")
        names = tuple(_mapping(rows[0]))
        for name in names:
            if self[name].derived:
                raise SpaceError(f"knob '{name}' follows from others; leave it out of the rows")
        listed = []
        for number, row in enumerate(rows, 1):
            if _mapping(row).keys() != set(names):
                raise SpaceError(f"row {number} has the knobs {', '.join(row)}, but the first row {', '.join(names)}")
            listed.append(tuple(self[name].check(row[name]) for name in names))
        self._require(Constraint(Listed(names, listed), str(reason)))

    def fix(self, name: str, value: Any) -> None:
        """Restricts a knob to one value, which must be of the same kind but need not be a declared one. For a derived
        knob this becomes a constraint.

        Raises:
            SpaceError: unknown knob, a value of another kind, or no configuration is left.
        """
        knob = self[name]
        if not knob.derived:
            self.override(name, [value])
            return
        self._require(Constraint(knob == knob.check(value), "fixed", origin=name))

    def override(self, name: str, values: Sequence[Any]) -> None:
        """Replaces a knob's values, in place. They must be of the same kind but need not be declared ones. For a
        derived knob this becomes a constraint.

        Raises:
            SpaceError: unknown knob, values of another kind, or no configuration is left.
        """
        knob = self[name]
        if knob.derived:
            self._require(Constraint(knob.isin(values), "overridden", origin=name))
            return
        attributes = dict(knob.__dict__)
        if isinstance(values, Iterator):
            values = list(values)
        setting = values if isinstance(values, str) or not isinstance(values, Iterable) else listing(values)
        try:
            with self._change(f"no configuration is left with '{name}' set to {setting}"):
                knob.set_values(values)
        except BaseException:
            knob.__dict__.update(attributes)
            raise

    def copy(self) -> "Space":
        """An independent copy."""
        clone = Space()
        clone._knobs = {name: copy.copy(knob) for name, knob in self._knobs.items()}
        clone._derived = list(self._derived)
        clone._constraints = list(self._constraints)
        clone._witness, clone.beyond = self._witness, self.beyond
        return clone

    # -- knobs -----------------------------------------------------------------------------------------------

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Knobs to choose, in the order of declaration, then the derived ones in theirs."""
        return (*self._chosen, *(self._knobs[name] for name in self._derived))

    @property
    def free(self) -> tuple[Knob, ...]:
        """Knobs with more than one value to choose from."""
        return tuple(knob for knob in self._chosen if len(knob.values) > 1)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """Constraints, in the order of declaration."""
        return tuple(self._constraints)

    @property
    def by_name(self) -> Mapping[str, Knob]:
        """Knobs by name, each after those it depends on."""
        return self._knobs

    def __getitem__(self, name: str) -> Knob:
        if isinstance(name, int | np.integer):
            raise SpaceError(f"a space is indexed by a knob's name; the configuration at {name} is space.at({name})")
        if not isinstance(name, str) or name not in self._knobs:
            raise SpaceError(unknown("knob", name, self._knobs))
        return self._knobs[name]

    # -- the valid set ---------------------------------------------------------------------------------------

    @property
    def enumerable(self) -> bool:
        """True if the configurations can be listed. If they cannot, `len`, iteration, `at`, `index` and `columns`
        raise; `sample`, `config`, `default`, `explain` and `in` still work.
        """
        return self._set().enumerable

    @property
    def size(self) -> int:
        """Number of valid configurations; `len` for sizes beyond a machine word.

        Raises:
            SpaceError: too many to list.
        """
        return self._set().size

    @property
    def combinations(self) -> int:
        """Number of combinations of the knobs' values, without any rule."""
        return prod(len(knob.values) for knob in self._chosen)

    def __len__(self) -> int:
        size = self._set().size
        if size > sys.maxsize:
            raise SpaceError(f"{size} configurations are more than len() can return; use space.size")
        return size

    def __bool__(self) -> bool:
        return True  # a space is never empty, and counting is not needed

    def __iter__(self) -> Iterator[Config]:
        return self._set().iterate()

    def at(self, index: int) -> Config:
        """Configuration at an index, in the order of iteration; raises like `take`."""
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> list[Config]:
        """Configurations at these indices.

        Raises:
            SpaceError: no such index, or too many configurations to list.
        """
        picked, size = [operator.index(index) for index in indices], self._set().size
        if wrong := [index for index in picked if not 0 <= index < size]:
            raise SpaceError(f"0 <= index < {size} must hold, but got {wrong[0]}")
        return self._set().at(picked) if picked else []

    def index(self, config: Mapping[str, Any]) -> int:
        """Index of a configuration: `space.at(space.index(config)) == config`.

        Raises:
            SpaceError: the configuration is not valid, or there are too many to list.
        """
        point = self._resolve(_mapping(config))
        if point.problems:
            raise SpaceError(f"not in the space: {'; '.join(point.problems)}")
        present = [knob for knob in self._chosen if knob.name not in point.absent]
        return self._set().index({knob.name: knob.code(point.values[knob.name]) for knob in present})

    def __contains__(self, config: object) -> bool:
        return isinstance(config, Mapping) and not self._resolve(config, stop_early=True).problems

    def explain(self, config: Mapping[str, Any]) -> str:
        """`valid`, or a line for each problem: violated rules with their values, unknown and missing knobs, values
        that the knob does not have.
        """
        return "\n".join(self._resolve(_mapping(config)).problems) or "valid"

    def config(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> Config:
        """Configuration with these values, defaults for the other knobs, and computed derived knobs.

        Raises:
            SpaceError: it is not valid; the message is that of `explain`.
        """
        point = self._resolve({**(_mapping(values) if values is not None else {}), **more}, complete=True)
        if point.problems:
            raise SpaceError("\n".join(point.problems))
        return self._config(point.values)

    def default(self) -> Config:
        """Valid configuration nearest to the defaults: the fewest knobs differ, by the smallest amounts."""
        point = self._resolve({}, complete=True)
        if not point.problems:
            return self._config(point.values)
        return self._set().nearest({knob.name: knob.code(knob.default) for knob in self._chosen})

    def sample(self, count: int, seed: int = 0) -> list[Config]:
        """Returns up to `count` distinct configurations in random order; fewer only if there are not as many.

        The same seed gives the same sample. Every configuration has the same probability, except in a space that is
        not `enumerable`.

        Raises:
            SpaceError: `count` is negative, or none was found in a space that is too large to list.
        """
        count = operator.index(count)
        if count < 0:
            raise SpaceError(f"count >= 0 must hold, but got {count}")
        return self._set().sample(count, operator.index(seed))

    def choices(self, most: int, seed: int = 0) -> Choices:
        """Codes of all configurations, or of `most` of a larger space, drawn with a seed (see `sample`): for every
        chosen knob the index of its value in `knob.values`, -1 if it is absent.

        If the space has too many rules to list its configurations, there may be fewer.
        """
        return self._set().choices(most, seed)

    def near(self, codes: Mapping[str, int], changes: int) -> Choices:
        """Configurations that differ from the one with these codes in at most `changes` knobs, including itself.

        A knob that becomes present or absent by another's change is not counted, and has any value.

        Raises:
            SpaceError: more than 5 million.
        """
        return self._set().near(codes, changes)

    def made(self, choices: Choices) -> list[Config]:
        """Configurations of these codes."""
        return self._set().configs([choices], choices.rows)

    def columns(self, indices: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """For every free knob the index of its value in `knob.values`: int32, one row per configuration, row i for
        `space.at(i)`, or for `space.at(indices[i])`; -1 if the knob is absent.

        Raises:
            SpaceError: more rows than fit (5 million).
        """
        return self._set().columns([knob.name for knob in self.free], indices)

    # -- as text ---------------------------------------------------------------------------------------------

    def to_dict(self, *, describe_callables: bool = False) -> dict[str, Any]:
        """Converts the space to plain lists and mappings, with rules as text; see `to_yaml`.

        A lambda is also written as text if its source is in the grammar and means the same for all values of its
        knobs: `lambda tp, pp: tp > 1 or pp > 1` becomes `(tp > 1) | (pp > 1)`.

        Args:
            describe_callables: write callables as `{callable: source}`, for a record or a comparison, instead of
                refusing them; `from_dict` does not accept these.

        Raises:
            SpaceError: a rule is a callable that cannot be written as text.
        """
        return write_dict(self._knobs, self.knobs, self._constraints, describe_callables=describe_callables)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Space":
        """The inverse of `to_dict`.

        Raises:
            SpaceError: wrong structure or an invalid space; the message names the entry.
        """
        space = cls()
        read_dict(space, data)
        return space

    def to_yaml(self, path: str | PathLike[str]) -> None:
        """Writes the space to a file that people can read and edit.

            knobs:                                # in order; `type` is choice, integer or flag
            - name: tp
              values: [1, 2, 4, 8]
              default: 1                          # optional, as are help, when, others and monotone_memory
              help: tensor-parallel degree
            - {name: layers, type: integer, low: 1, high: 96}    # with step: 4, or powers_of_two: true
            - {name: sequence_parallel, type: flag, when: tp > 1}
            derived:
            - name: dp
              value: 8 // tp
            constraints:
            - require: tp * layers <= 96
              reason: why, for people

        Rules are texts of the grammar in `redline.space.grammar`: they are parsed, never run as Python. The file is
        written atomically.

        Raises:
            SpaceError: a rule is a callable that cannot be written as text; or the file cannot be written.
        """
        write_yaml(self.to_dict(), path)

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> "Space":
        """Reads a space from a file written by `to_yaml` or by hand.

        Raises:
            SpaceError: not readable, not YAML, wrong structure, a text outside the grammar, or an invalid space; the
                message has the file, the entry, and the column in a rule.
        """
        space = cls()
        read_yaml(space, path)
        return space

    def describe(self) -> str:
        """Description of knobs, derived knobs, constraints and sizes."""
        size = self.size if self.enumerable else None
        return describe(self.knobs, self._constraints, size)

    def __repr__(self) -> str:
        chosen = ", ".join(knob.name for knob in self._chosen)
        return f"Space({chosen}; {len(self._derived)} derived, {len(self._constraints)} constraints)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_valid": None}  # is computed again on use

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _chosen(self) -> list[Knob]:
        return [knob for knob in self._knobs.values() if not knob.derived]

    def _set(self) -> ValidSet:
        if self._valid is None:
            self._valid = ValidSet(Structure(self.by_name, self._constraints))
        if self._valid.enumerable and self._valid.size == 0:
            raise SpaceError(emptied_by(self._knobs, self._constraints, "no configuration is left"))
        return self._valid

    def _resolve(self, values: Mapping[str, Any], *, complete: bool = False, stop_early: bool = False) -> Point:
        return resolve(self._knobs, self._constraints, values, complete=complete, stop_early=stop_early)

    def arrange(self, derived: Sequence[str]) -> None:
        """Sorts the derived knobs by this list of names; it only affects their order."""
        self._derived = list(derived)

    def _config(self, values: Mapping[str, Any]) -> Config:
        return Config({knob.name: values[knob.name] for knob in self.knobs if knob.name in values})

    def _declare(self, knob: Knob) -> Knob:
        if knob.name in self._knobs:
            raise SpaceError(
                f"knob '{knob.name}' is declared already: {self[knob.name]!r}; use override() to change it"
            )
        self._knobs[knob.name] = knob
        if knob.derived:
            self._derived.append(knob.name)
        self._valid = None
        return knob

    def _require(self, constraint: Constraint) -> None:
        remaining = [
            present for present in self._constraints if not constraint.origin or present.origin != constraint.origin
        ]
        if self._witnessed(constraint):
            self._constraints, self._valid = [*remaining, constraint], None
            return
        check_alone(self._knobs, constraint)
        with self._change(f"constraint {constraint} leaves no valid configuration"):
            self._constraints = [*remaining, constraint]

    def _witnessed(self, constraint: Constraint) -> bool:
        """True if the witness is valid, obeys a constraint, and has all its knobs."""
        try:
            point = self._resolve(self._witness, complete=True, stop_early=True)
            here = not point.problems and point.values.keys() >= set(constraint.names)
            return here and holds(constraint.rule, point.values)
        except RuleError:
            return False

    @contextmanager
    def _change(self, emptied: str) -> Iterator[None]:
        """Undoes the changes inside if they are refused or leave no configuration."""
        declared = dict(self._knobs), list(self._derived), list(self._constraints)
        try:
            yield
            self._valid = None
            if self._resolve(self._witness, complete=True, stop_early=True).problems:
                valid = ValidSet(Structure(self.by_name, self._constraints))
                witness = valid.witness()
                if witness is None:
                    raise SpaceError(emptied_by(self._knobs, self._constraints, emptied))
                self._valid = valid
                if isinstance(witness, Config):
                    self._witness = {n: value for n, value in witness.items() if not self._knobs[n].derived}
        except BaseException:
            self._knobs, self._derived, self._constraints = declared
            self._valid = None
            raise


def _mapping(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise SpaceError(f"a configuration is a mapping of knob to value, but got {config!r}")
    return config
