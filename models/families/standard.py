"""Schedule of the standard knobs, common to all families."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ...base.errors import MissingModuleError, ScheduleError, UsageError
from ...knobs.layers import BlockStrategy, of_blocks, own_knobs
from ...knobs.meaning import Placement, blocks_of_stages, recomputed, stage_sizes
from ..skeleton import short_copy

if TYPE_CHECKING:
    from torch import nn

    from ...schedule import Schedule

T = TypeVar("T")

KNOBS = ("checkpoint_ratio", "fusion", "kernels")
"""Knobs that rewrite the model on one device and that a StandardSchedule supports."""

NO_TENSOR_PARALLEL = (
    "neither transformers nor redline has a tensor-parallel plan for this model; docs/add-a-model.md shows one"
)
NO_PIPELINE = "neither transformers nor redline has a pipeline plan for this model; docs/add-a-model.md shows one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Parallel knobs that a model supports: obstacles in words, None where there is none."""

    tp: Callable[[int], str | None]
    """Obstacle to cutting the model over this number of tensor-parallel ranks."""
    sequences: Callable[[int, int, int], str | None]
    """`sequences(sp, cp, tp)`: obstacle to sharing its sequences among ranks: `sp` of them exchange heads, `cp` of
    them pass keys around a ring, and each layer is cut over `tp` ranks.
    """
    pp: Callable[[int], str | None]
    """Obstacle to dividing it into this number of pipeline stages."""
    sequence_parallel: str | None
    """Obstacle to cutting the sequence between regions. If there is none, tp must divide a sample's tokens."""
    replicas: str | None = None
    """Obstacle to replicas with samples of their own."""
    virtual_stages: str | None = None
    """Obstacle to several stages on a pipeline rank."""
    zero_in_stages: str | None = None
    """Obstacle to sharding parameters and gradients (ZeRO 2 and 3) over the replicas of a pipeline."""
    float8: Callable[[int], str | None] = lambda ranks: None
    """Obstacle to 8-bit products in the blocks, cut over this number of tensor-parallel ranks."""
    padding: Callable[[int], str] = lambda ranks: ""
    """Tensors that are padded with zeros if this number of tensor-parallel ranks does not divide them; empty for none."""


class Runs(NamedTuple):
    """The repeated blocks of a model, and how runs of them can differ, as in a `RuleContext`."""

    blocks: int
    """Number of blocks."""
    no_runs: str | None = None
    """Obstacle to cutting them unlike each other."""


