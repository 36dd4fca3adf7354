"""Configurations as arrays, one entry each."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import UsageError, unknown
from ..knobs.layers import FOLLOWED, BlockStrategy, of_blocks, parse
from ..knobs.meaning import PIPELINE_SCHEDULES, REDUCED, blocks_of_stages
from ..knobs.rules import CHUNKED, GENERAL, RULES, RuleContext
from ..knobs.strategy import BLOCK_KNOBS, OFFLOADS
from ..models.parallel import PIPELINES
from .facts.model_facts import Variant
from .setup import PRECISIONS, TrainingSetup

_NUMBERS = {
    "tp": int, "sp": int, "cp": int, "pp": int, "ep": int, "etp": int, "zero": int, "hsdp": int,
    "micro_batch": int, "virtual_stages": int,
    "checkpoint_ratio": float, "capacity_factor": float, "sequence_parallel": bool, "fused_optimizer": bool,
}  # fmt: skip
_WORDS = ("precision", "attention", "fusion", "kernels", "offload", "pipeline_schedule", "reduce_dtype")
_ABSENT = np.array(None, dtype=object)
_KNOWN = {"precision": PRECISIONS, "offload": OFFLOADS, "pipeline_schedule": PIPELINES, "reduce_dtype": REDUCED}


class Split(NamedTuple):
    """Division of a model among the ranks of a pipeline, with block strategies."""

    pp: int
    chunks: int
    """Stages of a rank."""
    v_shaped: bool
    """True if the second chunks are in the opposite order of ranks."""
    layers: tuple[BlockStrategy, ...] | None
    """Strategy of each block, if the knob `strategy` is set."""
    sizes: tuple[int, ...] | None = None
    """Number of blocks of each stage, if the knob `stage_blocks` is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobArrays:
    """The knobs of n configurations: arrays of length n."""

    tp: np.ndarray
    sp: np.ndarray
    """Ranks that share each sequence and exchange heads."""
    cp: np.ndarray
    """Ranks that share each sequence in a ring."""
    pp: np.ndarray
    dp: np.ndarray
    ep: np.ndarray
    """Replicas that share the experts."""
    etp: np.ndarray
    """1 where experts are not cut over the `tp` ranks, which share them and divide the tokens."""
    capacity_factor: np.ndarray
    """Rows that each expert computes, relative to the mean; 0 for those that the router gives it."""
    zero: np.ndarray
    hsdp: np.ndarray
    """Groups of replicas, each with all pieces of sharded tensors."""
    micro_batch: np.ndarray
    grad_accum: np.ndarray
    """Micro-batches of a replica in one optimizer step."""
    checkpoint_ratio: np.ndarray
    sequence_parallel: np.ndarray
    fused_optimizer: np.ndarray
    precision: np.ndarray
    attention: np.ndarray
    fusion: np.ndarray
    kernels: np.ndarray
    offload: np.ndarray
    pipeline_schedule: np.ndarray
    order: np.ndarray
    """Index of the pipeline schedule in `PIPELINE_SCHEDULES`."""
    reduce_dtype: np.ndarray
    virtual_stages: np.ndarray
    """Model chunks of a pipeline rank; 1 if the pipeline schedule has no more."""
    strategy: np.ndarray
    """Text, or None if all blocks have the same strategy."""
    stage_blocks: np.ndarray
    """Text, or None if stages have even shares of the blocks."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def replicas(self) -> np.ndarray:
        """Ranks that train the same weights, including those that share a sequence."""
        return self.dp * self.sequence_ranks

    @property
    def sequence_ranks(self) -> np.ndarray:
        """Ranks that share each sequence."""
        return self.sp * self.cp

    @property
    def shard_ranks(self) -> np.ndarray:
        """Replicas that share what ZeRO shards."""
        return self.replicas // self.hsdp

    @property
    def token_splits(self) -> np.ndarray:
        """Ranks of a layer that share experts and tokens: those of `tp` if experts are whole."""
        return np.where(self.etp == 1, self.tp, 1)

    @property
    def expert_tp(self) -> np.ndarray:
        """Ranks that each expert is cut over."""
        return self.tp // self.token_splits

    @property
    def expert_dp(self) -> np.ndarray:
        """Ranks with the same experts."""
        return np.maximum(self.replicas * self.token_splits // self.ep, 1)

    @property
    def features(self) -> np.ndarray:
        """Numbers that are close for similar configurations, shape (n, f): 1 for a doubling of a degree or size, 2 for a switch
        and for another name."""
        numbers = [getattr(self, name) for name in (*_NUMBERS, "dp", "grad_accum")]
        counts = [column for column in numbers if column.dtype.kind in "iu"]
        columns = [np.log2(np.maximum(column, 1)) + (column > 0) for column in counts]
        columns += [2.0 * column for column in numbers if column.dtype.kind not in "iu"]
        switches = (
            self.fusion,
            self.kernels,
            self.attention == "eager",
            *(getattr(self, name) for name in BLOCK_KNOBS),
        )
        columns += [2.0 * np.array([value not in (None, False) for value in column.tolist()]) for column in switches]
        for name, values in _KNOWN.items():
            columns += [np.sqrt(2) * (getattr(self, name) == value) for value in values]
        return np.stack(columns, axis=1).astype(float)

    def order_that(self, fact: str) -> np.ndarray:
        """True where the pipeline schedule has `fact` of `redline.knobs.meaning.PipelineSchedule`; booleans."""
        return np.array([bool(getattr(schedule, fact)) for schedule in PIPELINE_SCHEDULES.values()])[self.order]

    def take(self, index: np.ndarray) -> "KnobArrays":
        """The configurations at `index`."""
        return KnobArrays(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def splits(self) -> Iterator[tuple[Split, np.ndarray]]:
        """Each distinct division of the model, with the mask of its configurations."""
        plain = np.equal(self.strategy, _ABSENT) & np.equal(self.stage_blocks, _ABSENT)
        v_shaped = self.order_that("v_shaped")
        chunks = int(self.virtual_stages.max(initial=0)) + 1
        codes = (self.pp * chunks + self.virtual_stages) * 2 + v_shaped
        for code in np.unique(codes[plain]).tolist():
            indices = np.flatnonzero(plain & (codes == code))
            yield Split(code // 2 // chunks, code // 2 % chunks, bool(code % 2), None), indices
        # Parts outside blocks follow the configuration's own knobs.
        by_split: dict[tuple[Split, tuple[int, ...]], list[int]] = {}
        for index in np.flatnonzero(~plain).tolist():
            pp, many, turned = int(self.pp[index]), int(self.virtual_stages[index]), v_shaped[index]
            followed = self.followed(index)
            layer_text, stages = self.strategy[index], self.stage_blocks[index]
            layers = (
                None if layer_text is None else tuple(of_blocks(layer_text, parse(layer_text)[-1].last + 1, **followed))
            )
            sizes = None if stages is None else blocks_of_stages(stages)
            key = Split(pp, many, bool(turned), layers, sizes), tuple(followed.values())
            by_split.setdefault(key, []).append(index)
        for (split, _), positions in by_split.items():
            yield split, np.array(positions)

    def followed(self, index: int) -> dict[str, Any]:
        """The knobs of one configuration that its blocks follow where a run lacks the item, as `layers.own_knobs`."""
        return {name: int(getattr(self, name)[index]) for name in FOLLOWED}

    def of_group(self, layer: BlockStrategy, recomputed: float) -> "KnobArrays":
        """The configurations for a group of blocks with the strategy `layer`, a share `recomputed` of which is recomputed. Ranks
        that do not share a block's layers share its samples."""
        sharers = self.tp // layer.tp
        return replace(
            self,
            tp=np.full(len(self), layer.tp),
            dp=self.dp * sharers,
            micro_batch=self.micro_batch // sharers,
            zero=np.full(len(self), layer.zero),
            checkpoint_ratio=np.full(len(self), float(recomputed)),
        )

    def of_layers(self, layers: Sequence[BlockStrategy]) -> "KnobArrays":
        """A single configuration for blocks with these strategies."""
        every = [self.of_group(layer, float(layer.ckpt)) for layer in layers]
        return KnobArrays(
            **{field.name: np.concatenate([getattr(cols, field.name) for cols in every]) for field in fields(self)}
        )

    def with_checkpoints(self, ratio: np.ndarray) -> "KnobArrays":
        """The configurations with these shares of the blocks recomputed."""
        return replace(self, checkpoint_ratio=np.broadcast_to(ratio, len(self)).astype(float))

    def variants(self) -> Iterator[tuple[Variant, np.ndarray]]:
        """Each (precision, attention, fusion, kernels) that occurs, with the mask of its configurations."""
        keys = list(
            zip(
                self.precision.tolist(), self.attention.tolist(), self.fusion.tolist(), self.kernels.tolist(),
                strict=True,
            )
        )  # fmt: skip
        seen: dict[Variant, int] = {}
        codes = np.fromiter((seen.setdefault(key, len(seen)) for key in keys), int, len(keys))
        for key, code in seen.items():
            yield key, np.flatnonzero(codes == code)


