"""DeepSpeed's engine of a scheduled model: `build(sch, target="deepspeed", config=...)`.

The schedule shards, replaces, recomputes and compiles the model. DeepSpeed handles replicas and their sharding (ZeRO),
the optimizer's step and the order of a pipeline's micro-batches. The schedule's settings of these are added to the
user's configuration of DeepSpeed; contradictions are refused.

The stages of a pipeline are layers of DeepSpeed's PipelineModule. Every stage runs the model's own forward and needs the
batch for it, but DeepSpeed loads batches only in the first and the last stage. So the batch is passed from stage to stage:
`(tensors across the cut..., the batch's tensors..., header)`, where the header contains the names of the tensors in JSON.
DeepSpeed expects a gradient of each floating-point tensor that it sends; tensors without one are sent as integers of the
same bits.

Source: https://www.deepspeed.ai/docs/config-json/
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base._torch import parameters_of, tree_flatten, tree_unflatten
from ..base.errors import MissingDependency, ScheduleError, not_installed
from ..base.reading import LARGEST_DOCUMENT, Malformed, parse_json, read_named
from .parallel.collectives import axis_of
from .parallel.experts import spread_experts
from .parallel.pipeline import Pipeline, Stage
from .parallel.sharding import shards_of
from .tree import ScheduledModule

AXES = {"pp": "pipe", "dp": "data", "tp": "model"}
"""DeepSpeed's names of a mesh's axes."""
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of weights beside a copy in float32, by the section of the configuration."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def settings_of(sch: ScheduledModule, config: Mapping[str, Any] | str | Path | None, optimizer: bool) -> dict[str, Any]:
    """Returns DeepSpeed's configuration with the schedule's settings; nothing is changed yet.

    Args:
        given: the configuration, or the path of its JSON file.
        optimizer: True if `build` was called with an optimizer.

    Raises:
        ScheduleError: schedule and configuration contradict each other, or DeepSpeed does not support the schedule.
        MissingDependency: DeepSpeed is not installed.
    """
    if missing := not_installed("deepspeed", "frameworks"):
        raise MissingDependency(missing)
    settings = _read(config)
    if optimizer and "optimizer" in settings:
        raise _refused("optimizer= was given, and the configuration has an optimizer, too; leave one of them out")
    if any(step.primitive == "offload" and not step.path and "optimizer" in str(step) for step in sch.tree.steps):
        raise _refused("set zero_optimization.offload_optimizer in its configuration instead of offload('optimizer')")
    if spread_experts(sch.module):
        raise _refused(
            "its engine averages gradients over all replicas, but shard_experts leaves each expert to some of them; "
            "leave shard_experts or the target out"
        )
    if sch.tree.shared:
        raise _refused(
            f"its engine expects gradients of full micro-batches, but ranks share samples in '{min(sch.tree.shared)}'; "
            "leave share_samples or the target out"
        )
    _check_ranks(sch.mesh)
    _replicas(sch, settings)
    _tensor_parallel(sch, settings)
    _pipeline(sch, settings)
    # By default DeepSpeed clips at 1, unlike other builds.
    settings.setdefault("gradient_clipping", 0.0)
    return settings


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Mapping[str, Any],
    mesh: Any,
    pipeline: Pipeline | None,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Returns the engine and its optimizer, which wraps `optimizer` or follows the configuration. All ranks call it."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    with _nothing_compiled():
        deepspeed.init_distributed(verbose=False)
    topology = _topology(mesh)
    for module in model.modules():
        for name in shards_of(module):
            # The norm of all gradients then counts shards on every rank, and replicated tensors once.
            if (param := parameters_of(module).get(name)) is not None:
                param.tensor_model_parallel = True
    form = next((form for name, form in FORMATS.items() if settings.get(name, {}).get("enabled")), None)
    module, convert = (model, None) if pipeline is None else staged(pipeline, topology, form)
    engine, optimizer, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        config=dict(settings),
        mpu=PipelineParallelGrid(topology=topology) if pipeline is None else None,
    )
    if convert is not None:
        engine.set_batch_fn(convert)
    return engine, optimizer


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Prevents DeepSpeed on CPUs from compiling shared-memory communication, which takes minutes and which only inference
    uses.
    """
    from deepspeed import ops

    name, public_names = "__compatible_ops__", dict(vars(ops))
    setattr(ops, name, {**public_names.get(name, {}), "deepspeed_shm_comm": False})
    try:
        yield
    finally:
        delattr(ops, name)  # DeepSpeed checks it on use
        if name in public_names:
            setattr(ops, name, public_names[name])


def _refused(reason: str) -> ScheduleError:
    return ScheduleError(f"build for deepspeed: {reason}")


