"""From hardware, which need not be present, to a space of configurations and the best of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..base.device import DESCRIBED, Device
from ..base.errors import SpaceError, UsageError
from ..knobs.lossy import Lossy, lossy_in
from ..knobs.strategy import ON_REQUEST, STANDARD, checked
from ..models.spaces import lossy_of_space
from ..space import Choices, Config, Space
from .estimate import Estimate, EstimateTable, joined
from .estimator import Estimator
from .hardware import Hardware

MAX_CONFIGS = 200_000
"""Maximum number of configurations that are predicted at once; a larger space is sampled."""
DRAWN = 10_000
"""Configurations that are drawn of a space that steps to neighbours improve."""
STARTS, STEPS = 3, 20
"""Configurations whose neighbours are predicted at each step, and the most steps."""


def device_of(hardware: Hardware) -> Device:
    """The hardware as a `Device`, in the form of detected devices; `count` is that of a node.

    The compute capability is the lowest that has the dtypes the hardware lists.
    """
    rates = hardware.tflops
    capability = (8, 9) if "fp8" in rates else (8, 0) if "bf16" in rates else (7, 0)
    is_cpu = hardware.kind == "cpu"
    return Device(
        type="cpu" if is_cpu else "cuda",
        name=hardware.name,
        count=int(hardware.devices_per_node),
        memory_mib=int(hardware.memory_gib * 1024),
        capability=None if is_cpu else capability,
        features=frozenset({DESCRIBED, *(name for name in ("bf16", "fp16") if is_cpu and name in rates)}),
    )


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A configuration with its estimate."""

    config: Config
    estimate: Estimate
    lossy: tuple[str, ...] = ()
    """The knobs whose values trade accuracy for speed."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Predictions of the configurations of a space."""

    best: tuple[Ranked, ...]
    """Those that fit, the fastest first."""
    valid: int | None
    """Valid configurations of the space; None if they are too many to count."""
    predicted: int
    """Number of them that were predicted."""
    fitting: int
    """Number of the predicted ones that fit."""
    smallest: Ranked | None
    """The one that needs the least memory."""
    best_exact: Ranked | None
    """The fastest that fits and has no lossy value; None if the space has no lossy values, or none fits."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Configurations of a space with their predictions: row i of the table is that of configuration i."""

    space: Space
    estimator: Estimator
    table: EstimateTable
    choices: Choices
    """Their codes."""
    drawn: int
    """The first `drawn` rows were sampled, or are the whole space."""

    @property
    def valid(self) -> int | None:
        """Valid configurations of the space; None if they are too many to count."""
        return self.space.size if self.space.enumerable else None

    @property
    def complete(self) -> bool:
        """True if the predictions are of the whole space."""
        return self.valid == self.drawn

    def take(self, indices: np.ndarray) -> list[Config]:
        """The configurations of these rows."""
        return self.space.made(self.choices.take(indices))

    def ranked(self, index: int) -> Ranked:
        """The configuration of a row, with its estimate."""
        (config,) = self.take(np.array([index]))
        return Ranked(config=config, estimate=self.table.row(index), lossy=lossy_in(config, lossy_of_space(self.space)))

    def with_neighbours(self, indices: Sequence[int], changes: int) -> "Predicted":
        """Adds the configurations that differ from those of these rows in at most `changes` knobs."""
        if not len(indices):
            return self
        near = self.space.near(self.choices.row(indices[0]), changes)
        for index in indices[1:]:
            near = near.followed_by(self.space.near(self.choices.row(index), changes))
        unseen = near.unique(without=self.choices)
        if not unseen.rows:
            return self
        return replace(
            self,
            choices=self.choices.followed_by(unseen),
            table=joined(self.table, _table(self.estimator, self.space, unseen)),
        )


def predict(estimator: Estimator, space: Space, *, most: int | None = None) -> Predicted:
    """Predicts every configuration of a space, or a sample of `most` of them if there are more.

    Args:
        most: None for `MAX_CONFIGS`, or `DRAWN` where a space cannot be listed.
    """
    if most is None:
        most = MAX_CONFIGS if space.enumerable else DRAWN
    choices = space.choices(most, seed=0)
    table = _table(estimator, space, choices)
    return Predicted(space=space, estimator=estimator, table=table, choices=choices, drawn=choices.rows)


def _table(estimator: Estimator, space: Space, choices: Choices) -> EstimateTable:
    # The estimator derives `dp` and `grad_accum` itself.
    by_columns = {knob.name for knob in space.knobs if knob.derived} <= {"dp", "grad_accum"}
    return estimator.table(columns_of(space, estimator, choices) if by_columns else space.made(choices))


def climbed(predicted: Predicted, wanted: Callable[[Predicted, int], Sequence[int]]) -> Predicted:
    """The predictions, with those of the neighbours of the wanted configurations, step by step until no others are wanted:
    neighbours in two knobs, and at last those of the best in three, since a larger micro-batch often fits only with another
    degree and more checkpointing.

    Args:
        predicted: predictions of a sample.
        wanted: returns rows of the predictions, the given number of the best, or some more.
    """
    for changes, count in ((2, STARTS), (3, 1)):
        improved: set[int] = set()
        for _ in range(STEPS):
            rows = wanted(predicted, count)
            if improved.issuperset(rows):
                break
            predicted = predicted.with_neighbours(sorted(set(rows) - improved), changes)
            improved.update(rows)
    return predicted