def knob_arrays(
    configs: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any] | np.ndarray], setup: TrainingSetup
) -> KnobArrays:
    """Arrays of the standard knobs; a missing knob has the setup's value.

    `dp` follows from the setup's devices and `grad_accum` from its global batch if they are not knobs.

    Args:
        configs: mappings, one a configuration, or one mapping (a DataFrame too) of columns.

    Raises:
        UsageError: a value is not valid for its knob, or does not fit the devices or the global
            batch; names the first such configuration.
    """
    table = _Table(configs, setup.fixed)
    values = _knobs(table, setup)
    sp, cp, pp = values["sp"], values["cp"], values["pp"]
    dp = _replicas(table, setup, values["tp"] * sp * cp * pp)
    accum = _accumulation(table, setup, values["micro_batch"] * dp)
    if setup.own:  # one replica has nothing to share (`knobs.meaning.exchange_of`)
        values["zero"] = np.where(dp * sp * cp > 1, values["zero"], 0)
    for name, array in (("dp", dp), ("grad_accum", accum)):
        table.refuse(array < 1, f"{name} must be at least 1")
    several = np.isin(values["pipeline_schedule"].astype(str), CHUNKED) & (pp > 1)
    values["virtual_stages"] = np.where(several, values["virtual_stages"], 1)
    codes = {name: code for code, name in enumerate(PIPELINE_SCHEDULES)}
    order = np.fromiter(map(codes.__getitem__, values["pipeline_schedule"].tolist()), int, table.size)
    texts = {name: table.texts(name) for name in BLOCK_KNOBS}
    arrays = KnobArrays(dp=dp, grad_accum=accum, order=order, **texts, **values)
    context = RuleContext(seq_len=setup.seq_len or 1)
    set_texts = {name for name, column in texts.items() if (column != _ABSENT).any()}
    rules_of_texts = [rule for rule in RULES if set_texts & set(rule.knobs)]
    for rule in (*GENERAL, *rules_of_texts):
        table.refuse(np.asarray(rule.broken(arrays, context)), rule.reason(context))
    table.refuse(
        arrays.replicas * arrays.token_splits % arrays.ep != 0,
        "ep must divide the dp * sp * cp replicas",
        arrays.replicas,
    )
    return arrays


