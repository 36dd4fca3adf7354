"""Candidates, the valid configurations that are in no trial, and what samplers that choose among them by a model share."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from ...base.errors import UsageError
from ...results import Trial
from ...space import Config, Space
from .encoding import Encoding, Observations, observe, stack
from .sampler import StepwiseSampler


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


SAMPLE = 2048
"""Number of candidates drawn from a space too large to enumerate."""
LEADERS = 3
"""Number of best trials whose neighbours are candidates in such a space."""


class ModelSampler(StepwiseSampler):
    """Spreads its first trials over the space, then chooses by a model of their outcomes.

    Args:
        space: the valid configurations.
        seed: seed of every random choice.
        startup: number of finished trials, including failed ones, before the model is used; None for the number of
            free knobs plus one, within 4 and 10.

    Raises:
        UsageError: the seed or `startup` is out of range.
    """

    def __init__(self, space: Space, *, seed: int = 0, startup: int | None = None) -> None:
        super().__init__(space, seed=seed)
        if startup is not None and startup < 2:
            raise UsageError(f"`startup` must be at least 2: a model needs two trials, but got {startup!r}.")
        self._encoding = Encoding(space)
        self.startup = min(max(len(self._encoding.knobs) + 1, 4), 10) if startup is None else startup

    def next(self, trials: Sequence[Trial]) -> Config | None:
        rng = np.random.default_rng([self.seed, len(trials)])
        seen = observe(self._encoding, trials)
        best = np.argsort(-seen.objective)[: min(LEADERS, seen.ok.sum())]  # NaN sorts last
        candidates = remaining(self._encoding, trials, rng, sample=SAMPLE, around=seen.codes[best])
        if len(candidates) < 2:
            return candidates.config(0) if len(candidates) else None
        if not self.ready(seen):
            return candidates.config(spread(candidates, seen, rng))
        return self.choose(candidates, seen, rng)

    def ready(self, seen: Observations) -> bool:
        """True if there is enough to learn from: `startup` outcomes, and two different ones that succeeded."""
        finished = len(seen.codes) - int(seen.pending.sum())
        return finished >= self.startup and len(np.unique(seen.objective[seen.ok])) > 1

    @abstractmethod
    def choose(self, candidates: Candidates, seen: Observations, rng: np.random.Generator) -> Config:
        """Returns the configuration to try next, either a candidate or one that `candidates.lookup` finds."""


def spread(candidates: Candidates, seen: Observations, rng: np.random.Generator, *, draws: int = 16) -> int:
    """Row of a candidate far from earlier trials, and farther from failed ones.

    It is the best of a few draws rather than the farthest of all, because the corners of a space are rarely good.
    Mitchell, "Spectrally optimal sampling for distribution ray tracing" (1991): best-candidate sampling.
    """
    rows = rng.choice(len(candidates), size=min(draws, len(candidates)), replace=False)
    if not len(seen.codes):
        return int(rows[0])
    apart = np.stack([candidates.encoding.distances(seen.codes, candidates.codes[row]) for row in rows])
    # Share of failures around a candidate, weighted by distance; one success is added as a prior.
    weight = np.exp(-((apart / (0.15 * len(candidates.encoding.knobs))) ** 2))
    risk = weight[:, seen.failed].sum(axis=1) / (weight.sum(axis=1) + 1.0)
    return int(rows[np.argmax(apart.min(axis=1) * (1.0 - risk))])


def subsample(candidates: Candidates, limit: int, seen: Observations, rng: np.random.Generator) -> Candidates:
    """At most `limit` of the candidates: the nearest to the best trial, and a random share."""
    if len(candidates) <= limit:
        return candidates
    best = seen.codes[np.nanargmax(seen.objective)]
    near = np.argsort(candidates.encoding.distances(candidates.codes, best), kind="stable")[: limit // 4]
    far = rng.choice(len(candidates), size=limit - len(near), replace=False)
    return candidates.take(np.union1d(near, far))
