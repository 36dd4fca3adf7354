"""Stages of a scheduled model as layers of DeepSpeed's PipelineModule.

Every stage runs the model's own forward and needs the batch for it, but DeepSpeed loads batches only in the first and
the last stage. So the batch is passed from stage to stage: `(tensors across the cut..., the batch's tensors...,
header)`, where the header contains the names of the tensors in JSON. DeepSpeed expects a gradient of each
floating-point tensor that it sends; tensors without one are sent as integers of the same bits.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base._torch import parameters_of, tree_flatten, tree_unflatten
from ...base.errors import ScheduleError
from ..parallel.pipeline import Pipeline, Stage

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the number of bytes."""


def staged(
    pipeline: Pipeline, mesh: Any, topology: Any, form: torch.dtype | None
) -> tuple[nn.Module, Callable[[Any], Any]]:
    """Returns this rank's stage as a PipelineModule, and a function that converts a micro-batch of the data iterator.

    Its attribute `model` is the scheduled model. All ranks call it.

    Args:
        pipeline: a pipeline with one stage per rank.
        form: dtype that DeepSpeed will cast the weights to, or None.
    """
    from deepspeed.pipe import PipelineModule

    if form is not None:
        for meta in pipeline.metas:
            meta.to(form)
    layer = StageLayer(pipeline)
    layers = [layer if index in pipeline.own_stages else _elsewhere for index in range(pipeline.num_stages)]
    module = PipelineModule(
        layers, topology=topology, loss_fn=None if pipeline.loss is None else layer.loss, partition_method="uniform"
    )
    module.__dict__["model"] = pipeline.model
    tied = _tied(pipeline, mesh)
    module.get_tied_weights_and_groups = lambda: tied
    return module, layer.batch


class StageLayer(nn.Module):
    """A stage as a layer of DeepSpeed's PipelineModule."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.model = pipeline.model
        (index,) = pipeline.own_stages
        self.__dict__.update(pipeline=pipeline, stage=Stage(pipeline, index))
        self.names = list(inspect.signature(type(pipeline.model).forward).parameters)[1:]
        self.shapes: Any = None
        """Shapes of micro-batches for which the tensors across the cuts are known."""

    def batch(self, micro_batch: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Converts a micro-batch to DeepSpeed's form: tensors through the stages, and the target of the loss.

        Args:
            micro_batch: arguments of the model's forward: a mapping of names, or tensors by position; with the user's loss a
                pair of these and the target.

        Raises:
            ScheduleError: it has another form, or values that JSON cannot represent.
        """
        target = None
        if self.pipeline.loss is not None:
            if not isinstance(micro_batch, tuple | list) or len(micro_batch) != 2:
                raise ScheduleError(
                    f"a micro-batch must be a pair of inputs and target, but got {type(micro_batch).__name__}"
                )
            micro_batch, target = micro_batch
        if not isinstance(micro_batch, Mapping):
            micro_batch = dict(
                zip(self.names, micro_batch if isinstance(micro_batch, tuple | list) else (micro_batch,))
            )
        tensors = {name: value for name, value in micro_batch.items() if isinstance(value, torch.Tensor)}
        header_values = {
            "tensors": [(name, str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()],
            "rest": {name: value for name, value in micro_batch.items() if name not in tensors},
        }
        try:
            header = json.dumps(header_values).encode()
        except TypeError as error:
            raise ScheduleError(
                f"a micro-batch must contain tensors, numbers and texts, which go through the stages, but: {error}"
            ) from error
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        return (
            *map(_as_integers, tensors.values()),
            torch.tensor(list(header), dtype=torch.uint8, device=device),
        ), target

    def forward(self, values: tuple[torch.Tensor, ...]) -> Any:
        """Returns the input of the next stage; on the last stage the loss, or the output that `loss` is computed from."""
        pipeline, index = self.pipeline, self.stage.index
        header_values = json.loads(bytes(values[-1].tolist()))
        carried = values[len(values) - 1 - len(header_values["tensors"]) :]
        crossed = values[: len(values) - len(carried)]
        batch = {
            name: tensor.view(getattr(torch, form)) for (name, form), tensor in zip(header_values["tensors"], carried)
        }
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()}
        batch |= header_values["rest"]
        if shapes != self.shapes:
            pipeline.find_forms(batch)
            self.shapes = shapes
        forms = pipeline.board.forms[index - 1].leaves if index else ()
        formats = [dtype for _, dtype, tensor in forms if tensor]
        received = tuple(
            tensor if tensor.dtype == dtype else tensor.view(dtype) for tensor, dtype in zip(crossed, formats)
        )
        result = self.stage(*received, **batch)
        if index == pipeline.num_stages - 1:
            result = _depending_on(result, received)
            return result.reshape(()) if pipeline.loss is None else result
        # One differentiable result suffices: DeepSpeed runs backward from all of them together.
        carrier = next((number for number, tensor in enumerate(result) if tensor.requires_grad), None)
        result = tuple(
            _depending_on(tensor, received) if number == carrier else tensor for number, tensor in enumerate(result)
        )
        return (*(tensor if tensor.requires_grad else _as_integers(tensor) for tensor in result), *carried)

    def loss(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """Returns the user's loss of the model's output, with `output` in place of its first tensor."""
        assert self.pipeline.loss is not None, "DeepSpeed calls this only with a loss"
        leaves, spec = tree_flatten(self.pipeline.outputs[-1])
        main = next(number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        if not hasattr(leaves[main], "hidden"):  # logits that are not materialised
            leaves[main] = output
        return self.pipeline.loss(tree_unflatten(leaves, spec), target)


def _elsewhere(values: Any) -> Any:
    """Placeholder for a stage of another rank."""
    raise AssertionError("DeepSpeed runs the stage of this rank only")


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bits as integers, for which DeepSpeed expects no gradient."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.detach().contiguous().view(_INTEGERS[tensor.itemsize])
    return tensor


def _depending_on(result: torch.Tensor, received: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns a result whose gradient reaches all received tensors, since DeepSpeed sends one for each."""
    needing_gradient = [tensor for tensor in received if tensor.requires_grad]
    return _DependsOn.apply(result, *needing_gradient) if len(needing_gradient) > 1 else result


class _DependsOn(torch.autograd.Function):
    """Returns its first argument, as if it depended on the others with gradient zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *received: torch.Tensor) -> torch.Tensor:
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in received]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)


def _tied(pipeline: Pipeline, mesh: Any) -> list[tuple[nn.Parameter, Any]]:
    """Returns this rank's weights that other stages also have, each with the process group of these stages' ranks."""
    pipelines = mesh.mesh.movedim(mesh.mesh_dim_names.index("pp"), -1).reshape(-1, pipeline.axis.size).tolist()
    tied = []
    for module, name, stages in pipeline.ties:
        for pipeline_ranks in pipelines:
            ranks = [pipeline_ranks[stage] for stage in stages]
            group = dist.new_group(ranks)  # collective: also by ranks outside the group
            if dist.get_rank() in ranks:
                param = parameters_of(module)[name]
                assert param is not None, "a tied weight exists on each of its stages"
                # The norm of all gradients counts the weight on its first stage only.
                param.ds_pipe_replicated = dist.get_rank() != ranks[0]
                tied.append((param, group))
    return tied
