"""DeepSpeed's engine of a scheduled model: `build(sch, target="deepspeed", config=...)`.

The schedule shards, replaces, recomputes and compiles the model. DeepSpeed handles replicas and their sharding (ZeRO),
the optimizer's step and the order of a pipeline's micro-batches. The schedule's settings of these are added to the
user's configuration of DeepSpeed; contradictions are refused.

Source: https://www.deepspeed.ai/docs/config-json/
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base._torch import parameters_of
from ...base.errors import MissingDependency, ScheduleError, not_installed
from ...base.reading import LARGEST_DOCUMENT, Malformed, parse_json, read_named
from ..parallel.collectives import axis_of
from ..parallel.experts import spread_experts
from ..parallel.pipeline import Pipeline
from ..parallel.sharding import shards_of
from ..tree import ScheduledModule
from .stages import staged

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
    module, convert = (model, None) if pipeline is None else staged(pipeline, mesh, topology, form)
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
        zero, stage = settings.setdefault("zero_optimization", {}), len(arguments["cut"])
        if zero.setdefault("stage", stage) != stage:
            raise _refused(f"shard_data has ZeRO stage {stage}, but zero_optimization.stage is {zero['stage']}")
        unsupported: dict[str, Any] = {
            "hsdp": 1,
            "blocks": None,
            "stages": {},
            "gather": "pass" if stage == 3 else "step",
        }
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
