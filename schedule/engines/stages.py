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
    """Returns this rank's stage in a PipelineModule, whose `model` is the scheduled model, and a function that converts
    a micro-batch of the data iterator to DeepSpeed's form; all ranks call it.

    Args:
        pipeline: with one stage per rank.
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
    """A stage as a layer of DeepSpeed."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.model = pipeline.model
        (index,) = pipeline.own_stages
        self.__dict__.update(pipeline=pipeline, stage=Stage(pipeline, index))
        self.names = list(inspect.signature(type(pipeline.model).forward).parameters)[1:]
        self.shapes: Any = None
        """Shapes of micro-batches for which the tensors across the cuts are known."""

    def batch(self, given: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Converts a micro-batch to DeepSpeed's form: tensors through the stages, and the target of the loss.

        Args:
            given: arguments of the model's forward: a mapping of names, or tensors by position; with the user's loss a
                pair of these and the target.

        Raises:
            ScheduleError: it is neither.
        """
        target = None
        if self.pipeline.loss is not None:
            if not isinstance(given, tuple | list) or len(given) != 2:
                raise ScheduleError(
                    f"a micro-batch must be a pair of inputs and target, but got {type(given).__name__}"
                )
            given, target = given
        if not isinstance(given, Mapping):
            given = dict(zip(self.names, given if isinstance(given, tuple | list) else (given,)))
        tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
        header_values = {
            "tensors": [(name, str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()],
            "rest": {name: each for name, each in given.items() if name not in tensors},
        }
        try:
            header = json.dumps(header_values).encode()
        except TypeError as error:
            raise ScheduleError(
                f"a micro-batch must contain tensors, numbers and texts, which go through the stages, but: {error}"
            ) from error
        device = next((each.device for each in tensors.values()), torch.device("cpu"))
        return (*map(_bits, tensors.values()), torch.tensor(list(header), dtype=torch.uint8, device=device)), target

    def forward(self, values: tuple[torch.Tensor, ...]) -> Any:
        """Input of the next stage; of the last stage the loss, or the output that `loss` is computed from."""
        pipeline, index = self.pipeline, self.stage.index
        header_values = json.loads(bytes(values[-1].tolist()))
        carried = values[len(values) - 1 - len(header_values["tensors"]) :]
        crossed = values[: len(values) - len(carried)]
        batch = {name: each.view(getattr(torch, form)) for (name, form), each in zip(header_values["tensors"], carried)}
        shapes = {name: (each.shape, each.dtype) for name, each in batch.items()}
        batch |= header_values["rest"]
        if shapes != self.shapes:
            pipeline.find_forms(batch)
            self.shapes = shapes
        forms = pipeline.board.forms[index - 1].leaves if index else ()
        formats = [dtype for _, dtype, tensor in forms if tensor]
        received = tuple(each if each.dtype == form else each.view(form) for each, form in zip(crossed, formats))
        result = self.stage(*received, **batch)
        if index == pipeline.num_stages - 1:
            result = _reaching(result, received)
            return result.reshape(()) if pipeline.loss is None else result
        first = next((number for number, each in enumerate(result) if each.requires_grad), None)
        result = tuple(_reaching(each, received) if number == first else each for number, each in enumerate(result))
        return (*(each if each.requires_grad else _bits(each) for each in result), *carried)

    def loss(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """The caller's loss of the model's whole output, with `output` in place of its tensor."""
        assert self.pipeline.loss is not None, "DeepSpeed is given this where there is one"
        leaves, spec = tree_flatten(self.pipeline.outputs[-1])
        first = next(number for number, each in enumerate(leaves) if isinstance(each, torch.Tensor))
        if not hasattr(leaves[first], "hidden"):  # logits that are not materialised
            leaves[first] = output
        return self.pipeline.loss(tree_unflatten(leaves, spec), target)


def _elsewhere(values: Any) -> Any:
    """Placeholder for a stage of another rank."""
    raise AssertionError("DeepSpeed runs the stage of this rank only")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as integers, for which no gradient is expected."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.detach().contiguous().view(_INTEGERS[tensor.itemsize])
    return tensor


def _reaching(result: torch.Tensor, received: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns a result whose gradient reaches all received tensors, since DeepSpeed sends one for each."""
    wanting = [each for each in received if each.requires_grad]
    return _Reaching.apply(result, *wanting) if len(wanting) > 1 else result


class _Reaching(torch.autograd.Function):
    """Returns its first argument, as if it depended on the others with gradient zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *received: torch.Tensor) -> torch.Tensor:
        ctx.forms = [(each.shape, each.dtype, each.device) for each in received]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)


def _tied(pipeline: Pipeline, mesh: Any) -> list[tuple[nn.Parameter, Any]]:
    """This rank's weights that other stages also have, each with the group of these ranks."""
    lines = mesh.mesh.movedim(mesh.mesh_dim_names.index("pp"), -1).reshape(-1, pipeline.axis.size).tolist()
    found = []
    for module, name, stages in pipeline.ties:
        for line in lines:
            ranks = [line[stage] for stage in stages]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                param = parameters_of(module)[name]
                assert param is not None, "a tied weight is there"
                # The norm of all gradients counts it once.
                param.ds_pipe_replicated = dist.get_rank() != ranks[0]
                found.append((param, group))
    return found
