"""The pipeline of a model that is cut into stages, run by torch.distributed.pipelining."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...base._torch import parameters_of, set_call, tree_flatten, tree_map
from ...base.errors import ScheduleError
from ...knobs.meaning import PIPELINE_SCHEDULES, Placement
from ...knobs.rules import NOT_SPLIT
from ..forward import named_arguments
from ..tree import Tree, is_within
from .collectives import Axis, subgroup
from .partition import Board, Gate, StageEnd, Unit, drop, leave, meta_copy, splits, tied_within, units_of
from .sharding import holders, local

_WRAPPED = re.compile(r"failed to run (forward|stage backward)", re.IGNORECASE)
"""torch's error in place of one of a stage; it describes the stage's arguments."""


class Pipeline:
    """This rank's part of a pipeline; `model.pipeline` of a model built from a schedule with cuts."""

    def __init__(self, tree: Tree, axis: Axis, device: torch.device, loss: Callable[..., Any] | None) -> None:
        self.axis, self.device, self.loss = axis, device, loss
        self.model = tree.module
        self.units = units_of(tree)
        self.num_stages = len(tree.cuts) + 1
        kind, micro_batches = tree.pipeline or (None, None)
        self.kind = kind or ("1f1b" if self.num_stages == axis.size else "interleaved")
        self.order = PIPELINE_SCHEDULES[self.kind]
        self.micro_batches = micro_batches or self.num_stages
        check_order(tree, self.kind, self.num_stages, self.micro_batches, axis.size)
        self.placement = Placement(self.num_stages, axis.size, self.order.v_shaped)
        self.own_stages = self.placement.held(axis.rank)
        """Indices of the stages on this rank."""
        self.ties = _ties(tree, self.units, self.placement, axis)
        """Parameters that stages of this rank and of others share."""
        self.tied_within = tied_within(tree.module, self.units, self.placement)
        """A weight that several units on one rank share, on this rank or another; None if there is none."""
        self.board = Board(device, stages=self.num_stages)
        # Before the units of other ranks are dropped: forms are inferred from copies of all units.
        self.metas = [meta_copy(unit.module) for unit in self.units]
        for unit in self.units:
            # A unit without parameters (rotary frequencies, dropout) may run on every stage.
            if unit.stage not in self.own_stages and any(True for _ in unit.module.parameters()):
                drop(unit.module)
        self.after_passes: list[Callable[[], None]] = []
        """Called after all passes of a step, before stages sum the gradients of tied parameters."""
        self.after_step: list[Callable[[], None]] = []
        """Called after stages have summed the gradients of tied parameters."""
        self.keep_outputs = False
        """True if `outputs` keeps the outputs of all micro-batches of the last step for inspection. Otherwise it has only
        the latest, until its loss is computed."""
        self.outputs: list[Any] = []
        self.watch: Callable[[Any], None] | None = None
        """Called with the model's output for each micro-batch."""
        self.schedule: Any = None
        """PyTorch's schedule object, for the shapes of a batch and the number of micro-batches."""
        self._shapes: Any = None

    def tied_parameters(self) -> list[nn.Parameter]:
        """Returns this rank's parameters that several stages share, on this rank or on others."""
        stages: dict[nn.Parameter, set[int]] = {}
        for unit in self.units:
            for param in unit.module.parameters():
                stages.setdefault(param, set()).add(unit.stage)
        # In a V-shaped placement the first rank has both the first and the last stage.
        within = [param for param in stages if len(stages[param]) > 1]
        return list(dict.fromkeys([*(tie.param for tie in self.ties), *within]))

    def absent(self, path: str) -> bool:
        """Returns True if a module belongs to another rank."""
        return any(unit.stage not in self.own_stages and is_within(path, unit.path) for unit in self.units)

    def metas_below(self, path: str) -> list[nn.Module]:
        """Returns the meta copy of a module, or those of all units below it if it spans several."""
        metas = []
        for unit, meta in zip(self.units, self.metas):
            if is_within(unit.path, path):
                metas.append(meta)
            elif is_within(path, unit.path):
                metas.append(meta.get_submodule(path.removeprefix(unit.path + ".")))
        return metas

    def start(self) -> None:
        """Installs the gates, which wrap compiled and data-sharded modules, and makes tied weights equal."""
        for unit, meta in zip(self.units, self.metas):
            if unit.ends or any(True for _ in meta.parameters()):
                set_call(unit.module, Gate(unit, meta, self.board))
        for tie in self.ties:
            values = local(tie.param.detach())
            sent = values.contiguous()
            dist.broadcast(sent, dist.get_global_rank(self.axis.group, tie.ranks[0]), group=tie.group)
            values.copy_(sent)
        self.model.__dict__["pipeline"] = self

    def step(
        self,
        *args: Any,
        target: torch.Tensor | None = None,
        watch: Callable[[Any], None] | None = None,
        factors: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Runs forward and backward of a batch in micro-batches and accumulates gradients.

        With gradients disabled the backward pass runs too, and all gradients are set to None afterwards, because PyTorch's
        schedules with several stages per rank cannot run the forward pass alone.

        Every rank of the pipeline gets the same batch: tensors whose first dimension is the batch.

        Args:
            args: positional arguments of the model's forward.
            target: the second argument of `loss`; its first dimension is the batch.
            watch: called on the last stage with the model's output for each micro-batch.
            factors: factors of the loss that the model itself computes, of shape [micro-batches]; None for 1.
            kwargs: keyword arguments of the model's forward.

        Returns:
            The mean loss over the micro-batches, on every rank.
        """
        kwargs = named_arguments(self.model, args, kwargs)
        tensors = [leaf for leaf in tree_flatten(kwargs)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors or tensors[0].shape[0] % self.micro_batches:
            raise ScheduleError(
                f"{self.micro_batches} micro-batches must divide the batch, but it has "
                f"{tensors[0].shape[0] if tensors else 'no tensors'}"
            )
        size = tensors[0].shape[0]
        # Replicas reduce gradients in the last backward pass of a step; each micro-batch has one.
        if replicas := self.model.__dict__.get("replicas"):
            replicas.passes = self.micro_batches
        self._prepare(kwargs, size)
        self.outputs.clear()
        self.watch = watch
        losses: list[torch.Tensor] = []
        # The first stage needs an input that torch can split into micro-batches; the model reads `kwargs` instead.
        batch_marker = torch.zeros(size, 1, device=self.device)
        has_first_stage, has_last_stage = 0 in self.own_stages, self.num_stages - 1 in self.own_stages
        with torch.enable_grad():
            if self.loss is None:
                target = self._factors(factors, size)
            elif target is None:
                target = batch_marker
            failure = None
            try:
                self.schedule.step(
                    *((batch_marker,) if has_first_stage else ()),
                    target=target if has_last_stage else None,
                    losses=losses if has_last_stage else None,
                    return_outputs=False,
                    **kwargs,
                )
            except RuntimeError as error:
                if error.__cause__ is None or not _WRAPPED.search(str(error)):
                    raise
                failure = error.__cause__
            if failure is not None:  # raised here, it keeps its own cause and context
                raise failure
        self.watch = None
        if not self.keep_outputs:
            self.outputs.clear()
        for callback in self.after_passes:
            callback()
        for tie in self.ties:
            if not tie.param.requires_grad:
                continue
            if tie.param.grad is None:  # the other ranks take part with theirs
                tie.param.grad = torch.zeros_like(tie.param)
            # Every rank with the weight shards it over its replicas in the same way, so local shards correspond.
            gradient = local(tie.param.grad)
            total = gradient.contiguous()
            dist.all_reduce(total, group=tie.group)
            gradient.copy_(total)
        for callback in self.after_step:  # replicas average the sums of tied gradients, so after these
            callback()
        if not torch.is_grad_enabled():
            self.model.zero_grad(set_to_none=True)
        # float32 on all ranks: only the last stage knows the dtype of the loss.
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        if has_last_stage:
            total += torch.stack(losses).float().sum().detach()
        source = dist.get_global_rank(self.axis.group, self.placement.rank(self.num_stages - 1))
        dist.broadcast(total, source, group=self.axis.group)
        return total

    def _factors(self, factors: torch.Tensor | None, size: int) -> torch.Tensor:
        """Returns the factor of the micro-batch's loss for each sample, of shape [size]."""
        if factors is None:
            return torch.ones(size, device=self.device)
        return factors.to(self.device).repeat_interleave(size // self.micro_batches)

    def _prepare(self, kwargs: dict[str, Any], size: int) -> None:
        """Creates the schedule for batches of these shapes, unless the current one fits."""
        from torch.distributed import pipelining

        micro_batch_size = size // self.micro_batches

        def first_micro_batch(value: Any) -> Any:
            return value[:micro_batch_size] if isinstance(value, torch.Tensor) and value.dim() else value

        shapes = tree_map(
            lambda value: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value, kwargs
        )
        shapes = (self.micro_batches, shapes)
        if self.schedule is not None and shapes == self._shapes:
            return
        self._shapes = shapes
        self.find_forms(tree_map(first_micro_batch, kwargs))
        stages = [self._stage(index, micro_batch_size) for index in self.own_stages]
        schedule_class = getattr(pipelining, self.order.made_by)
        stages_of_rank = stages if self.order.most != 1 else stages[0]
        self.schedule = schedule_class(stages_of_rank, self.micro_batches, loss_fn=self._loss, scale_grads=False)

    def find_forms(self, batch: dict[str, Any]) -> None:
        """Infers the forms of the tensors that cross the cuts for a micro-batch, given by name, without computing them.

        Raises:
            ScheduleError: the model's forward does not pass through every cut.
        """
        board = self.board
        board.forms.clear()
        board.stage, board.inferring = 0, True
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                self.model(**batch)
        except StageEnd:
            board.inferring = False
        finally:
            board.stage, board.inferring = None, False
        if len(board.forms) != self.num_stages - 1:
            raise ScheduleError("the model's forward did not pass through every pipeline cut")

    def _stage(self, index: int, micro_batch_size: int) -> Any:
        from torch.distributed.pipelining import PipelineStage

        inputs = self.board.forms[index - 1].tensors(self.device) if index else (torch.zeros(micro_batch_size, 1),)
        is_last = index == self.num_stages - 1
        outputs = (torch.zeros(1, device=self.device),) if is_last else self.board.forms[index].tensors(self.device)
        inputs, outputs = (
            tuple(tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in group)
            for group in (inputs, outputs)
        )
        module = Stage(self, index)
        module.runner = PipelineStage(
            module,
            index,
            self.num_stages,
            self.device,
            input_args=tuple(tensor.to(self.device) for tensor in inputs),
            output_args=outputs,
            group=self.axis.group,
        )
        return module.runner

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # The factor is 0 for a micro-batch without labels, whose mean loss is NaN.
        value = (
            torch.where(target[0] > 0, output.sum() * target[0], 0.0)
            if self.loss is None
            else self.loss(self.outputs[-1], target)
        )
        return value / self.micro_batches


class Stage(nn.Module):
    """One stage as torch.distributed.pipelining calls it; its parameters are registered elsewhere."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        super().__init__()
        self.__dict__["pipeline"] = pipeline
        self.index = index
        self.runner: Any = None
        """The stage object of torch.distributed.pipelining that runs this module."""
        self.checked = self.split_decided = False
        own_modules = [unit.module for unit in pipeline.units if unit.stage == index]
        self.weights = list(dict.fromkeys(param for module in own_modules for param in module.parameters()))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the stage's parameters, whose gradients a split backward pass computes in its second part."""
        return iter(self.weights)

    def forward(self, *received: torch.Tensor, **inputs: Any) -> Any:
        """Returns the tensors that cross the cut after this stage.

        The last stage returns the model's own loss, of shape (1,), or the first tensor of its output for `loss`."""
        pipeline, board = self.pipeline, self.pipeline.board
        board.stage, board.received = self.index, received
        board.passed, board.lacking, board.checking = False, None, self.index > 0 and not self.checked
        board.late.clear()
        try:
            output = pipeline.model(**inputs)
        except StageEnd as end:
            crossing = [leaf for leaf in tree_flatten(end.output)[0] if isinstance(leaf, torch.Tensor)]
            # Under autocast a tensor may have a narrower dtype than the next stage expects.
            forms = [dtype for _, dtype, tensor in board.forms[self.index].leaves if tensor]
            tensors = tuple(tensor.to(dtype).contiguous() for tensor, dtype in zip(crossing, forms, strict=True))
            self._check_shapes(received, tensors)
            if pipeline.order.splits_backward:
                tensors = tuple(leave(tensor, received) for tensor in tensors)
                self._decide_split(tensors, received)
            return tensors
        finally:
            board.stage, board.received, board.checking = None, (), False
        if self.index != pipeline.num_stages - 1:
            raise ScheduleError(f"pipeline stage {self.index} did not reach its cut")
        if not pipeline.keep_outputs:
            pipeline.outputs.clear()
        pipeline.outputs.append(output)
        if pipeline.watch is not None:
            pipeline.watch(output)
        if pipeline.order.splits_backward:
            results = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
            self._decide_split(results, received)
        if pipeline.loss is not None:
            result = next(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor))
            result = getattr(result, "hidden", result)  # of logits that are not materialized
            self._check_shapes(received, (result,))
            return result
        loss = getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise ScheduleError("the model returns no loss; pass build(loss=...) and step(target=...)")
        self._check_shapes(received, (loss,))
        return loss.reshape(1)

    def _decide_split(self, results: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Decides, at the first micro-batch, whether the backward pass of this stage is split in two."""
        if self.index and not self.split_decided and not splits(results, received):
            # The first part then computes all gradients, and the second one must do nothing.
            self.runner.dw_builder = lambda: lambda: None
        self.split_decided = True

    def _check_shapes(self, received: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...]) -> None:
        """Raises ScheduleError, at the first micro-batch, if a result depends on a placeholder."""
        # Once only: a check of values synchronises with the device. The first stage has no placeholders.
        if self.checked or self.index == 0:
            return
        self.checked = True
        if any(tensor.isnan().any() for tensor in received if tensor.is_floating_point()):
            return  # NaN of an earlier stage says nothing about placeholders
        if any(tensor.isnan().any() for tensor in tensors if tensor.is_floating_point()):
            raise ScheduleError(self._bypassing())

    def _bypassing(self) -> str:
        """Describes the value from before the cut that this stage uses."""
        board = self.pipeline.board
        cut = next(unit.path for unit in self.pipeline.units if unit.ends and unit.stage == self.index - 1)
        message = f"pipeline stage {self.index} uses a value from before its cut that '{cut}' does not return"
        if board.late and self.index == self.pipeline.num_stages - 1:
            listed = ", ".join(repr(path) for path in board.late)
            return (
                f"{message}: the output of {listed}, which the model registers before the cut and calls after it; "
                f"cut_pipeline_stage(late=[{listed}])"
            )
        reader = f": '{board.lacking}' gets it, or a value computed from it" if board.lacking else ""
        return f"{message}{reader}; cut elsewhere"


class Tie(NamedTuple):
    """A parameter that stages of several ranks share."""

    holder: nn.Module
    name: str
    ranks: tuple[int, ...]
    """The ranks along the pipeline that have it, in the order of first use."""
    group: dist.ProcessGroup
    """These ranks."""

    @property
    def param(self) -> nn.Parameter:
        """The parameter, which FSDP may replace."""
        param = parameters_of(self.holder)[self.name]
        assert param is not None, "a tied weight exists on each of its stages"
        return param


def _ties(tree: Tree, units: list[Unit], placement: Placement, axis: Axis) -> list[Tie]:
    """Returns the parameters that this rank's stages share with others; all ranks call it."""
    rank_of = {submodule: placement.rank(unit.stage) for unit in units for submodule in unit.module.modules()}
    ties, seen = [], set()
    groups: dict[tuple[int, ...], Any] = {}
    pipelines = tree.mesh.mesh.movedim(tree.mesh.mesh_dim_names.index("pp"), -1).reshape(-1, axis.size)
    for module in tree.module.modules():
        for param in parameters_of(module).values():
            if param is None or param in seen:
                continue
            seen.add(param)
            places = [
                (holder, name, rank_of[holder]) for _, holder, name in holders(tree.module, param) if holder in rank_of
            ]
            ranks = tuple(dict.fromkeys(rank for _, _, rank in places))
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = subgroup(tree.mesh, pipelines[:, list(ranks)], "tied")
            own_place = next(((holder, name) for holder, name, rank in places if rank == axis.rank), None)
            if len(ranks) > 1 and own_place is not None:
                ties.append(Tie(*own_place, ranks, groups[ranks]))
    return ties


def check_order(tree: Tree, kind: str, stages: int, micro_batches: int, ranks: int) -> None:
    """Checks that a pipeline schedule supports the model, its stages and its micro-batches.

    Raises:
        ScheduleError: the number of stages or micro-batches does not fit, or a primitive on the model is incompatible.
    """
    order, stages_per_rank = PIPELINE_SCHEDULES[kind], stages // ranks
    if stages % ranks:
        raise ScheduleError(
            f"the {ranks} ranks of the pp axis must divide the number of stages, but there are {stages} "
            f"({stages - 1} cuts)"
        )
    if stages_per_rank < order.least or (order.most is not None and stages_per_rank > order.most):
        limits = {1: "one stage a rank", None: f"{order.least} stages a rank or more"}
        alternatives = [
            name
            for name, other in PIPELINE_SCHEDULES.items()
            if other.least <= stages_per_rank <= (other.most or stages_per_rank)
        ]
        raise ScheduleError(
            f"schedule {kind} takes {limits.get(order.most, f'{order.most} stages a rank')}, but there are "
            f"{stages} on {ranks} ranks; use '{alternatives[0]}'"
        )
    if not order.waits and micro_batches < ranks:
        raise ScheduleError(
            f"schedule {kind} needs as many micro-batches as ranks, {ranks}, or more, but got {micro_batches}"
        )
    if order.in_rounds and micro_batches % ranks:
        raise ScheduleError(f"schedule {kind}: {ranks} ranks must divide the micro-batches, but got {micro_batches}")
    if order.splits_backward:
        _check_split(tree, kind)


def _check_split(tree: Tree, kind: str) -> None:
    """Raises ScheduleError for a primitive that computes the gradients of inputs and weights together."""
    sharded = any(work.arguments.get("zero", 0) >= 2 for work in tree.deferred)
    for step in tree.steps:
        if step.primitive in NOT_SPLIT and (step.primitive != "shard_data" or sharded):
            raise ScheduleError(
                f"schedule {kind} does not go with {step} on '{step.path or type(tree.module).__name__}': "
                f"{NOT_SPLIT[step.primitive]}"
            )
