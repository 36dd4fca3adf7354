"""Traces one training step of a workload on fake tensors: operators, kept bytes and memory traffic of each segment.

This is the adapter to PyTorch's tracing APIs. It uses `FakeTensorMode` (no memory, no arithmetic), `saved_tensors_hooks` (tensors
that autograd keeps) and `TorchDispatchMode` (every operator, forward and backward), which work on any machine.
`torch.distributed._tools` has a memory tracker and a runtime estimator on the same basis. The tracker does not distinguish bytes
that tensor parallelism divides or that depend on the batch, and the runtime estimator aborts without CUDA, so neither is used.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from ...base._torch import buffers_of, parameters_of
from ...base._transformers import quiet, values_unread
from ...knobs.meaning import FORMATS
from ...models import Workload
from ...models.architecture import Architecture
from ...models.batches import ForwardPass, each_tensor, make_batch
from ...models.families import generic_schedule
from ...models.families.standard import StandardSchedule
from ...models.lora import frozen_format
from ...models.skeleton import bounded, skeleton
from .device_operators import function_mode
from .recorder import Recorder, Split
from .stand_ins import StandIns
from .step_trace import StepTrace

if TYPE_CHECKING:
    import torch
    from torch import nn

SAMPLES = 2
"""Samples of the traced batch: with two, tensors with a batch dimension differ from tensors that are broadcast over it."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
HALVES = {name: _DTYPES[formats.autocast] for name, formats in FORMATS.items() if formats.autocast}
"""Autocast dtype of each precision that uses autocast. fp8 is traced as bf16: its products also save scales and casts."""


def trace_step(
    workload: Workload,
    blocks: Sequence[str],
    split: Split,
    *,
    precision: str = "fp32",
    attention: str | None = None,
    device_type: str = "cuda",
    liger: bool = False,
    samples: int = SAMPLES,
    every_block: bool = False,
) -> StepTrace:
    """Traces one step of `samples` samples, forward and backward.

    Args:
        workload: the workload.
        blocks: paths of its repeated blocks.
        split: returns the dimension of a product that tensor parallelism divides: `column`, `row` or `none`.
        precision: a value of the knob.
        attention: a value of the knob; None for the workload's default. Flash attention is traced as sdpa.
        device_type: device whose operators run, as `Hardware.operators`.
        liger: True for a model with Liger-Kernel's modules.
        samples: of the batch.
        every_block: True to also record blocks that are identical to a recorded one; slower, with the same
            result.

    Raises:
        WorkloadError: the batch or the loss is invalid.
    """
    import torch

    from ...base._torch import FakeTensorMode

    config = _traced_config(workload, precision, attention)
    batch = make_batch(workload, samples, 0)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), quiet():
        model = fake_model(workload, config, fake).train()
    if liger and isinstance(workload.schedule or generic_schedule, StandardSchedule):
        from .liger_modules import forwards_of, put_forwards

        put_forwards(model, forwards_of(model))
    with fake:
        inputs = each_tensor(batch, fake.from_tensor)
        if precision == "bf16_pure":
            cast(model, torch.bfloat16)
            inputs = each_tensor(inputs, lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)
        if frozen := frozen_format(workload, precision):
            cast_frozen(model, getattr(torch, HALVES[frozen]))
        recorder = Recorder(model, set(blocks), split, samples, workload.seq_len)
        stand_ins = StandIns(model, () if every_block else tuple(blocks))
        step = ForwardPass(workload, model)
        half = HALVES.get(precision)
        autocast = torch.autocast("cpu", getattr(torch, half)) if half else nullcontext()
        with ExitStack() as stack:
            stack.enter_context(values_unread())
            stack.enter_context(recorder.hooks())
            stack.enter_context(function_mode(device_type, recorder.attending, recorder.grouped))
            stack.enter_context(recorder.operators)
            stack.enter_context(stand_ins.standing_in())
            try:
                with autocast, recorder.saving(), bounded(model):
                    loss = step(inputs)
                recorder.turn()
                loss.backward()
            except _FAILURES as error:
                recorder.failed(error)
    return recorder.recorded(stand_ins.segments(recorder.segments))


def _traced_config(workload: Workload, precision: str, attention: str | None) -> dict[str, Any]:
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


def cast(model: "nn.Module", dtype: "torch.dtype") -> None:
    """Equivalent of `model.to(dtype)` for a model of fake tensors, whose parameters cannot be swapped in place."""
    _replace(model, lambda tensor: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach())


def cast_frozen(model: "nn.Module", dtype: "torch.dtype") -> None:
    """The same for the parameters that are not trained."""

    def change(tensor: "torch.Tensor") -> "torch.Tensor":
        frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and tensor.is_floating_point()
        return tensor.detach().to(dtype) if frozen else tensor.detach()

    import torch

    _replace(model, change)


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