def _knobs(table: "_Table", setup: TrainingSetup) -> dict[str, np.ndarray]:
    """The knobs that do not depend on others, by name, each checked against its values."""
    values = {name: table.numbers(name, kind, getattr(setup, name)) for name, kind in _NUMBERS.items()}
    for name in _WORDS:
        default = {"pipeline_schedule": setup.pipeline, "reduce_dtype": setup.reduce_dtype or "fp32"}.get(name)
        default = getattr(setup, name) if default is None else default
        values[name] = table.words(name, default)
        if name in _KNOWN:
            for value in set(values[name].tolist()) - set(_KNOWN[name]):
                index = values[name].tolist().index(value)
                raise UsageError(f"configuration {table.show(index)}: {unknown(name, value, _KNOWN[name])}")
    for name, (low, high) in _BOUNDS.items():
        rule = f"at least {low}" if high is None else f"from {low} to {high}"
        bad = ~(values[name] >= low) | (~(values[name] <= high) if high is not None else False)
        table.refuse(bad, f"{name} must be {rule}")
    return values


def _replicas(table: "_Table", setup: TrainingSetup, split: np.ndarray) -> np.ndarray:
    """Data-parallel replicas: the knob, or the devices divided by those of one replica."""
    values, is_set = table.optional("dp")
    dp = setup.devices // split
    uneven = ~is_set & (dp * split != setup.devices)
    table.refuse(uneven, f"tp * sp * cp * pp must divide the devices, {setup.devices}", split)
    return np.where(is_set, values, dp)


