"""Enumerates the valid choices of one component: joins knob after knob and drops what cannot become valid.

Partial choices are rows of a table, one column of codes (indices into a knob's values; -1 if the knob is absent) per
knob. Joining a knob pairs every row with every value, and keeps a pair if every rule may still hold: a rule whose
knobs are all chosen is evaluated; for others, interval arithmetic over the remaining choices determines whether they can hold
at all. Everything is vectorised.

A table that outgrows `MAX_ROWS` is given up, or, to draw samples, thinned out after every join. Joining an even sample of
partial choices first predicts most of these cases in a twentieth of the time (D. E. Knuth, Estimating the efficiency of
backtrack programs, Mathematics of Computation 29, 1975).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ..base.errors import SpaceError
from .expression import Expression
from .knob import DerivedKnob
from .operators import UNDEFINED, Column
from .rules import Listed, Predicate, Rule, settled, truth_value
from .structure import Check, Join, Lookup, Ranges, Structure, join_order
from .values import Value

MAX_ROWS = 5_000_000
"""Largest number of rows of a table, while it is built and at the end."""
MAX_PAIRS = 300_000_000
"""Largest number of pairs of row and value that are examined for one component."""
_SAMPLED = 4096
"""Number of partial choices in the sample that predicts the number of rows."""
_MARGIN = 1.25
"""A table is given up if more than `_MARGIN * MAX_ROWS` rows are predicted; predictions are a few percent off."""
_CHUNK = 1 << 19  # pairs examined at once: bounds the memory
_DENSE = 1 << 22  # below this many combinations, mark which occur instead of sorting them
_ABSENT = -1  # a code that no value has


class TooLarge(SpaceError):
    """A component has more valid choices than are enumerated."""


@dataclass(eq=False, slots=True)
class Choices:
    """Chosen codes, one array of length `rows` per knob; callables' results as codes of `Interned` values."""

    rows: int
    codes: dict[str, np.ndarray] = field(default_factory=dict)

    def take(self, rows: np.ndarray | slice) -> "Choices":
        """Rows at these indices."""
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return Choices(count, {name: column[rows] for name, column in self.codes.items()})

    def row(self, index: int) -> dict[str, int]:
        """Codes of one row."""
        return {name: int(column[index]) for name, column in self.codes.items()}

    def followed_by(self, other: "Choices") -> "Choices":
        """Concatenates the rows of another table of the same knobs."""
        codes = {name: np.concatenate([column, other.codes[name]]) for name, column in self.codes.items()}
        return Choices(self.rows + other.rows, codes)

    def unique(self, without: "Choices | None" = None) -> "Choices":
        """Distinct rows, without those of another table of the same knobs."""
        skipped = 0 if without is None else without.rows
        combined = self if without is None else without.followed_by(self)
        columns = [column.astype(np.int64) - _ABSENT for column in combined.codes.values()]
        keys, _ = _keys(columns, [int(column.max(initial=0)) + 1 for column in columns])
        _, rows = np.unique(keys, return_index=True)
        return self.take(np.sort(rows[rows >= skipped]) - skipped)

    def changes(self, codes: Mapping[str, int], names: Sequence[str]) -> np.ndarray:
        """Number of joined knobs in which each row differs from `codes`, shape (rows,). A knob that one of the two
        lacks is not counted, because the knob that makes it absent is.
        """
        counts = np.zeros(self.rows, np.uint16)
        for name in names:
            column = self.codes.get(name)
            if column is not None and codes[name] != _ABSENT:
                differs = column != codes[name]
                differs &= column != _ABSENT
                counts += differs
        return counts