def _read(source: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Reads a configuration and copies its sections."""
    config: Any = source
    if isinstance(source, str | Path):
        try:
            config = parse_json(read_named(Path(source), at_most=LARGEST_DOCUMENT))
        except (OSError, Malformed) as error:
            raise _refused(f"its configuration {source} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise _refused(f"config must be DeepSpeed's configuration or the path of its JSON file, but got {config!r}")
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        raise _refused(
            "its configuration must set train_micro_batch_size_per_gpu, and gradient_accumulation_steps if there "
            f"are several, but has {', '.join(map(str, config)) or 'nothing'}"
        )
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}


def _check_ranks(mesh: Any) -> None:
    """Checks that the mesh has all ranks in order, the only arrangement that DeepSpeed uses."""
    if not dist.is_initialized() or "LOCAL_RANK" not in os.environ:
        raise _refused(
            "it needs torch.distributed, and LOCAL_RANK in the environment: start by torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    ranks = [0] if mesh is None else mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        raise _refused(
            f"its replicas are all {dist.get_world_size()} ranks, so the mesh must have them in their order, but has "
            f"{', '.join(map(str, ranks))}; pass create_schedule(model, mesh=...)"
        )


def _topology(mesh: Any) -> Any:
    """Converts the mesh to DeepSpeed's topology."""
    from deepspeed.runtime.pipe.topology import ProcessTopology

    sizes = {} if mesh is None else {AXES[name]: size for name, size in zip(mesh.mesh_dim_names, mesh.mesh.shape)}
    axes = {**{axis: 1 for axis in AXES.values() if axis not in sizes}, **sizes}
    return ProcessTopology(axes=list(axes), dims=list(axes.values()))


def _replicas(sch: ScheduledModule, settings: dict[str, Any]) -> None:
    """Writes the settings of `shard_data`."""
    for arguments in (work.arguments for work in sch.tree.deferred if work.phase == "data"):
        zero, stage = settings.setdefault("zero_optimization", {}), arguments["zero"]
        if zero.setdefault("stage", stage) != stage:
            raise _refused(f"shard_data has ZeRO stage {stage}, but zero_optimization.stage is {zero['stage']}")
        unsupported: dict[str, Any] = {"hsdp": 1, "stages": {}}
        for name, neutral in unsupported.items():
            if arguments[name] != neutral:
                raise _refused(f"shard_data({name}={arguments[name]!r}) has no counterpart in DeepSpeed; leave it out")
        if (dtype := arguments["param_dtype"]) is not None and not settings.get(NAMES.get(dtype, ""), {}).get(
            "enabled"
        ):
            raise _refused(
                f"shard_data(param_dtype={dtype}) is {NAMES.get(dtype)}: {{enabled: true}} of its configuration"
            )
        if (dtype := arguments["reduce_dtype"]) is not None:
            if settings.setdefault("communication_data_type", NAMES[dtype]) != NAMES[dtype]:
                raise _refused(
                    f"shard_data has reduce_dtype={dtype}, but communication_data_type is "
                    f"{settings['communication_data_type']}"
                )


def _tensor_parallel(sch: ScheduledModule, settings: dict[str, Any]) -> None:
    """Removes the setting of AutoTP: the schedule has sharded the model."""
    axis = axis_of(sch.mesh, "tp")
    ranks = 1 if axis is None else axis.size
    autotp = (settings.pop("tensor_parallel", None) or {}).get("autotp_size", 0)
    if autotp not in (0, ranks):
        raise _refused(
            f"the schedule shards over {ranks} ranks, but tensor_parallel.autotp_size is {autotp}; leave it out"
        )


def _pipeline(sch: ScheduledModule, settings: dict[str, Any]) -> None:
    """Writes the settings of stages from cuts and `pipeline`."""
    axis, stages = axis_of(sch.mesh, "pp"), len(sch.tree.cuts) + 1
    ranks = 1 if axis is None else axis.size
    section = settings.setdefault("pipeline", {})
    if section.pop("stages", "auto") not in ("auto", ranks):
        raise _refused(f"the pp axis has {ranks} ranks, but the configuration's pipeline has another number of stages")
    if ranks == 1:
        return
    kind, micro_batches = sch.tree.pipeline or ("1f1b", None)
    if stages != ranks or kind != "1f1b":
        raise _refused(
            f"its pipelines run 1f1b with one stage a rank, but there are {stages} stages on {ranks} ranks, in the "
            f"order {kind}"
        )
    if settings.get("zero_optimization", {}).get("stage", 0) > 1:
        raise _refused("its pipelines take ZeRO 0 and 1; with 2 or 3 leave the target out")
    if micro_batches is not None and settings.setdefault("gradient_accumulation_steps", micro_batches) != micro_batches:
        raise _refused(
            f"pipeline has {micro_batches} micro-batches, but gradient_accumulation_steps is "
            f"{settings['gradient_accumulation_steps']}"
        )
    # Every tensor-parallel rank sends whole tensors across a cut: DeepSpeed's partition supports a single tensor.
    section |= {"pipe_partitioned": False, "grad_partitioned": False}


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the number of bytes."""


def staged(pipeline: Pipeline, topology: Any, form: torch.dtype | None) -> tuple[nn.Module, Callable[[Any], Any]]:
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
    for tie in pipeline.ties:
        # The norm of all gradients counts the weight on its first stage only.
        tie.param.ds_pipe_replicated = pipeline.axis.rank != tie.ranks[0]
    module.get_tied_weights_and_groups = lambda: [(tie.param, tie.group) for tie in pipeline.ties]
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
