"""The set of valid configurations: its size, its order, and samples of it.

The set is the product of its components' tables, indexed in mixed radix: the last component turns fastest.
So its size may be astronomic as long as each component can be listed.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod

import numpy as np

from ..errors import SpaceError
from .config import Config, configs
from .enumeration import MAX_ROWS, Component, Table, TooLarge
from .knob import Knob
from .structure import Lookup, Structure
from .values import Value

_BATCH = 4096
_BEAM = 4096
_ABSENT = object()


class ValidSet:
    """Everything the rules of a structure allow."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.components = [Component(structure, names) for names in structure.components]
        self._tables: list[Table | TooLarge | None] = [None] * len(self.components)

    def table(self, at: int) -> Table:
        """The valid choices of a component.

        Raises:
            TooLarge: there are too many to list.
        """
        found = self._tables[at]
        if found is None:
            try:
                found = self.components[at].enumerate()
            except TooLarge as error:
                found = error
            self._tables[at] = found
        if isinstance(found, TooLarge):
            raise found.with_traceback(None)
        return found

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many valid choices each component has.

        Raises:
            TooLarge: one of them has too many to list.
        """
        return tuple(self.table(at).rows for at in range(len(self.components)))

    @cached_property
    def size(self) -> int:
        """How many configurations there are.

        Raises:
            TooLarge: a component has too many to list.
        """
        return 0 if self.structure.contradiction is not None else prod(self.sizes)

    @property
    def enumerable(self) -> bool:
        """Whether every component can be listed."""
        try:
            return self.size >= 0
        except TooLarge:
            return False

    def witness(self) -> Config | TooLarge | None:
        """Any configuration; None where there is none; the reason where that takes too long to find out."""
        if self.structure.contradiction is not None:
            return None
        doubt, tables = None, []
        for at in range(len(self.components)):
            found = self._inhabited(at)
            if isinstance(found, Table) and not found.rows:
                return None
            doubt = found if isinstance(found, TooLarge) else doubt
            tables.append(found)
        return doubt or self.configs([table.take(slice(0, 1)) for table in tables], 1)[0]

    def _inhabited(self, at: int) -> Table | TooLarge:
        listed = self._tables[at]
        if not isinstance(listed, Table):
            # A few random partial choices that can be completed answer it at once.
            drawn = self.components[at].draw(np.random.default_rng(0), 64)
            if drawn.rows:
                return drawn
        try:
            return self.table(at)
        except TooLarge as error:
            return error

    # -- order -----------------------------------------------------------------------------------------------

    def at(self, indices: Sequence[int]) -> list[Config]:
        """The configurations at these indices."""
        tables = [self.table(at) for at in range(len(self.components))]
        rows = self._digits(indices)
        return self.configs([table.take(picked) for table, picked in zip(tables, rows)], len(indices))

    def iterate(self) -> Iterator[Config]:
        """Every configuration, in order."""
        size = self.size
        for start in range(0, size, _BATCH):
            yield from self.at(range(start, min(start + _BATCH, size)))

    def index(self, codes: dict[str, int]) -> int:
        """The index of the configuration with these codes, which must be valid."""
        out = 0
        for at, component in enumerate(self.components):
            table = self.table(at)
            low, high = 0, table.rows
            for name in component.names:
                column = table.codes[name][low:high]
                code = column.dtype.type(codes[name])
                low, high = low + np.searchsorted(column, code), low + np.searchsorted(column, code, "right")
            out = out * table.rows + int(low)
        return out

    def _digits(self, indices: Sequence[int]) -> list[np.ndarray]:
        """For every component the row that each index picks."""
        sizes = self.sizes
        rest = np.asarray(indices, np.int64) if self.size < 2**62 else np.array([*indices], object)
        digits = []
        for size in reversed(sizes):
            digits.append((rest % size).astype(np.int64))
            rest = rest // size
        return digits[::-1]

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Codes of the knobs for every configuration, int32; -1 where absent.

        Raises:
            TooLarge: more than `MAX_ROWS` configurations.
        """
        size = self.size
        if size > MAX_ROWS:
            raise TooLarge(
                f"{size:,} configurations are too many for columns (at most {MAX_ROWS:,}); use sample()"
            )
        out, repeat = {}, 1
        for at in reversed(range(len(self.components))):
            table = self.table(at)
            for name in self.components[at].names:
                column = np.repeat(table.codes[name].astype(np.int32), repeat)
                out[name] = np.tile(column, size // max(1, len(column)))
            repeat *= table.rows
        return {name: out[name] for name in names}

    # -- configurations --------------------------------------------------------------------------------------

    def configs(self, tables: Sequence[Table], count: int) -> list[Config]:
        """The configurations whose choices stand in the rows of the tables, `count` rows each."""
        owners: dict[str, tuple[Component, np.ndarray]] = {}
        for component, table in zip(self.components, tables):
            owners.update((name, (component, codes)) for name, codes in table.codes.items())
        absent = {name for name, (_, codes) in owners.items() if (codes < 0).any()}

        def load(name: str) -> np.ndarray | None:
            if name not in owners:
                return None
            component, codes = owners[name]
            return component.values(name, codes)

        lookup = Lookup(self.structure, load)
        names = _ordered(self.structure.knobs.values())
        with np.errstate(all="ignore"):
            columns = [self._objects(name, owners, lookup, count) for name in names]
        rows = zip(*columns) if columns else [()] * count
        if not absent:
            return configs(names, rows)
        # Configurations that lack the same knobs are made together; `places` puts them back in order.
        missing = np.stack([np.fromiter((v is _ABSENT for v in column), bool, count) for column in columns])
        patterns, which = np.unique(missing, axis=1, return_inverse=True)
        out: list[Config] = [None] * count  # type: ignore[list-item]
        for at, pattern in enumerate(patterns.T):
            here = [name for name, lacks in zip(names, pattern) if not lacks]
            kept = [column for column, lacks in zip(columns, pattern) if not lacks]
            places = np.flatnonzero(which.ravel() == at).tolist()
            made = configs(here, zip(*([column[i] for i in places] for column in kept))) if kept else []
            for place, config in zip(places, made or configs([], [()] * len(places))):
                out[place] = config
        return out

    def _objects(
        self, name: str, owners: dict[str, tuple[Component, np.ndarray]], lookup: Lookup, count: int
    ) -> list[Value]:
        if name in self.structure.fixed:
            return [self.structure.fixed[name]] * count
        if name in owners:
            component, codes = owners[name]
            values = np.empty(len(component.python_values(name)) + 1, object)
            values[:] = [*component.python_values(name), _ABSENT]  # what code -1 picks
            return values[codes].tolist()
        values = np.broadcast_to(lookup(name)[0], (count,)).tolist()
        for each in self.structure.conditionals_of([name]):
            codes = owners[each][1]
            if (codes < 0).any():
                values = [_ABSENT if code < 0 else value for value, code in zip(values, codes.tolist())]
        return values

    # -- samples ---------------------------------------------------------------------------------------------

    def sample(self, count: int, seed: int) -> list[Config]:
        """Up to `count` distinct configurations, fewer only where there are fewer (or no more are found).

        Uniform where the set can be listed; otherwise by random joins, which favour some over others.
        """
        if self.enumerable:
            rng = random.Random(seed)
            size = self.size
            if size <= 2**62:
                return self.at(rng.sample(range(size), min(count, size)))
            picked: dict[int, None] = {}
            while len(picked) < count:
                picked[rng.randrange(size)] = None
            return self.at(list(picked))
        rng = np.random.default_rng(seed)
        found: dict[Config, None] = {}
        fruitless = 0
        while len(found) < count and fruitless < 5:
            known = len(found)
            tables = self._draw(rng, count)
            drawn = [] if tables is None else self.configs(tables, count)
            found.update((config, None) for config in drawn)
            fruitless = 0 if len(found) > known else fruitless + 1
        if not found and count:
            raise SpaceError(
                "no valid configuration was found: the constraints are too tight for random search and leave "
                "too many combinations to list; derive a knob from the others instead of choosing it"
            )
        return list(found)[:count]

    def _draw(self, rng: np.random.Generator, count: int) -> list[Table] | None:
        """`count` rows of every component; None where nothing was found for one of them."""
        tables = []
        for at, component in enumerate(self.components):
            listed = self._tables[at]
            if isinstance(listed, Table):
                tables.append(listed.take(rng.integers(0, listed.rows, count)))
                continue
            drawn = component.draw(rng, max(_BEAM, 4 * count))
            if not drawn.rows:
                return None
            picked = rng.permutation(drawn.rows)[:count]
            tables.append(drawn.take(np.resize(picked, count)))
        return tables

    def nearest(self, wanted: dict[str, int]) -> Config:
        """The configuration that changes the fewest knobs from the codes `wanted`, and those the least.

        Where the set cannot be listed it is searched with a bounded memory, and may miss the very nearest.
        """
        rows = []
        for at, component in enumerate(self.components):
            distance = self._distance(wanted)
            try:
                table = self.table(at)
            except TooLarge:
                table = component.closest(distance, 4 * _BEAM)
            if not table.rows:
                raise SpaceError(
                    "no valid configuration was found near the defaults; give config() the values"
                )
            best = int(np.argmin(distance(table)))
            rows.append(table.take(np.array([best])))
        return self.configs(rows, 1)[0]

    def _distance(self, wanted: dict[str, int]) -> Callable[[Table], np.ndarray]:
        def distance(table: Table) -> np.ndarray:
            out = np.zeros(table.rows)
            for name, codes in table.codes.items():
                if name in wanted:
                    knob = self.structure.knobs[name]
                    steps = np.abs(codes.astype(np.int64) - wanted[name]) / max(1, len(knob.values) - 1)
                    # A changed knob counts 1, how far it is changed decides among as many changed ones.
                    far = steps if knob.ordered else 1.0
                    out += np.where((codes < 0) | (codes == wanted[name]), 0.0, 1.0 + far / 1000)
            return out

        return distance


def _ordered(knobs: Sequence[Knob]) -> list[str]:
    """Names of the chosen knobs, then of the derived ones."""
    knobs = list(knobs)
    return [each.name for each in knobs if not each.derived] + [each.name for each in knobs if each.derived]