class Interned:
    """Distinct values that a callable returned, in order of occurrence; rows contain their codes."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._codes: dict[tuple[type, Value], int] = {}
        self._array = np.array([], object)

    def code(self, value: Value) -> int:
        """Code of a value; a new one for a new value."""
        key = (type(value), value)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = len(self.values)
            self.values.append(value)
        return code

    def column(self, codes: np.ndarray) -> np.ndarray:
        """Values at `codes`: bool, int64 or float64 if all are, otherwise objects."""
        if len(self._array) != len(self.values):
            kinds = {type(value) for value in self.values}
            dtype = {frozenset({bool}): bool, frozenset({int}): np.int64}.get(frozenset(kinds), object)
            self._array = np.array(self.values, np.float64 if kinds <= {int, float} and float in kinds else dtype)
        # No values, or a row without the knob: the value is arbitrary, because rules on it do not apply there.
        return self._array[codes] if self.values else np.zeros(codes.shape)


class Component:
    """Knobs that share rules among themselves and with no other knob.

    Args:
        structure: the rules.
        names: the component's knobs, in the order of the space.
    """

    def __init__(self, structure: Structure, names: tuple[str, ...]) -> None:
        self.structure = structure
        self.names = names
        members = frozenset(names)
        self.checks = [check for check in structure.checks if check.bases & members]
        self.interned = {check.computes: Interned() for check in self.checks if check.computes}
        self._listed = {check: self._codes_of(check.rule) for check in self.checks if isinstance(check.rule, Listed)}
        """Codes of the rows of each list, by knob, without rows whose values the knobs do not have."""
        self._alive = {name: self._unary(name) for name in names}
        self._joins = join_order(structure, names, self.checks, {name: len(self._alive[name]) for name in names})
        self._hulls = {name: structure.knobs[name].hull(alive) for name, alive in self._alive.items() if len(alive)}

    def enumerate(self) -> Choices:
        """Every valid choice, in the lexicographic order of the knobs' values.

        Raises:
            TooLarge: there are more than `MAX_ROWS`, or finding them takes too long.
        """
        if prod(map(len, self._alive.values())) > _MARGIN * MAX_ROWS:
            self._check_predicted_rows()
        return self._sorted(self._join())

    def _check_predicted_rows(self) -> None:
        """Raises TooLarge if a table is predicted to outgrow `MAX_ROWS` by more than `_MARGIN`."""
        rng, scale = np.random.default_rng(0), 1.0

        def sampled(table: Choices) -> Choices:
            nonlocal scale
            if scale * table.rows > _MARGIN * MAX_ROWS:
                raise self._too_large()
            if table.rows <= _SAMPLED:
                return table
            scale *= table.rows / _SAMPLED
            return table.take(rng.choice(table.rows, _SAMPLED, replace=False))

        self._join(drop=sampled)

    def draw(self, rng: np.random.Generator, keep: int) -> Choices:
        """Up to about `keep` distinct valid choices, drawn by joining random partial choices; not uniform."""

        def thin(table: Choices, most: int) -> np.ndarray:
            return rng.choice(table.rows, most, replace=False)

        for width in (keep, 8 * keep, 64 * keep):  # a dead end: search wider
            table = self._join(thin, width)
            if table.rows:
                break
        return table

    def closest(self, distance: Callable[[Choices], np.ndarray], keep: int) -> Choices:
        """Valid choices close to the smallest `distance` of a (partial) table's rows."""
        rng = np.random.default_rng(0)

        def thin(table: Choices, most: int) -> np.ndarray:
            # Half of them at random: the nearest partial choices may all be dead ends.
            order = np.argsort(distance(table), kind="stable")
            return np.concatenate([order[: most // 2], rng.choice(order[most // 2 :], most - most // 2, replace=False)])

        table = self._join(thin, keep)
        return table if table.rows else self.draw(rng, keep)

    def near(self, codes: Mapping[str, int], changes: int) -> Choices:
        """Every valid choice that differs from `codes` in at most `changes` knobs, see `Choices.changes`.

        Raises:
            TooLarge: there are more than `MAX_ROWS`.
        """

        def near(table: Choices) -> Choices:
            return table.take(np.flatnonzero(table.changes(codes, self.names) <= changes))

        return self._join(drop=near)

    # -- joining ---------------------------------------------------------------------------------------------

    def _join(
        self,
        thin: Callable[[Choices, int], np.ndarray] | None = None,
        keep: int = 0,
        drop: Callable[[Choices], Choices] = lambda table: table,
    ) -> Choices:
        """Valid choices; with `thin` about `keep` of them, without those that `drop` removes after each join."""
        table, pairs = Choices(1), 0
        if any(not len(self._alive[name]) and self.structure.knobs[name].when is None for name in self.names):
            return Choices(0, {name: np.zeros(0, np.int32) for name in (*self.names, *self.interned)})
        with np.errstate(all="ignore"):
            for join in self._joins:
                if thin is not None:
                    most = min(keep, max(16, MAX_ROWS // 2 // max(1, len(self._alive[join.name]))))
                    if table.rows > most:
                        table = table.take(thin(table, most))
                pairs += table.rows * len(self._alive[join.name])
                if pairs > MAX_PAIRS:
                    raise self._too_large()
                table = drop(self._extend(table, join, bounded=thin is None))
        if thin is not None and table.rows > keep:
            table = table.take(thin(table, keep))
        return table

    def _extend(self, table: Choices, join: Join, *, bounded: bool) -> Choices:
        alive = self._alive[join.name]
        active = self._active(table, join.name)
        computed = [check.computes for check in join.opaque if check.computes]
        pieces, total = [], 0
        if active is not None:
            absent = table.take(np.flatnonzero(~active))
            table = table.take(np.flatnonzero(active))
            if absent.rows:
                absent.codes[join.name] = np.full(absent.rows, _ABSENT, alive.dtype)
                for name in computed:
                    absent.codes[name] = np.full(absent.rows, _ABSENT, np.int32)
                pieces.append(absent)
                total = absent.rows
        chunk = max(1, _CHUNK // max(1, len(alive)))
        for start in range(0, table.rows, chunk):
            piece = table.take(slice(start, min(start + chunk, table.rows)))
            pieces.append(self._pair(piece, join))
            total += pieces[-1].rows
            if bounded and total > MAX_ROWS:
                raise self._too_large()
        if len(pieces) == 1:
            return pieces[0]
        names = [*table.codes, join.name, *computed]
        if not pieces:
            return Choices(0, {name: np.zeros(0, np.int32) for name in names})
        return Choices(total, {name: np.concatenate([piece.codes[name] for piece in pieces]) for name in names})

    def _active(self, table: Choices, name: str) -> np.ndarray | None:
        """Rows in which the knob exists; None for all rows."""
        when = self.structure.knobs[name].when
        if when is None:
            return None
        present = self._present(table, self.structure.conditionals_of(when.names))
        holding = np.ones(table.rows, bool) if present is None else present
        rows = np.flatnonzero(holding)
        holding[rows] = self._true(table.take(rows), when)
        return holding

    def _pair(self, table: Choices, join: Join) -> Choices:
        alive = self._alive[join.name]
        ok: np.ndarray | None = None
        if join.complete or join.partial:
            lookup = Lookup(self.structure, self._grid(table, join.name, alive))
            ranges = Ranges(lookup, {name: self._hulls[name] for name in join.open if name in self._hulls})
            for check in (*join.complete, *join.partial):
                if check in self._listed:
                    ok = self._narrow(ok, table, join, check, self._begun(table, join.name, alive, check))
            for check in join.complete:
                if check not in self._listed:
                    ok = self._narrow(ok, table, join, check, self._evaluated(check, lookup))
            for check in join.partial:
                ok = self._narrow(ok, table, join, check, _possible(check, ranges))
        if ok is None:
            rows = np.repeat(np.arange(table.rows), len(alive))
            codes = np.tile(alive, table.rows)
        else:
            rows, columns = np.nonzero(np.broadcast_to(ok, (table.rows, len(alive))))
            codes = alive[columns]
        joined = table.take(rows)
        joined.codes[join.name] = codes
        for check in join.opaque:
            joined = self._apply(joined, check)
        return joined

    def _grid(self, table: Choices, name: str, alive: np.ndarray) -> Callable[[str], np.ndarray | None]:
        """Columns shaped for broadcasting: rows along the first axis, values of the joined knob along the second."""

        def load(column: str) -> np.ndarray | None:
            if column == name:
                return self.structure.knobs[column].column(alive)[None, :]
            codes = table.codes.get(column)
            return None if codes is None else self.values(column, codes)[:, None]

        return load

    def _narrow(
        self, ok: np.ndarray | None, table: Choices, join: Join, check: Check, mask: np.ndarray | None
    ) -> np.ndarray | None:
        if mask is None:
            return ok
        present = self._present(table, check.conditionals - {join.name})
        if present is not None:
            mask = mask | ~present[:, None]
        return mask if ok is None else ok & mask

    def _present(self, table: Choices, conditionals: frozenset[str]) -> np.ndarray | None:
        """Rows in which all these knobs exist; None for all rows."""
        present = None
        for name in conditionals:
            codes = table.codes.get(name)
            if codes is not None:
                here = codes != _ABSENT
                present = here if present is None else present & here
        return present

    @staticmethod
    def _evaluated(check: Check, lookup: Lookup) -> np.ndarray | None:
        if isinstance(check.label, DerivedKnob):
            _, undefined = lookup(check.label.name)
            return None if undefined is None else ~undefined
        assert isinstance(check.rule, Expression)  # not opaque
        return _holding(check.rule.columns(lookup))

    def _codes_of(self, rule: Listed) -> dict[str, np.ndarray]:
        knobs, fixed = [self.structure.knobs[name] for name in rule.names], self.structure.fixed
        rows = [row for row in rule.rows if all(knob.has(value) for knob, value in zip(knobs, row))]
        return {
            knob.name: np.array([knob.code(value) for value in column], np.int64)
            for knob, column in zip(knobs, zip(*rows) if rows else [()] * len(knobs))
            if knob.name not in fixed
        }

    def _begun(self, table: Choices, name: str, alive: np.ndarray, check: Check) -> np.ndarray:
        """Mask of the pairs that agree with one of the listed rows in the knobs chosen so far."""
        rows = self._listed[check]
        count, width = len(rows[name]), len(self.structure.knobs[name].values)
        preceding = [column for column in rows if column in table.codes]
        group = np.zeros(count + table.rows, np.int64)
        if preceding:
            columns = [np.concatenate([rows[column], table.codes[column]]) for column in preceding]
            _, group = _distinct(columns, [len(self.structure.knobs[column].values) for column in preceding])
        present, places = np.unique(group[count:], return_inverse=True)
        place = np.minimum(np.searchsorted(present, group[:count]), len(present) - 1)
        begun = np.flatnonzero(present[place] == group[:count])
        ok = np.zeros((len(present), width), bool)
        ok[place[begun], rows[name][begun]] = True
        return ok[places][:, alive]

    # -- Python functions ------------------------------------------------------------------------------------

    def _apply(self, table: Choices, check: Check) -> Choices:
        """Rows of a full table in which a check with a Python function holds."""
        label, rule = check.label, check.rule
        present = self._present(table, check.conditionals)
        rows = np.arange(table.rows) if present is None else np.flatnonzero(present)
        here = table.take(rows)
        keep = np.ones(table.rows, bool)
        if not isinstance(label, DerivedKnob):
            keep[rows] = self._true(here, rule)
        elif isinstance(rule, Predicate):
            codes = np.full(table.rows, _ABSENT, np.int32)
            if here.rows:
                results, inverse = self._called(here, rule)
                interned = self.interned[label.name]
                values = (settled(rule, result) for result in results)
                coded = [_ABSENT if value is UNDEFINED else interned.code(value) for value in values]
                codes[rows] = np.array(coded, np.int32)[inverse]
            keep[rows] = codes[rows] != _ABSENT
            table.codes[label.name] = codes
        else:
            _, undefined = rule.columns(Lookup(self.structure, self._loader(here)))
            if undefined is not None:
                keep[rows] = ~np.broadcast_to(undefined, rows.shape)
        return table if keep.all() else table.take(np.flatnonzero(keep))

    def _true(self, table: Choices, rule: Rule) -> np.ndarray:
        """Rows in which a condition holds; all its knobs must be present."""
        if isinstance(rule, Predicate):
            if not table.rows:
                return np.zeros(0, bool)
            results, inverse = self._called(table, rule)
            return np.fromiter((truth_value(rule, result) for result in results), bool, len(results))[inverse]
        holding = _holding(rule.columns(Lookup(self.structure, self._loader(table))))
        return np.broadcast_to(holding, (table.rows,))

    def _called(self, table: Choices, rule: Predicate) -> tuple[list[Any], np.ndarray]:
        """Results of a function, called once for every distinct combination of arguments, and the index of the result
        for every row.
        """
        lookup = Lookup(self.structure, self._loader(table))
        arguments = [self._argument(table, name, lookup) for name in rule.names]
        rows, inverse = _distinct([codes for codes, _ in arguments], [len(values) for _, values in arguments])
        return rule.call_all([objects(values)[codes[rows]].tolist() for codes, values in arguments]), inverse

    def _argument(self, table: Choices, name: str, lookup: Lookup) -> tuple[np.ndarray, Sequence[Value]]:
        """Codes of a knob's values in the rows, and their Python values."""
        codes = table.codes.get(name)
        if codes is not None:
            return codes, self.python_values(name)
        column = np.broadcast_to(lookup(name)[0], (table.rows,))
        if column.dtype == object:
            seen: dict[tuple[type, Value], int] = {}
            coded = [seen.setdefault((type(value), value), len(seen)) for value in column.tolist()]
            return np.array(coded, np.int32), [value for _, value in seen]
        values, codes = np.unique(column, return_inverse=True)
        return codes, values.tolist()

    # -- small parts -----------------------------------------------------------------------------------------

    def python_values(self, name: str) -> Sequence[Value]:
        """Python values of the codes of a column."""
        return self.interned[name].values if name in self.interned else self.structure.knobs[name].values

    def values(self, name: str, codes: np.ndarray) -> np.ndarray:
        """Values of a column at some codes; arbitrary if absent."""
        owner = self.interned.get(name) or self.structure.knobs[name]
        return owner.column(codes)

    def _loader(self, table: Choices) -> Callable[[str], np.ndarray | None]:
        def load(name: str) -> np.ndarray | None:
            codes = table.codes.get(name)
            return None if codes is None else self.values(name, codes)

        return load

    def _unary(self, name: str) -> np.ndarray:
        """Codes of the values that the rules about this knob alone allow."""
        knob = self.structure.knobs[name]
        count = len(knob.values)
        codes = np.arange(count, dtype=np.min_scalar_type(-count - 1))
        ok = np.ones(count, bool)
        lookup = Lookup(self.structure, lambda column: knob.column(codes) if column == name else None)
        with np.errstate(all="ignore"):
            for check in self.checks:
                if check in self._listed and name in check.bases and check.conditionals <= {name}:
                    ok &= np.isin(codes, self._listed[check][name])
                elif check.bases == {name} and not check.opaque:
                    mask = self._evaluated(check, lookup)
                    ok = ok if mask is None else ok & mask
        return codes[ok]

    def _sorted(self, table: Choices) -> Choices:
        key, span = np.zeros(table.rows, np.int64), 1
        for name in self.names:
            span *= len(self.structure.knobs[name].values) + 1
        if span < 2**62:  # one int64 key a row sorts faster than `lexsort` of all columns
            for name in self.names:
                key *= len(self.structure.knobs[name].values) + 1
                key += table.codes[name]
            if (key[1:] > key[:-1]).all():
                return table
            return table.take(np.argsort(key))
        return table.take(np.lexsort([table.codes[name] for name in reversed(self.names)]))

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the knobs {', '.join(self.names)} have too many valid combinations to list "
            f"(more than {MAX_ROWS:,}, or too many to look through); sample(), config(), default() and `in` "
            "still work, and so does everything after a further constraint, or a fixed or overridden knob"
        )


def objects(values: Sequence[Value]) -> np.ndarray:
    """The values as numpy objects, unchanged."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _holding(column: Column) -> np.ndarray:
    values, undefined = column
    values = values.astype(bool, copy=False)
    return values if undefined is None else values & ~undefined


def _possible(check: Check, ranges: Ranges) -> np.ndarray | None:
    """Mask of rows in which a check with open knobs can still hold; None for all rows."""
    if isinstance(check.label, DerivedKnob) or isinstance(check.rule, Predicate):
        return None
    _, high = check.rule.bounds(ranges)
    return np.asarray(high) > 0


def _keys(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """A number for each row of code columns, the same for equal rows, and an upper bound of the numbers. numpy sorts numbers
    ten times as fast as rows.
    """
    key, span = columns[0].astype(np.int64), sizes[0]
    for codes, size in zip(columns[1:], sizes[1:]):
        if span * size >= 2**62:  # the next key might not fit int64
            values, key = np.unique(key, return_inverse=True)
            span = len(values)
        key, span = key * size + codes, span * size
    return key, span


def _distinct(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Row indices of the distinct combinations of code columns, and the index of the combination for every row."""
    key, span = _keys(columns, sizes)
    if span > _DENSE:
        _, indices, inverse = np.unique(key, return_index=True, return_inverse=True)
        return indices, inverse
    place = np.full(span, -1, np.int64)
    place[key] = np.arange(len(key))
    indices = place[place >= 0]
    place[place >= 0] = np.arange(len(indices))
    return indices, place[key]
