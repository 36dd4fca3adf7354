"""Candidates: the valid configurations that are in no trial."""

from collections.abc import Iterable, Sequence

import numpy as np

from ...results import Trial
from ...space import Config
from .encoding import Encoding, stack


class Candidates:
    """Encoded valid configurations that were not tried yet; a sample of them if the space is too large.

    Args:
        encoding: encoding of the space.
        codes: encoded candidates, shape (n, knobs).
        seen: configurations that must not be proposed.
        configs: the candidates themselves, if the space is not listed.
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
        """Positions in the listed space, shape (n,); None if it is not listed."""

    def __len__(self) -> int:
        return len(self.codes)

    def config(self, index: int) -> Config:
        """Returns the candidate of row `index`."""
        if self.rows is not None:
            return self.encoding.space.at(int(self.rows[index]))
        return self._configs[index]

    def configs(self, indices: np.ndarray) -> list[Config]:
        """Returns the candidates of the rows `indices`, shape (m,)."""
        if self.rows is not None:
            return self.encoding.space.take(self.rows[indices].tolist())
        return [self._configs[i] for i in indices]

    def find(self, configs: Iterable[Config]) -> list[int]:
        """Indices of the given configurations that are candidates, ascending."""
        if self.rows is not None:
            rows = [row for row in self.encoding.rows(configs) if row is not None]
            return np.flatnonzero(np.isin(self.rows, rows)).tolist()
        wanted = set(configs)
        return [index for index, config in enumerate(self._configs) if config in wanted]

    def lookup(self, code: np.ndarray) -> Config | None:
        """Returns the configuration of a code, whether or not it is in the sample; None if it is invalid or was tried."""
        config = self.encoding.decode(code)
        return None if config is None or config in self._seen else config

    def closest(self, code: np.ndarray, rng: np.random.Generator) -> Config:
        """Returns the configuration of `code` if it can be proposed, otherwise a nearest one; `rng` breaks ties."""
        config = self.lookup(code)
        if config is not None:
            return config
        distance = self.encoding.distances(self.codes, code)
        best = distance.min()
        if self.rows is None:
            # A sample of a large space is sparse: configurations that differ in only one knob are mostly nearer.
            rows = self.encoding.neighbours(code)
            distances = self.encoding.distances(rows, code)
            for i in np.lexsort((rng.random(len(rows)), distances)):
                if distances[i] >= best:
                    break
                if (config := self.lookup(rows[i])) is not None:
                    return config
        return self.config(rng.choice(np.flatnonzero(distance <= best + 1e-9)))

    def take(self, indices: np.ndarray) -> "Candidates":
        """Returns the candidates of the rows `indices`, shape (m,)."""
        codes = self.codes[indices]
        if self.rows is not None:
            return Candidates(self.encoding, codes, self._seen, rows=self.rows[indices])
        return Candidates(self.encoding, codes, self._seen, configs=[self._configs[i] for i in indices])

    def joined(self, configs: Sequence[Config]) -> "Candidates":
        """Returns these and the given configurations, as far as they are new and encodable."""
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


class TriedConfigs:
    """Set of the configurations of a growing list of trials. Each trial is processed once."""

    def __init__(self) -> None:
        self._configs: set[Config] = set()
        self._known = 0
        self._last: Config | None = None

    def of(self, trials: Sequence[Trial]) -> set[Config]:
        """Returns the configurations of these trials. If they do not extend those of the last call, all are processed
        again.
        """
        num_processed = self._known
        if num_processed and (num_processed > len(trials) or trials[num_processed - 1].config is not self._last):
            self._configs.clear()
            num_processed = 0
        self._configs.update(trial.config for trial in trials[num_processed:])
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
    """Returns the candidates that `trials` leave.

    These are all of them if the space can be listed. Otherwise they are `sample` of them, and those that differ in one
    knob from the codes `around` (m, knobs), because a sample of a large space contains nothing near the best.
    """
    seen = frozenset(trial.config for trial in trials)
    if encoding.listed is not None:
        is_untried = np.ones(len(encoding.listed), dtype=bool)
        is_untried[[row for row in encoding.rows(seen) if row is not None]] = False
        rows = np.flatnonzero(is_untried)
        return Candidates(encoding, encoding.listed[rows], seen, rows=rows)
    sampled = encoding.space.sample(sample + len(seen), int(rng.integers(2**31)))
    configs = {config: None for config in sampled if config not in seen}
    for code in () if around is None else around:
        for row in encoding.neighbours(code):
            config = encoding.decode(row)
            if config is not None and config not in seen:
                configs[config] = None
    return Candidates(encoding, encoding.codes(configs), seen, configs=list(configs))
