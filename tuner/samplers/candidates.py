"""What can still be proposed: the valid configurations that are in no trial."""

from collections.abc import Iterable, Sequence

import numpy as np

from ...results import Trial
from ...space import Config
from .encoding import Encoding, stack


class Candidates:
    """Valid configurations that were not tried yet, encoded; a sample of them where the space is too large.

    Args:
        encoding: of the space.
        codes: encoded candidates, shape (n, knobs).
        seen: the configurations that must not be proposed.
        configs: the candidates themselves, where the space is not listed.
        rows: positions of the candidates in a listed space, shape (n,).
    """

    def __init__(
        self,
        encoding: Encoding,
        codes: np.ndarray,
        seen: frozenset[Config],
        *,
        configs: Sequence[Config] = (),
        rows: np.ndarray | None = None,
    ) -> None:
        self.encoding = encoding
        self.codes = codes
        self._seen = seen
        self._configs = configs
        self.rows = rows
        """Their positions in the listed space, shape (n,); None where it is not listed."""

    def __len__(self) -> int:
        return len(self.codes)

    def config(self, index: int) -> Config:
        """The candidate of row `index`."""
        if self.rows is not None:
            return self.encoding.space.at(int(self.rows[index]))
        return self._configs[index]

    def configs(self, indices: np.ndarray) -> list[Config]:
        """The candidates of the rows `indices`, shape (m,)."""
        if self.rows is not None:
            return self.encoding.space.take(self.rows[indices].tolist())
        return [self._configs[i] for i in indices]

    def find(self, configs: Iterable[Config]) -> list[int]:
        """The indices of those of these configurations that are candidates, ascending."""
        if self.rows is not None:
            rows = [row for row in self.encoding.rows(configs) if row is not None]
            return np.flatnonzero(np.isin(self.rows, rows)).tolist()
        wanted = set(configs)
        return [index for index, config in enumerate(self._configs) if config in wanted]

    def lookup(self, code: np.ndarray) -> Config | None:
        """The configuration of a code, in the sample or not; None where it is invalid or was tried."""
        config = self.encoding.decode(code)
        return None if config is None or config in self._seen else config

    def closest(self, code: np.ndarray, rng: np.random.Generator) -> Config:
        """The configuration of `code` where it can be proposed, else one nearest to it; `rng` breaks ties."""
        config = self.lookup(code)
        if config is not None:
            return config
        distance = self.encoding.distances(self.codes, code)
        best = distance.min()
        if self.rows is None:
            # A sample of a large space is sparse: what differs in one knob alone is mostly nearer.
            rows = self.encoding.neighbours(code)
            apart = self.encoding.distances(rows, code)
            for i in np.lexsort((rng.random(len(rows)), apart)):
                if apart[i] >= best:
                    break
                if (config := self.lookup(rows[i])) is not None:
                    return config
        return self.config(rng.choice(np.flatnonzero(distance <= best + 1e-9)))

    def take(self, indices: np.ndarray) -> "Candidates":
        """The candidates of the rows `indices`, shape (m,)."""
        codes = self.codes[indices]
        if self.rows is not None:
            return Candidates(self.encoding, codes, self._seen, rows=self.rows[indices])
        return Candidates(self.encoding, codes, self._seen, configs=[self._configs[i] for i in indices])

    def joined(self, configs: Sequence[Config]) -> "Candidates":
        """These and the given configurations, as far as they are new and encodable."""
        present = {code.tobytes() for code in self.codes}
        new: dict[bytes, tuple[Config, np.ndarray]] = {}
        for config in configs:
            code = None if config in self._seen else self.encoding.encode(config)
            if code is not None and code.tobytes() not in present:
                new[code.tobytes()] = (config, code)
        if not new:
            return self
        added = [config for config, _ in new.values()]
        codes = np.concatenate([self.codes, stack([code for _, code in new.values()], self.codes.shape[1])])
        if self.rows is not None:
            rows = np.concatenate([self.rows, self.encoding.rows(added)])
            return Candidates(self.encoding, codes, self._seen, rows=rows)
        return Candidates(self.encoding, codes, self._seen, configs=[*self._configs, *added])


class Tried:
    """The configurations of trials that become more and more, each of which is looked at once."""

    def __init__(self) -> None:
        self._configs: set[Config] = set()
        self._known = 0
        self._last: Config | None = None

    def of(self, trials: Sequence[Trial]) -> set[Config]:
        """The configurations of these trials. Where they do not go on from those of the last call, all are new."""
        known = self._known
        if known and (known > len(trials) or trials[known - 1].config is not self._last):
            self._configs.clear()
            known = 0
        self._configs.update(trial.config for trial in trials[known:])
        self._known, self._last = len(trials), trials[-1].config if trials else None
        return self._configs


def remaining(
    encoding: Encoding,
    trials: Sequence[Trial],
    rng: np.random.Generator,
    *,
    sample: int,
    around: np.ndarray | None = None,
) -> Candidates:
    """The candidates that `trials` leave.

    All of them where the space can be listed; else `sample` of them, and those that differ in one knob
    from the codes `around` (m, knobs), because a sample of a large space has nothing near the best.
    """
    seen = frozenset(trial.config for trial in trials)
    if encoding.listed is not None:
        left = np.ones(len(encoding.listed), dtype=bool)
        left[[row for row in encoding.rows(seen) if row is not None]] = False
        rows = np.flatnonzero(left)
        return Candidates(encoding, encoding.listed[rows], seen, rows=rows)
    drawn = encoding.space.sample(sample + len(seen), int(rng.integers(2**31)))
    configs = {config: None for config in drawn if config not in seen}
    for code in () if around is None else around:
        for row in encoding.neighbours(code):
            config = encoding.decode(row)
            if config is not None and config not in seen:
                configs[config] = None
    return Candidates(encoding, encoding.codes(configs), seen, configs=list(configs))
