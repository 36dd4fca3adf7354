"""Traces one training step of a workload on fake tensors: operators, kept bytes and memory traffic of each segment.

This is the adapter to PyTorch's tracing APIs. It uses `FakeTensorMode` (no memory, no arithmetic), `saved_tensors_hooks` (tensors
that autograd keeps) and `TorchDispatchMode` (every operator, forward and backward), which work on any machine.
`torch.distributed._tools` has a memory tracker and a runtime estimator on the same basis. The tracker does not distinguish bytes
that tensor parallelism divides or that depend on the batch, and the runtime estimator aborts without CUDA, so neither is used.


Thirty-two identical blocks keep, compute and move the same, so it is enough to record the first of a kind, the second (the first
may contain tensors that are created once for all) and the last (its backward begins while the loss's gradient is live). The
others return their inputs, which have the form of their outputs, and the record of the second is copied for them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...base._torch import buffers_of, parameters_of
from ...base._transformers import quiet, values_unread
from ...base.errors import ScheduleError
from ...knobs.meaning import FORMATS
from ...models import Workload
from ...models.architecture import Architecture
from ...models.batches import ForwardPass, each_tensor, make_batch
from ...models.families import StandardSchedule, generic_schedule
from ...models.lora import frozen_format
from ...models.skeleton import bounded, short_copy, skeleton, stand_ins_for
from .device_operators import forwards_of, function_mode, put_forwards
from .recorder import Recorder
from .step_trace import Product, Segment, Spec, StepTrace, tensors_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...schedule import Schedule

SAMPLES = 2
"""Samples of the traced batch: with two, tensors with a batch dimension differ from tensors that are broadcast over it."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
HALVES = {name: _DTYPES[formats.autocast] for name, formats in FORMATS.items() if formats.autocast}
"""Autocast dtype of each precision that uses autocast. fp8 is traced as bf16: its products also save scales and casts."""


def trace_step(
    workload: Workload,
    layout: "Layout",
    *,
    precision: str = "fp32",
    attention: str | None = None,
    device_type: str = "cuda",
    liger: bool = False,
    every_block: bool = False,
) -> StepTrace:
    """Traces one step of `SAMPLES` samples, forward and backward.

    Args:
        workload: the workload.
        layout: its repeated blocks, and how tensor parallelism divides products.
        precision: a value of the knob.
        attention: a value of the knob; None for the workload's default. Flash attention is traced as sdpa.
        device_type: device whose operators run, as `Hardware.operators`.
        liger: True for a model with Liger-Kernel's modules.
        every_block: True to also record blocks that are identical to a recorded one; slower, with the same
            result.

    Raises:
        WorkloadError: the batch or the loss is invalid.
    """
    import torch

    from ...base._torch import FakeTensorMode

    config = traced_config(workload, precision, attention)
    batch = make_batch(workload, SAMPLES, 0)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), quiet():
        model = fake_model(workload, config, fake).train()
    if liger and isinstance(workload.schedule or generic_schedule, StandardSchedule):
        put_forwards(model, forwards_of(model))
    with fake:
        inputs = each_tensor(batch, fake.from_tensor)
        if precision == "bf16_pure":
            inputs = each_tensor(inputs, lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)
        give_formats(model, workload, precision)
        recorder = Recorder(model, set(layout.blocks), layout.split, SAMPLES, workload.seq_len)
        stand_ins = StandIns(model, () if every_block else layout.blocks)
        step = ForwardPass(workload, model)
        with ExitStack() as stack:
            stack.enter_context(values_unread())
            stack.enter_context(recorder.hooks())
            stack.enter_context(function_mode(device_type, recorder.attending, recorder.grouped))
            stack.enter_context(recorder.operators)
            stack.enter_context(stand_ins.standing_in())
            try:
                with autocast(precision), recorder.saving(), bounded(model):
                    loss = step(inputs)
                recorder.turn()
                loss.backward()
            except _FAILURES as error:
                recorder.failed(error)
    return recorder.recorded(stand_ins.segments(recorder.segments))


def traced_config(workload: Workload, precision: str, attention: str | None) -> dict[str, Any]:
    """The configuration in which a model is built to be traced."""
    if not isinstance(workload.model, Architecture):
        return {**workload.probe, "precision": precision}
    name = attention or workload.model.default_attention
    traced = name if name in ("eager", "sdpa") else "sdpa"
    return {**workload.probe, "precision": precision, "attention": traced}