def _accumulation(table: "_Table", setup: TrainingSetup, together: np.ndarray) -> np.ndarray:
    """Micro-batches of a step: the knob, the setup's, or the global batch divided by the samples of one pass of all replicas."""
    values, is_set = table.optional("grad_accum")
    total = setup.global_batch
    if setup.grad_accum is not None or total is None:
        return np.where(is_set, values, setup.grad_accum or 1)
    accum = total // np.maximum(together, 1)
    uneven = ~is_set & (accum * together != total)
    table.refuse(uneven, f"micro_batch * dp must divide the global batch, {total}", together)
    return np.where(is_set, values, accum)


_BOUNDS = {
    "tp": (1, None), "sp": (1, None), "cp": (1, None), "pp": (1, None), "ep": (1, None), "hsdp": (1, None),
    "micro_batch": (1, None), "zero": (0, 3),
    "checkpoint_ratio": (0, 1), "virtual_stages": (1, None), "capacity_factor": (0, None), "etp": (0, None),
}  # fmt: skip
"""Smallest and largest values of numeric knobs."""


class _Table:
    """Uniform access to rows or columns."""

    def __init__(self, configs: Any, fixed: frozenset[str] = frozenset()) -> None:
        self._fixed = fixed
        self._rows: list[Any] = []
        if hasattr(configs, "columns") and hasattr(configs, "to_dict"):
            configs = {name: configs[name].to_numpy() for name in configs.columns}
        if isinstance(configs, Mapping):
            self._columns: dict[str, Any] = {name: np.asarray(value) for name, value in configs.items()}
            self.size = len(next(iter(self._columns.values()))) if self._columns else 0
            return
        self._rows = [config.to_dict() if hasattr(config, "to_dict") else dict(config) for config in configs]
        self.size = len(self._rows)
        self._columns = {
            name: [row.get(name) for row in self._rows] for name in dict.fromkeys(itertools.chain(*self._rows))
        }

    def _get(self, name: str, default: Any) -> "np.ndarray | list[Any]":
        """A knob of every configuration. A missing value is None, or NaN where columns are given."""
        column = None if name in self._fixed else self._columns.get(name)
        if column is None:
            return np.full(self.size, default)
        if isinstance(column, np.ndarray) and column.dtype.kind != "O":
            missing = np.isnan(column) if column.dtype.kind == "f" else np.zeros(0, bool)
            return np.where(missing, default, column) if missing.any() else column
        missing_values = (value is None or (value != value and not self._rows) for value in column)
        return [default if is_missing else value for is_missing, value in zip(missing_values, column, strict=True)]

    def numbers(self, name: str, kind: type, default: Any) -> np.ndarray:
        try:
            got = np.asarray(self._get(name, default), dtype=float)
        except (TypeError, ValueError):
            raise UsageError(f"knob '{name}' must be a number in every configuration") from None
        if kind is float:
            return got
        integers = got.astype(int) if not np.isnan(got).any() else None
        if integers is None or (integers != got).any():
            raise UsageError(f"knob '{name}' must be an integer in every configuration")
        return integers.astype(bool) if kind is bool else integers

    def optional(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The integers of a knob, 0 where a configuration lacks it, and True where a configuration has it."""
        got = self.numbers(name, float, np.nan)
        is_set = ~np.isnan(got)
        if (got[is_set] % 1 != 0).any():
            raise UsageError(f"knob '{name}' must be an integer in every configuration")
        return np.where(is_set, got, 0).astype(int), is_set

    def words(self, name: str, default: Any) -> np.ndarray:
        got = self._get(name, default)
        return np.asarray(got, dtype=bool if isinstance(default, bool) else object)

    def texts(self, name: str) -> np.ndarray:
        if name not in self._columns:
            return np.full(self.size, None, dtype=object)
        got = np.empty(self.size, dtype=object)
        got[:] = [None if value is None else str(value) for value in self._get(name, None)]
        return got

    def refuse(self, bad: np.ndarray, rule: str, values: np.ndarray | None = None) -> None:
        """Raises UsageError if any configuration is bad: names the first, the rule that it breaks, and its entry of `values`."""
        if bad.any():
            index = int(np.argmax(bad))
            but = "" if values is None else f", but is {int(values[index])}"
            raise UsageError(f"configuration {self.show(index)}: {rule}{but}")

    def show(self, index: int) -> str:
        if self._rows:
            return str(self._rows[index])
        row = {name: column[index] for name, column in self._columns.items()}
        return str({name: value.item() if hasattr(value, "item") else value for name, value in row.items()})
