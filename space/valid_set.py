"""The set of valid configurations: its size, its order, and samples of it.

The set is the product of its components' tables, indexed in mixed radix: the last component varies fastest. Its size
may be astronomic as long as each component can be listed.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from math import prod

import numpy as np

from ..base.errors import SpaceError
from .enumeration import MAX_ROWS, Choices, Component, TooLarge, objects
from .structure import Lookup, Structure
from .values import Config, Value, configs

_BATCH = 4096  # configurations that an iteration builds at once
_BEAM = 4096  # partial choices of a component that a random search keeps, at least


def _combined(tables: Sequence[Choices], rows: int) -> Choices:
    """Combines tables of different knobs to one."""
    return Choices(rows, {name: column for table in tables for name, column in table.codes.items()})


class ValidSet:
    """All configurations that the rules of a structure allow."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.components = [Component(structure, names) for names in structure.components]
        self._owners = {name: owner for owner in self.components for name in (*owner.names, *owner.interned)}
        knobs = structure.knobs.values()  # in a configuration, chosen knobs come first
        self._names = [knob.name for knob in sorted(knobs, key=lambda knob: knob.derived)]
        self._tables: list[Choices | TooLarge | None] = [None] * len(self.components)

    def table(self, index: int) -> Choices:
        """Valid choices of a component.

        Raises:
            TooLarge: there are too many to list.
        """
        table = self._tables[index]
        if table is None:
            try:
                table = self.components[index].enumerate()
            except TooLarge as error:
                table = error
            self._tables[index] = table
        if isinstance(table, TooLarge):
            raise table.with_traceback(None)
        return table

    @cached_property
    def size(self) -> int:
        """Number of configurations.

        Raises:
            TooLarge: a component has too many to list.
        """
        return (
            0
            if self.structure.contradiction is not None
            else prod(self.table(index).rows for index in range(len(self.components)))
        )

    @property
    def enumerable(self) -> bool:
        """True if every component can be listed."""
        try:
            return self.size >= 0
        except TooLarge:
            return False

    def witness(self) -> Config | TooLarge | None:
        """Any configuration; None if there is none; the reason if finding one takes too long."""
        if self.structure.contradiction is not None:
            return None
        doubt, tables = None, []
        for index in range(len(self.components)):
            table = self._inhabited(index)
            if isinstance(table, TooLarge):
                doubt = table
            elif table.rows:
                tables.append(table.take(slice(0, 1)))
            else:
                return None
        return self.configs(tables, 1)[0] if doubt is None else doubt

    def _inhabited(self, index: int) -> Choices | TooLarge:
        listed = self._tables[index]
        if not isinstance(listed, Choices) and len(self.components[index].names) > 1:
            # A few random partial choices that can be completed are found quickly.
            sampled = self.components[index].draw(np.random.default_rng(0), 64)
            if sampled.rows:
                return sampled
        try:
            return self.table(index)
        except TooLarge as error:
            return error

    # -- order -----------------------------------------------------------------------------------------------

    def at(self, indices: Sequence[int]) -> list[Config]:
        """Configurations at these indices."""
        return self.configs(self._rows(indices), len(indices))

    def iterate(self) -> Iterator[Config]:
        """Yields every configuration, in order."""
        size = self.size
        for start in range(0, size, _BATCH):
            yield from self.at(range(start, min(start + _BATCH, size)))

    def index(self, codes: dict[str, int]) -> int:
        """Index of the configuration with these codes, which must be valid; missing knobs are absent."""
        index = 0
        for position, component in enumerate(self.components):
            table = self.table(position)
            low, high = 0, table.rows
            for name in component.names:
                column = table.codes[name][low:high]
                code = column.dtype.type(codes.get(name, -1))
                low, high = low + np.searchsorted(column, code), low + np.searchsorted(column, code, "right")
            index = index * table.rows + int(low)
        return index

    def _rows(self, indices: Sequence[int] | np.ndarray) -> list[Choices]:
        """Rows of every component for each index."""
        quotient = np.asarray(indices, np.int64) if self.size < 2**62 else np.array([*indices], object)
        tables = []
        for position in reversed(range(len(self.components))):
            table = self.table(position)
            tables.append(table.take((quotient % table.rows).astype(np.int64)))
            quotient = quotient // table.rows
        return tables[::-1]

    def columns(self, names: Sequence[str], indices: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Codes of the knobs for every configuration, or for those at some indices, int32; -1 if absent.

        Raises:
            TooLarge: more than `MAX_ROWS` configurations.
        """
        size = self.size if indices is None else len(indices)
        if size > MAX_ROWS:
            raise TooLarge(f"{size:,} configurations are too many for columns (at most {MAX_ROWS:,}); use sample()")
        codes = _combined(self._rows(np.arange(size) if indices is None else indices), size).codes
        return {name: codes[name].astype(np.int32) for name in names}

    # -- configurations --------------------------------------------------------------------------------------

    def configs(self, tables: Sequence[Choices], count: int) -> list[Config]:
        """Configurations with the choices in the rows of the tables, `count` rows each."""
        codes = {name: column for table in tables for name, column in table.codes.items()}
        lacking = [name for name in self.structure.variables if (codes[name] < 0).any()]
        if not lacking:
            return self._made(codes, frozenset(), count)
        # Configurations that lack the same knobs are made together, and put back in order.
        masks = np.stack([codes[name] < 0 for name in lacking])
        patterns, which = np.unique(masks, axis=1, return_inverse=True)
        configurations: list[Config] = []
        order: list[np.ndarray] = []
        for pattern_index, pattern in enumerate(patterns.T):
            places = np.flatnonzero(which.ravel() == pattern_index)
            here = {name: column[places] for name, column in codes.items()}
            absent = frozenset(compress(lacking, pattern))
            configurations += self._made(here, absent, len(places))
            order.append(places)
        return [configurations[position] for position in np.argsort(np.concatenate(order)).tolist()]

    def _made(self, codes: dict[str, np.ndarray], absent: frozenset[str], count: int) -> list[Config]:
        """Configurations with these codes, which all lack the knobs `absent` and those that depend on them."""
        structure = self.structure

        def load(name: str) -> np.ndarray | None:
            return self._owners[name].values(name, codes[name]) if name in codes else None

        lookup = Lookup(structure, load)
        names = [name for name in self._names if absent.isdisjoint(structure.conditionals_of([name]))]
        columns: list[list[Value]] = []
        with np.errstate(all="ignore"):
            for name in names:
                if name in structure.fixed:
                    columns.append([structure.fixed[name]] * count)
                elif name in codes:
                    columns.append(objects(self._owners[name].python_values(name))[codes[name]].tolist())
                else:
                    columns.append(np.broadcast_to(lookup(name)[0], (count,)).tolist())
        return configs(names, zip(*columns) if columns else [()] * count)

    # -- choices as codes ------------------------------------------------------------------------------------

    def choices(self, most: int, seed: int) -> Choices:
        """Codes of all configurations, or of `most` of them: drawn uniformly if the set can be listed, otherwise like
        `sample`.
        """
        if self.enumerable:
            indices = np.arange(self.size) if self.size <= most else self._drawn_indices(most, seed)
            return _combined(self._rows(indices), len(indices))
        tables = self._draw(np.random.default_rng(seed), most) or []
        return _combined(tables, tables[0].rows if tables else 0).unique()

    def _drawn_indices(self, count: int, seed: int) -> np.ndarray:
        if self.size <= 2**62:
            rng = np.random.default_rng(seed)
            return np.sort(rng.choice(self.size, count, replace=False, shuffle=False))
        uniform = random.Random(seed)
        return np.array(sorted({uniform.randrange(self.size) for _ in range(count)}), object)

    def near(self, codes: Mapping[str, int], changes: int) -> Choices:
        """Configurations that differ from `codes` in at most `changes` knobs, including itself."""
        rows, tables = np.zeros((0, 1), np.int64), []
        changed = np.zeros(1, np.int64)
        for position, component in enumerate(self.components):
            listed = self._tables[position]
            table = listed if isinstance(listed, Choices) else component.near(codes, changes)
            differ = table.changes(codes, component.names)
            here = np.flatnonzero(differ <= changes)
            total = changed[:, None] + differ[here]
            row, table_row = np.nonzero(total <= changes)
            rows, changed = np.vstack([rows[:, row], here[table_row]]), total[row, table_row]
            tables.append(table)
        return _combined([table.take(picked) for table, picked in zip(tables, rows)], len(changed))

    # -- samples ---------------------------------------------------------------------------------------------

    def sample(self, count: int, seed: int) -> list[Config]:
        """Returns up to `count` distinct configurations, fewer only if there are fewer (or no more are found).

        Uniform if the set can be listed; otherwise by random joins, which are not uniform.
        """
        if self.enumerable:
            uniform = random.Random(seed)
            size = self.size
            if size <= 2**62:
                return self.at(uniform.sample(range(size), min(count, size)))
            picked: dict[int, None] = {}
            while len(picked) < count:
                picked[uniform.randrange(size)] = None
            return self.at(list(picked))
        rng = np.random.default_rng(seed)
        configurations: dict[Config, None] = {}
        fruitless = 0
        # Random joins repeat configurations; five draws in a row without a new one end the search.
        while len(configurations) < count and fruitless < 5:
            before_draw = len(configurations)
            tables = self._draw(rng, count)
            sampled = [] if tables is None else self.configs(tables, count)
            configurations.update((config, None) for config in sampled)
            fruitless = 0 if len(configurations) > before_draw else fruitless + 1
        if not configurations and count:
            raise SpaceError(
                "no valid configuration was found: the constraints are too tight for random search and leave "
                "too many combinations to list; derive a knob from the others instead of choosing it"
            )
        return list(configurations)[:count]

    def _draw(self, rng: np.random.Generator, count: int) -> list[Choices] | None:
        """`count` rows of every component; None if nothing was found for one of them."""
        tables = []
        for position, component in enumerate(self.components):
            listed = self._tables[position]
            if isinstance(listed, Choices):
                tables.append(listed.take(rng.integers(0, listed.rows, count)))
                continue
            sampled = component.draw(rng, max(_BEAM, 4 * count))
            if not sampled.rows:
                return None
            picked = rng.permutation(sampled.rows)[:count]
            tables.append(sampled.take(np.resize(picked, count)))
        return tables

    def nearest(self, wanted: dict[str, int]) -> Config:
        """Configuration that changes the fewest knobs from the codes `wanted`, by the smallest amounts.

        If the set cannot be listed it is searched with limited memory, and the result may not be the very nearest.
        """
        rows = []
        for position, component in enumerate(self.components):
            distance = self._distance(wanted)
            try:
                table = self.table(position)
            except TooLarge:
                table = component.closest(distance, 4 * _BEAM)
            if not table.rows:
                raise SpaceError("no valid configuration was found near the defaults; give config() the values")
            best = int(np.argmin(distance(table)))
            rows.append(table.take(np.array([best])))
        return self.configs(rows, 1)[0]

    def _distance(self, wanted: dict[str, int]) -> Callable[[Choices], np.ndarray]:
        def distance(table: Choices) -> np.ndarray:
            distances = np.zeros(table.rows)
            for name, codes in table.codes.items():
                if name in wanted:
                    knob = self.structure.knobs[name]
                    steps = np.abs(codes.astype(np.int64) - wanted[name]) / max(1, len(knob.values) - 1)
                    # A changed knob counts 1; the amount of change decides between equal numbers of changes.
                    far = steps if knob.ordered else 1.0
                    distances += np.where((codes < 0) | (codes == wanted[name]), 0.0, 1.0 + far / 1000)
            return distances

        return distance