def fake_model(workload: Workload, config: Mapping[str, Any], fake: Any) -> "nn.Module":
    """The workload's module with fake CPU tensors as weights.

    Fake CPU tensors are used rather than meta tensors, which autocast ignores. The models of transformers are built on the meta
    device first, where they are not initialised.

    Raises:
        WorkloadError: the model cannot be built.
    """

    if isinstance(workload.model, Architecture):
        model = skeleton(workload, config)
    else:
        try:
            with fake:
                return workload.build_model(config)
        except RuntimeError:  # its constructor reads values, as drawing from a truncated distribution does
            model = skeleton(workload, config)
    with fake:
        give_tensors(model)
    return model


def give_tensors(model: "nn.Module") -> None:
    """Replaces the parameters and buffers of a module by CPU tensors without values of the same form, within a fake mode."""
    import torch

    _replace(model, lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))


def give_formats(model: "nn.Module", workload: Workload, precision: str) -> None:
    """Casts the fake weights of a model that are stored in 16 bits: all, or those that are not trained."""
    import torch

    frozen = frozen_format(workload, precision)
    if precision != "bf16_pure" and not frozen:
        return
    dtype = getattr(torch, HALVES[frozen or "bf16"])

    def change(tensor: "torch.Tensor") -> "torch.Tensor":
        held_so = not frozen or (isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad)
        return tensor.detach().to(dtype) if held_so and tensor.is_floating_point() else tensor.detach()

    _replace(model, change)


def autocast(precision: str) -> AbstractContextManager[Any]:
    """Autocast as at a value of the knob `precision`; nothing where it is off."""
    import torch

    half = HALVES.get(precision)
    return torch.autocast("cpu", getattr(torch, half)) if half else nullcontext()


def _replace(model: "nn.Module", change: "Callable[[torch.Tensor], torch.Tensor]") -> None:
    """Replaces parameters and buffers by other tensors; shared parameters stay shared."""
    import torch

    done: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                if id(parameter) not in done:
                    done[id(parameter)] = torch.nn.Parameter(change(parameter), requires_grad=parameter.requires_grad)
                parameters_of(module)[name] = done[id(parameter)]
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                buffers_of(module)[name] = change(buffer)


_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Errors that operators raise on tensors without values. Input errors of redline are ValueErrors too: see `failed`."""


_TRIED_RANKS = (2, 3, 5)
"""Tensor-parallel degrees for which a schedule's plan is queried; 25 heads, as in gpt2-xl, need the 5."""


@dataclass(frozen=True)
class Layout:
    """Repeated blocks of a model and their division by tensor parallelism."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks."""
    cuts: Mapping[str, int] | None
    """Sharded dimension of each sharded parameter; None without a plan."""
    notes: list[str] = field(default_factory=list)
    """Assumptions."""

    @classmethod
    def of(cls, workload: Workload) -> "Layout":
        """Queries the workload's schedule.

        Raises:
            WorkloadError: the model cannot be built.
        """
        from ...schedule import create_schedule

        sch = create_schedule(skeleton(workload, workload.probe))
        schedule = workload.schedule if isinstance(workload.schedule, StandardSchedule) else generic_schedule
        blocks = tuple(block.path for block in schedule.blocks(sch))
        cuts = _cuts(schedule, sch, blocks)
        notes = [] if cuts is not None else ["tensor parallelism: assumed to divide the products as Megatron does"]
        return cls(blocks, cuts, notes)

    def split(self, product: Product, attended: bool, width: int) -> str:
        """Dimension of a product that tensor parallelism divides: `column`, `row` or `none`."""
        if not product.weight:
            return "none"
        if self.cuts is not None:
            dim = self.cuts.get(product.weight)
            if dim is None:
                return "none"
            dim -= product.stacked  # without the dimension of experts
            return "column" if dim == (0 if product.transposed else 1) else "row"
        # As in Megatron (arXiv:1909.08053): columns at the start of a segment, rows at its end.
        if not width or width not in (product.k, product.n):
            return "none"
        return "row" if attended or product.k != width else "column"


def _cuts(schedule: StandardSchedule, sch: "Schedule", blocks: tuple[str, ...]) -> dict[str, int] | None:
    """Sharded dimension of each sharded parameter. Equal blocks are sharded alike, so a copy with a few of each kind is tried
    first."""
    if schedule.tensor_parallel is None:
        return None
    twins = stand_ins_for(sch.tree.module, blocks)
    if twins:
        short, remaining_paths = short_copy(sch.tree.module, blocks)
        with suppress(ScheduleError, LookupError, AttributeError):  # also for a missing block
            dims = _sharded(schedule, short)
            if dims is not None:
                return dims | {
                    path + name.removeprefix(twin): dim
                    for path, twin in twins.items()
                    if path not in remaining_paths
                    for name, dim in dims.items()
                    if name.startswith(f"{twin}.")
                }
    return _sharded(schedule, sch.tree.module)