def survey(
    estimator: Estimator, space: Space, *, top: int = 5, order: Callable[[EstimateTable], np.ndarray] | None = None
) -> Survey:
    """Predicts every configuration of a space, and ranks those that fit by throughput.

    A space with more than `MAX_CONFIGS` is sampled evenly, and the best are improved by steps to neighbours.

    Args:
        order: selects and ranks configurations in place of `ranking`.
    """
    if top < 1:
        raise UsageError(f"top must be at least 1, but got {top}")
    predicted = predict(estimator, space)
    order = order or ranking
    if not predicted.complete:
        predicted = climbed(predicted, lambda predictions, count: order(predictions.table)[:count].tolist())
    ranks = order(predicted.table)
    return surveyed(predicted, ranks, tuple(predicted.ranked(int(index)) for index in ranks[:top]))


def surveyed(predicted: Predicted, ranks: np.ndarray, best: tuple[Ranked, ...]) -> Survey:
    """Summarises predictions: those at `ranks` fit, in that order, and `best` are shown. Counts are those of the configurations
    that were sampled evenly."""
    exact = ranks[:0]
    if lossy := lossy_of_space(predicted.space):
        exact = ranks[~_lossy(predicted, lossy)[ranks]]
    return Survey(
        best=best,
        valid=predicted.valid,
        predicted=predicted.drawn,
        fitting=int((ranks < predicted.drawn).sum()),
        smallest=predicted.ranked(int(np.argmin(predicted.table.peak_memory_mib))) if len(predicted.table) else None,
        best_exact=predicted.ranked(int(exact[0])) if len(exact) else None,
    )


def columns_of(space: Space, estimator: Estimator, choices: Choices) -> dict[str, np.ndarray]:
    """The values of a space's knobs as columns, a row for each row of codes; an inactive knob has the value that the estimator
    assumes. Derived knobs are left to the estimator."""
    columns = {}
    for knob in space.knobs:
        if knob.derived:
            continue
        codes = choices.codes.get(knob.name)
        if codes is None:  # fixed
            codes = np.zeros(choices.rows, int)
        # An inactive knob has the code -1: the last value.
        absent = [getattr(estimator.training, knob.name, None)] if (codes < 0).any() else []
        values = [*knob.values, *absent]
        plain = {type(value) for value in values} in ({bool}, {int}, {float}, {int, float})
        columns[knob.name] = np.array(values, None if plain else object)[codes]
    return columns


def _lossy(predicted: Predicted, lossy: Lossy) -> np.ndarray:
    """True for each configuration with a lossy value."""
    columns, marked = predicted.choices.codes, np.zeros(len(predicted.table), dtype=bool)
    for name, values in lossy.items():
        codes = columns.get(name)  # None for a fixed knob
        marked |= True if codes is None else np.isin(codes, [predicted.space[name].code(v) for v in values])
    return marked


def ranking(table: EstimateTable) -> np.ndarray:
    """Indices of the configurations that fit, the fastest first; ties are ordered by memory."""
    fits = np.flatnonzero(table.fits & np.isfinite(table.step_ms))
    return fits[np.lexsort((table.peak_memory_mib[fits], -table.preference[fits]))]


def checked_config(space: Space, values: Mapping[str, Any]) -> Config:
    """A configuration of a space from values of its knobs; missing knobs have their defaults.

    It also accepts the knobs that no default space has.

    Raises:
        SpaceError: a knob is unknown, or the values are not valid together; names the rule that they break.
    """
    free = {knob.name for knob in space.knobs}
    on_request = {name: checked(name, values[name]) for name in ON_REQUEST if name in values and name not in free}
    unknown_names = [name for name in values if name not in free and name not in on_request]
    if unknown_names:
        from ..base.errors import unknown

        if (name := unknown_names[0]) in STANDARD:
            raise SpaceError(
                f"{name} is not a knob for this model on these devices; it may need more of them (--devices): `redline space` "
                "says why a knob is missing"
            )
        raise SpaceError(unknown("knob", unknown_names[0], {*free, *ON_REQUEST}))
    config = _nearest(space, {name: value for name, value in values.items() if name not in on_request})
    if "strategy" in on_request:
        if values.get("checkpoint_ratio"):
            raise SpaceError("the items ckpt of a strategy select the recomputed blocks: leave checkpoint_ratio out")
        config = Config({name: value for name, value in config.items() if name != "checkpoint_ratio"})
    return Config({**config, **on_request}) if on_request else config


def _nearest(space: Space, values: Mapping[str, Any]) -> Config:
    """The valid configuration with these values that is nearest to the defaults.

    `space.config` requires the values of all free knobs to be valid together; with tp = 8 the default micro-batch, for example,
    may be invalid. So the values are fixed in a copy, whose default is valid.
    """
    narrowed = space.copy()
    derived = {knob.name for knob in space.knobs if knob.derived}
    for name, value in values.items():
        if name not in derived:
            narrowed.fix(name, value)
    config = narrowed.default()
    for name in derived & set(values):
        if config[name] != values[name]:
            raise SpaceError(f"{name} follows from the other knobs and is {config[name]}, but {values[name]} was given")
    return config