@dataclass(frozen=True)
class StandardSchedule:
    """`schedule(sch, config)`: applies the standard knobs to the repeated blocks of a model.

    | knob | effect |
    |---|---|
    | `tp`, `sequence_parallel` | weights are cut over the mesh's `tp` axis according to the family |
    | `sp` | ranks along the mesh's `dp` axis share sequences, and heads in attention (Ulysses) |
    | `ep` | neighbours along the mesh's `dp` axis share the experts of mixtures |
    | `etp` | 1: experts are not cut over the `tp` axis, whose ranks share them too and divide the tokens |
    | `capacity_factor` | experts drop rows beyond their capacity |
    | `cp` | like `sp`, but keys and values are passed around a ring (ring attention) |
    | `pp` | stages over the mesh's `pp` axis, with even shares of the blocks; the caller calls `sch.pipeline` |
    | `virtual_stages` | number of stages on each of its ranks |
    | `stage_blocks` | number of blocks of each stage, in place of even shares |
    | `checkpoint_ratio` | a share of each stage's blocks is recomputed, spread evenly |
    | `strategy` | runs of blocks are cut over fewer ranks, which share samples; `ckpt` recomputes |
    | `fusion` | each block is compiled in place; a model without repeated blocks as a whole |
    | `kernels` | the loss is computed from hidden states, without the logits of a whole micro-batch |

    Raises (when called):
        ScheduleError: the model cannot be cut this way; `support` returns that in advance.
    """

    select: "str | Callable[[Schedule], list[Schedule]]"
    """The repeated blocks of a model, in order: a pattern of their paths, as in `Schedule.select`, or a function."""
    tensor_parallel: "Callable[[Schedule, Sequence[Schedule], bool], None] | None" = None
    """`tensor_parallel(sch, blocks, sequence_parallel)` cuts the model over the `tp` axis; None if it is not supported."""
    stage_ends: "Callable[[Schedule, int], list[Schedule]] | None" = None
    """`stage_ends(sch, stages)`: the last module of each stage but the last; None for even shares of the blocks.
    Raises ScheduleError if that is impossible.
    """
    no_sequence_parallel: str | None = None
    """Obstacle to cutting the sequence in this family."""
    late: tuple[str, ...] = ()
    """Paths of modules after the blocks that the model registers before them."""
    no_runs: str | None = None
    """Obstacle to runs of blocks with unlike `tp` (`strategy`)."""
    no_stage_blocks: str | None = None
    """Obstacle to stages with given numbers of blocks (`stage_blocks`)."""

    def blocks(self, sch: "Schedule") -> "list[Schedule]":
        """Returns the repeated blocks of a model, in order."""
        return sch.select(self.select) if isinstance(self.select, str) else self.select(sch)

    def __call__(self, sch: "Schedule", config: Mapping[str, Any]) -> None:
        from ...schedule.parallel.experts import balances

        blocks = self.blocks(sch)
        layers = strategies_of(config, len(blocks))
        ranks = config.get("pp", 1)
        stages = ranks * config.get("virtual_stages", 1) if ranks > 1 else 1
        ends = self._stage_ends(sch, blocks, stages, config.get("stage_blocks"))
        tp, ep = config.get("tp", 1), config.get("ep", 1)
        sp, cp = config.get("sp", 1), config.get("cp", 1)
        whole_experts = tp > 1 and config.get("etp", 0) == 1
        if sp * cp > 1:
            sch.cut_sequence(sp=sp, cp=cp)
        degrees = [layer.tp for layer in layers or ()]
        self._share_samples(sch, _between(blocks, ends), degrees, tp)
        if tp > 1:
            uncut = {block.path for block, degree in zip(blocks, degrees) if degree == 1}
            cut = [block for block in blocks if block.path not in uncut]
            sequence_parallel = bool(config.get("sequence_parallel", False))
            if whole_experts:
                # Before layers are cut, so that experts are left whole. A loss that balances them is of all tokens.
                sch.shard_experts(ep, whole=True, divided=sequence_parallel and not balances(sch.module))
            self._cut(sch, cut, sequence_parallel)
        if ep > 1 and not whole_experts:
            sch.shard_experts(ep)
        if config.get("capacity_factor", 0):
            sch.limit_experts(config["capacity_factor"])
        for stage_end in ends:
            stage_end.cut_pipeline_stage(late=[path for path in self.late if path in sch])
        for block, layer in zip(blocks, layers or ()):
            if layer.ckpt:
                block.checkpoint()
        for stage in _between(blocks, ends) if layers is None else ():
            for index in recomputed(len(stage), config.get("checkpoint_ratio", 0)):
                stage[index].checkpoint()
        if config.get("fusion", False):
            for block in blocks or [sch]:
                # Shapes do not change in training, so code for dynamic shapes has no advantage.
                block.compile(dynamic=False)
        if config.get("kernels", False):
            head_of(sch, blocks).fused_loss()

    def support(self, sch: "Schedule") -> Support:
        """Returns the supported parallel knobs of a model, found by trials on a copy without weights.

        Args:
            sch: schedule of the model or of its skeleton; it is not changed. Its mesh is ignored.
        """
        from ...schedule.parallel.experts import replicas_obstacle
        from ...schedule.parallel.sequences import obstacle

        trials = _Trials(self, sch)
        cut = cache(lambda ranks: trials.cut(ranks) if ranks > 1 else trials.uncut())
        staged = cache(lambda stages: trials.staged(stages) if stages > 1 else None)
        return Support(
            tp=lambda ranks: cut(ranks).obstacle,
            sequences=cache(lambda sp, cp, tp: obstacle(sch.module, sp, cp, tp) if sp * cp > 1 else None),
            pp=staged,
            replicas=replicas_obstacle(sch.module),
            sequence_parallel=self.no_sequence_parallel or trials.cut(1, sequence_parallel=True).obstacle,
            zero_in_stages=trials.tied_stages() if not staged(2) else None,
            float8=lambda ranks: cut(ranks).obstacle or cut(ranks).float8,
            padding=lambda ranks: cut(ranks).padding,
        )

    def no_kernels(self, sch: "Schedule") -> str | None:
        """Obstacle to a loss without materialised logits, as in `support`; None if there is none."""
        return _Trials(self, sch).kernels()

    def _cut(self, sch: "Schedule", blocks: "Sequence[Schedule]", sequence_parallel: bool) -> None:
        if self.tensor_parallel is None:
            raise ScheduleError(f"tp: {NO_TENSOR_PARALLEL}")
        if sequence_parallel and self.no_sequence_parallel:
            raise ScheduleError(f"sequence_parallel: {self.no_sequence_parallel}")
        _check_heads(sch)
        self.tensor_parallel(sch, blocks, sequence_parallel)

    def runs_obstacle(self, blocks: "Sequence[Schedule]") -> str | None:
        """Obstacle to runs of a model's blocks with unlike `tp`; None if there is none."""
        lists = {block.path.rpartition(".")[0] for block in blocks}
        return self.no_runs or ("its blocks do not all follow upon each other" if len(lists) > 1 else None)

    def runs(self, sch: "Schedule") -> Runs:
        """The repeated blocks of a model, given its schedule or that of its skeleton."""
        blocks = self.blocks(sch)
        return Runs(blocks=len(blocks), no_runs=self.runs_obstacle(blocks))

    def _share_samples(
        self, sch: "Schedule", stages: "Sequence[Sequence[Schedule]]", degrees: Sequence[int], tp: int
    ) -> None:
        """Makes ranks share the samples of blocks that are cut over fewer than `tp` of them; between neighbours of the same
        degree, within a stage, samples stay where they are."""
        if all(degree == tp for degree in degrees):
            return
        if reason := self.runs_obstacle([block for stage in stages for block in stage]):
            raise ScheduleError(f"strategy: runs cannot differ in tp in this model: {reason}")
        drawing, index_of_first = draws(sch), 0
        for stage in stages:
            stage_degrees = [*degrees[index_of_first : index_of_first + len(stage)]]
            index_of_first += len(stage)
            for block, degree, previous, following in zip(
                stage, stage_degrees, [None, *stage_degrees], [*stage_degrees[1:], None]
            ):
                if degree != tp:
                    block.share_samples(degree, enters=degree != previous, leaves=degree != following, draws=drawing)

    def _stage_ends(
        self, sch: "Schedule", blocks: "Sequence[Schedule]", stages: int, stage_blocks: str | None
    ) -> "list[Schedule]":
        from ...schedule.parallel.experts import pipeline_obstacle

        if stages == 1:
            return []
        if reason := pipeline_obstacle(sch.module):
            raise ScheduleError(f"pp: {reason}")
        ends = even_ends(blocks, stages) if self.stage_ends is None else self.stage_ends(sch, stages)
        if stage_blocks is None:
            return ends
        if self.no_stage_blocks:
            raise ScheduleError(f"stage_blocks: {self.no_stage_blocks}")
        sizes = blocks_of_stages(stage_blocks)
        if (len(sizes), sum(sizes)) != (stages, len(blocks)):
            raise ScheduleError(
                f"stage_blocks: {stage_blocks} is for {len(sizes)} stages of {sum(sizes)} blocks, but there are {stages} stages "
                f"and the model has {len(blocks)} blocks"
            )
        return _ends(blocks, sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Result of cutting a model over tensor-parallel ranks."""

    obstacle: str | None = None
    """Reason why it is impossible; None if it is possible."""
    padding: str = ""
    """Tensors padded with zeros; empty for none."""
    float8: str | None = None
    """Obstacle to 8-bit products in its blocks then; None if there is none."""


class _Trials:
    """Tries primitives on copies of a model without weights.

    Equal blocks are cut equally, so a copy with a few blocks of each kind is tried, and the whole model only if the copy lacks a
    module.
    """

    def __init__(self, schedule: StandardSchedule, sch: "Schedule") -> None:
        self._schedule = schedule
        self._model = sch.tree.module
        self._paths = [block.path for block in schedule.blocks(sch)]

    @cached_property
    def _short(self) -> "tuple[nn.Module, list[str]]":
        """A copy with a few blocks of each kind, and their paths."""
        return short_copy(self._model, self._paths)

    def cut(self, ranks: int, sequence_parallel: bool = False) -> _Cut:
        """The model cut over this number of ranks."""
        try:
            return self._on_a_copy(lambda model, paths: self._cut(model, paths, ranks, sequence_parallel))
        except ScheduleError as error:
            return _Cut(obstacle=str(error))

    def uncut(self) -> _Cut:
        """The model without cuts."""
        return _Cut(float8=unconvertible(self._model.get_submodule(path) for path in self._paths))

    def _cut(self, model: "nn.Module", paths: list[str], ranks: int, sequence_parallel: bool) -> _Cut:
        from ...schedule import create_schedule
        from ...schedule.parallel.collectives import PlannedMesh
        from ...schedule.parallel.partition import units_of
        from ...schedule.primitives.tensor_parallel import check_synced

        trial = create_schedule(model, PlannedMesh(tp=ranks))
        blocks = [trial[path] for path in paths]
        self._schedule._cut(trial, blocks, sequence_parallel)
        check_synced(trial)
        units_of(trial.tree)
        return _Cut(padding=_padding(trial), float8=unconvertible((block.module for block in blocks), ranks))

    def staged(self, stages: int) -> str | None:
        """Obstacle to dividing the model into this number of pipeline stages; None if there is none."""
        from ...schedule.parallel.partition import units_of

        try:
            units_of(self._divided(stages).tree)
        except ScheduleError as error:
            return str(error)
        return None

    def _divided(self, stages: int) -> "Schedule":
        from ...schedule import create_schedule
        from ...schedule.parallel.collectives import PlannedMesh

        trial = create_schedule(self._model, PlannedMesh(pp=stages))  # a cut is only recorded, the model is not changed
        self._schedule(trial, {"pp": stages})
        return trial

    def tied_stages(self) -> str | None:
        """Obstacle to ZeRO 2 and 3 in a pipeline; None if there is none."""
        from ...schedule.parallel.partition import tied_within, units_of
        from ...schedule.primitives.data_parallel import no_tied_stages

        trial = self._divided(2)
        tied = tied_within(trial.module, units_of(trial.tree), Placement(2, 2))
        return no_tied_stages(tied) if tied else None

    def kernels(self) -> str | None:
        """Obstacle to a loss without materialised logits; None if there is none."""
        from ...schedule import create_schedule

        def fuse(model: "nn.Module", paths: list[str]) -> None:
            trial = create_schedule(model)
            head_of(trial, [trial[path] for path in paths]).fused_loss()

        try:
            self._on_a_copy(fuse)
        except ScheduleError as error:
            return str(error)
        return None

    def _on_a_copy(self, attempt: "Callable[[nn.Module, list[str]], T]") -> T:
        """Returns the result of an attempt on a copy, given with the paths of its blocks: a short one, or the whole model if it
        lacks a module.
        """
        from ...schedule.parallel.partition import meta_copy

        model, paths = self._short
        try:
            return attempt(meta_copy(model), paths)
        except (MissingModuleError, LookupError, AttributeError):
            return attempt(meta_copy(self._model), self._paths)


def unconvertible(blocks: "Iterable[nn.Module]", ranks: int = 1) -> str | None:
    """Obstacle to 8-bit products in repeated blocks, cut over `ranks` tensor-parallel ranks; None if there is none."""
    from ...schedule.primitives.formats import obstacle

    reason = obstacle(blocks)
    return f"{reason} in its repeated blocks{f' cut over {ranks} ranks' if ranks > 1 else ''}" if reason else None


def _padding(sch: "Schedule") -> str:
    """Each padded size, with the first tensor of that size."""
    from ...schedule.parallel.sharding import shards_of, walk

    paddings: dict[int, str] = {}
    for path, module in walk(sch.tree.module):
        for name, shard in shards_of(module).items():
            size, ranks = shard.shape[shard.dim], shard.axis.size
            if shard.padded:
                filled = sum(-(-rows // ranks) * ranks for rows in shard.parts)
                lines = "columns" if shard.dim else "rows"
                paddings.setdefault(size, f"the {size:,} {lines} of '{path}.{name}' are padded to {filled:,}")
    return ", ".join(paddings.values())


def _check_heads(sch: "Schedule") -> None:
    """Refuses to cut within heads, with the names of the model's configuration if it has one."""
    from ...schedule.parallel.collectives import axis_of

    config: Any = getattr(sch.module, "config", None)
    axis = axis_of(sch.mesh, "tp")
    if axis is None or not hasattr(config, "get_text_config"):  # without an axis `shard` raises
        return
    for name, heads in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads")):
        try:
            count = getattr(config.get_text_config(), name, None)
        except RuntimeError:  # it differs from layer to layer, and `shard` checks each
            continue
        if isinstance(count, int) and count % axis.size:
            raise ScheduleError(f"tp: {axis.size} ranks must divide the {count} {heads}")


def even_ends(blocks: "Sequence[Schedule]", stages: int) -> "list[Schedule]":
    """The last block of each stage but the last, for even shares of the blocks.

    Raises:
        ScheduleError: there are fewer blocks than stages.
    """
    if len(blocks) < stages:
        raise ScheduleError(
            f"pp: each of {stages} stages needs a repeated block, but the model has {len(blocks) or 'none'}"
        )
    return _ends(blocks, stage_sizes(len(blocks), stages))


def _ends(blocks: "Sequence[Schedule]", sizes: Sequence[int]) -> "list[Schedule]":
    """The last block of each stage but the last."""
    return [blocks[end - 1] for end in accumulate(sizes[:-1])]


def _between(blocks: "Sequence[Schedule]", ends: "Sequence[Schedule]") -> "list[list[Schedule]]":
    """The blocks of each stage."""
    stages: list[list[Schedule]] = [[]]
    last_paths = {end.path for end in ends}
    for block in blocks:
        stages[-1].append(block)
        if block.path in last_paths:
            stages.append([])
    return stages


def head_of(sch: "Schedule", blocks: "Sequence[Schedule]") -> "Schedule":
    """Returns the projection to the vocabulary: the one that transformers knows; in another model the widest linear
    layer outside its blocks with more outputs than inputs.

    Raises:
        ScheduleError: there is none.
    """
    from torch import nn

    getter, head = getattr(sch.module, "get_output_embeddings", None), None
    inside = {module for block in blocks for module in block.module.modules()}
    paths = {module: path for path, module in sch.module.named_modules() if module not in inside}
    if getter is not None:
        head = getter()
    elif blocks:  # without blocks, the whole model is compiled
        linear = [module for module in paths if isinstance(module, nn.Linear)]
        wide = [module for module in linear if module.out_features > module.in_features]
        head = max(wide, key=lambda module: module.out_features, default=None)
    if head is None or head not in paths:
        raise ScheduleError("kernels: the model has no projection to a vocabulary whose logits could be left unformed")
    return sch[paths[head]]


def strategies_of(config: Mapping[str, Any], blocks: int) -> list[BlockStrategy] | None:
    """Returns the strategy of each block of a configuration; None if it has no `strategy`.

    Raises:
        ScheduleError: the strategy has another number of blocks.
    """
    strategy = config.get("strategy")
    if strategy is None:
        return None
    try:
        return of_blocks(strategy, blocks, **own_knobs(config))
    except UsageError as error:
        raise ScheduleError(str(error)) from error


def draws(sch: "Schedule") -> bool:
    """True if the configuration has dropout or noise anywhere. Llama and most later models have none: seeding random
    streams there would needlessly break every compiled block.
    """
    if not hasattr(sch.module, "config"):
        return True
    config = sch.module.config.get_text_config().to_dict()
    numbers = [value for name, value in config.items() if "drop" in name or "noise" in name]
    return not numbers or any(isinstance(number, int | float) and number > 0 for number in numbers)