def _sharded(schedule: StandardSchedule, model: "nn.Module") -> dict[str, int] | None:
    """Sharded dimension of each sharded parameter of a model; None if no degree that is tried divides it."""
    from ...schedule import create_schedule
    from ...schedule.parallel.collectives import PlannedMesh
    from ...schedule.parallel.partition import meta_copy
    from ...schedule.parallel.sharding import shards_of

    for ranks in _TRIED_RANKS:
        tried = create_schedule(meta_copy(model), PlannedMesh(tp=ranks))
        try:
            schedule(tried, {"tp": ranks})
        except ScheduleError:
            continue
        return {
            f"{path}.{name}" if path else name: shard.dim
            for path, module in tried.tree.module.named_modules()
            for name, shard in shards_of(module).items()
        }
    return None


@dataclass(frozen=True, slots=True)
class _Like:
    """An output tensor of a block with the form of an input tensor, or that tensor itself."""

    leaf: int
    """Index among the tensors of its inputs."""
    itself: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """Form of a block's call that stand-ins repeat."""

    inputs: Any
    """Its `(args, kwargs)` as leaves and their tree, with a `Spec` for every tensor."""
    outputs: Any
    """Return value, with a `_Like` for every tensor; None if a tensor has the form of no input."""


class StandIns:
    """Replaces blocks of a model that are identical to one that runs.

    Args:
        model: the traced model.
        blocks: paths of its repeated blocks, in their order.
    """

    def __init__(self, model: "nn.Module", blocks: "tuple[str, ...]") -> None:
        self._model = model
        self._runs: dict[str, _Run] = {}
        self._stood_in: dict[str, str] = {}
        self._twin_of = stand_ins_for(model, blocks)

    def standing_in(self) -> ExitStack:
        """Replaces blocks while it is open."""
        stack = ExitStack()
        for path in {*self._twin_of, *self._twin_of.values()}:
            module = self._model.get_submodule(path)
            module.forward = self._replacing(path, module.forward)
            stack.callback(delattr, module, "forward")
        return stack

    def segments(self, seen: list[Segment]) -> list[Segment]:
        """The segments of a step; those of replaced blocks are copies of their twins' segments."""
        by_path = {segment.path: segment for segment in seen if segment.block}
        return [
            _copied(segment, by_path[self._stood_in[segment.path]])
            if segment.block and segment.path in self._stood_in
            else segment
            for segment in seen
        ]

    def _replacing(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        from ...base._torch import tree_flatten, tree_map

        def run(*args: Any, **kwargs: Any) -> Any:
            inputs, specs = tensors_of((args, kwargs)), tree_flatten(tree_map(Spec.of, (args, kwargs)))
            twin = self._runs.get(self._twin_of.get(path, ""))
            if twin is not None and twin.outputs is not None and twin.inputs == specs:
                self._stood_in[path] = self._twin_of[path]
                return _returned(twin.outputs, inputs)
            outputs = forward(*args, **kwargs)
            self._runs[path] = _Run(specs, _form(outputs, inputs))
            return outputs

        return run


def _form(outputs: Any, inputs: "list[torch.Tensor]") -> Any:
    """The outputs of a block with a `_Like` for every tensor; None if one has the form of no input."""
    import torch

    from ...base._torch import tree_map_only

    forms = [Spec.of(tensor) for tensor in inputs]
    if any(Spec.of(tensor) not in forms for tensor in tensors_of(outputs)):
        return None

    def like(tensor: "torch.Tensor") -> _Like:
        itself = [index for index, candidate in enumerate(inputs) if candidate is tensor]
        return _Like(itself[0] if itself else forms.index(Spec.of(tensor)), bool(itself))

    return tree_map_only(torch.Tensor, like, outputs)


def _returned(outputs: Any, inputs: "list[torch.Tensor]") -> Any:
    """The outputs of a stand-in: aliases of its inputs, whose gradients pass through unchanged."""
    import torch

    from ...base._torch import tree_map_only

    def tensor_of(leaf: _Like) -> "torch.Tensor":
        return inputs[leaf.leaf] if leaf.itself else torch.ops.aten.alias.default(inputs[leaf.leaf])

    return tree_map_only(_Like, tensor_of, outputs)


def _copied(segment: Segment, twin: Segment) -> Segment:
    """The segment of a replaced block: its twin's, with its own weights."""

    def renamed(name: str) -> str:
        inside = name.startswith(twin.path + ".")
        return segment.path + name.removeprefix(twin.path) if inside else name

    return replace(
        twin,
        path=segment.path,
        after=segment.after,
        inputs=segment.inputs,
        products=[replace(product, weight=renamed(product.weight)) for product in twin.products],
        parameters={renamed(name) for name in twin.parameters},
    )
