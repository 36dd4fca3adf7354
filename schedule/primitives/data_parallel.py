"""Primitives of data parallelism (ZeRO), and of offloading to host memory."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...base.errors import ScheduleError, unknown
from ..forward import Inner, Layer, add_layer
from ..graph.called import check_called
from ..offloaded import OffloadedOptimizer
from ..parallel.collectives import Axis, axis_of, divided
from ..parallel.experts import (
    BalancedTogether,
    balances,
    copied_experts,
    copies_of_experts,
    cut_copies,
    replicas_obstacle,
    spread_experts,
)
from ..parallel.replicas import Replicas
from ..parallel.sharding import is_dtensor, local, scale_gradients
from ..parallel.sharing import shared_parameters, sharing_of
from ..tree import ScheduledModule, primitive


@primitive
def shard_data(
    sch: ScheduledModule,
    zero: int = 0,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    hsdp: int = 1,
    stages: Mapping[str, int] | None = None,
) -> None:
    """Trains replicas on different data over the `dp` axis of the mesh; gradients are averaged.

     zero | sharded over the ranks | by |
    ---|---|---|
     0 | nothing | `Replicas`: buckets are all-reduced during the last backward pass of a step |
     1 | optimizer state | `Replicas`: each bucket is reduced to the ranks that update its parameters, which broadcast them |
     2 | and gradients; parameters until the forward | `fully_shard`, gathered from forward to backward |
     3 | and parameters between forward and backward | `fully_shard`, sharded again after the forward |

    At stages 2 and 3 the elements of the outermost module lists, its blocks, are gathered one at a time, and other parameters
    with the root. At stage 3 the last block and parameters outside all blocks stay gathered from forward to backward, because
    backward begins with them; the next block is gathered while one computes.

    Args:
        zero: the ZeRO stage, 0 to 3.
        param_dtype: at stages 2 and 3, the format in which parameters are gathered and used, and to which the inputs of
            blocks are cast; the shards that the optimizer updates keep their format. None: the format of the shards.
        reduce_dtype: the format in which gradients are communicated. None: float32 with a `param_dtype`, otherwise the
            format of the parameters.
        hsdp: at stages 2 and 3, number of groups of neighbours into which the ranks are divided. Each group has all
            shards: it gathers and reduces within the group, and all-reduces the gradients of shards with the other groups.
        stages: the stages of modules that differ from `zero`, by path; they are gathered one at a time. If ranks share the
            samples of a module (`share_samples`), its weights are sharded over these ranks too.

    Raises:
        ScheduleError: not the root; no `dp` axis; unknown stage; called before; `hsdp` with groups of one
            rank or with `stages`. At `build`: stage 2 or 3 in a pipeline stage with tied weights.

    Source: Rajbhandari et al., ZeRO (2020); https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    label = f"shard_data on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: the whole model is replicated, so call it on the root's schedule")
    ranks = _data_parallel(sch, label).size
    stages = dict(stages or {})
    for stage in (zero, *stages.values()):
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ScheduleError(f"{label}: zero must be a stage from 0 to 3, but got {stage!r}")
    if hsdp != 1 and (zero < 2 or hsdp < 1 or ranks % hsdp or ranks == hsdp):
        raise ScheduleError(
            f"{label}: hsdp needs stage 2 or 3 and must divide the {ranks} ranks into groups of two or more, "
            f"but is {hsdp}"
        )
    if hsdp != 1 and spread_experts(sch.module):
        raise ScheduleError(
            f"{label}: experts that are spread over ranks have replicas of their own, so hsdp must be 1"
        )
    if hsdp != 1 and (stages or sch.tree.shared):
        raise ScheduleError(f"{label}: hsdp divides the replicas of all modules in the same way, so it must be 1")
    if sch.tree.shared and balances(sch.module):
        raise ScheduleError(
            f"{label}: a loss that balances experts cannot be computed from a rank's share of the samples"
        )
    if ranks > 1 and (reason := replicas_obstacle(sch.module)):
        raise ScheduleError(f"{label}: {reason}")
    if sch.deferred(_apply):
        raise ScheduleError(f"{label}: the model is replicated already")
    for path in stages:
        sch[path]
    sch.defer(
        "data",
        _apply,
        zero=zero,
        hsdp=hsdp,
        stages=stages,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )


def is_replicated(sch: ScheduledModule) -> bool:
    """True after `shard_data`."""
    return bool(sch.deferred(_apply))


def _data_parallel(sch: ScheduledModule, label: str) -> Axis:
    axis = axis_of(sch.mesh, "dp")
    if axis is None and (sch.tree.shared or copied_experts(sch.tree.module)):
        return Axis("dp", 1, 0, "")  # ranks that share samples or tokens are replicas of each other
    if axis is None:
        raise ScheduleError(f"{label}: the mesh must have an axis named dp; pass create_schedule(model, mesh=...)")
    return axis


class Cutting:
    """Sharding of a model over replicas at ZeRO 2 and 3: unit by unit, then the other parameters. All ranks make it."""

    def __init__(self, sch: ScheduledModule, context: Any, settings: Mapping[str, Any]) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        pipeline, mesh, hsdp = context.pipeline, sch.mesh, settings["hsdp"]
        param_dtype, reduce_dtype = settings["param_dtype"], settings["reduce_dtype"]
        if param_dtype is not None and reduce_dtype is None:
            reduce_dtype = torch.float32
        self._policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        # Once for all units: pipeline stages have different numbers of units, and every rank must create the same process
        # groups. Without a dp axis only the units of `share_samples` are sharded, which have a mesh of their own.
        self._replicas = mesh["dp"] if "dp" in mesh.mesh_dim_names else mesh
        if hsdp > 1:
            self._replicas = divided(mesh, "dp", {"replicate": hsdp, "shard": mesh["dp"].size() // hsdp})
        self.stage: int = settings["zero"]
        """ZeRO stage of the model."""
        self._stage_by_unit = {id(sch[path].module): stage for path, stage in settings["stages"].items()}
        self._mesh, self._done = mesh, set[int]()
        if pipeline is not None:
            # A stage's forward ends early, so that hooks on the root do not run: each unit is sharded separately.
            if pipeline.tied_within:
                raise ScheduleError(f"shard_data: {no_tied_stages(pipeline.tied_within)}")
            stage_modules = [block.module for block in pipeline.units if not pipeline.absent(block.path)]
            self.blocks = [module for module in stage_modules if any(True for _ in module.parameters())]
        else:
            self.blocks = outermost_blocks(sch.module)
        self.units = [block for block in self.blocks if self._is_sharded(block)]
        """Modules that are gathered one at a time (FSDP units), in order."""
        several = _data_parallel(sch, "shard_data").size > 1
        self.root = self.stage >= 2 and pipeline is None and (several or not settings["stages"])
        """True if the root is sharded too, with the parameters outside all units."""
        # The backward pass begins with the last block and the parameters outside all blocks: these stay gathered.
        self._kept_gathered = [sch.module, *self.blocks[-1:]] if pipeline is None else []

    def stage_of(self, module: nn.Module) -> int:
        """Returns the ZeRO stage of a unit; below 3 its weights stay gathered for a step."""
        return self._stage_by_unit.get(id(module), self.stage)

    def _is_sharded(self, module: nn.Module) -> bool:
        sharing = sharing_of(module)
        return self.stage_of(module) >= 2 and (sharing is None or sharing.replicas.size > 1)

    def cut(self, module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
        """Shards a module, except for `ignored` parameters; a second call does nothing.

        Each mixture of experts in it is sharded first, as a unit of its own: the gradients of experts are then reduced
        after both exchanges of rows in the backward pass and not between them.
        """
        if id(module) in self._done:
            return
        self._done.add(id(module))
        reshard = self.stage_of(module) == 3 and not any(kept is module for kept in self._kept_gathered)
        for experts in spread_experts(module):
            if id(experts) not in self._done and not any(param in ignored for param in experts.parameters()):
                self._done.add(id(experts))
                # The inputs of experts include the router's weights of rows, which keep their format.
                policy = replace(self._policy, cast_forward_inputs=False)
                cut_copies(experts, self._mesh, policy, reshard_after_forward=reshard)
        self.shard(module, reshard, ignored)

    def shard(self, module: nn.Module, reshard: bool, ignored: Collection[nn.Parameter] = ()) -> None:
        """Shards a module, except for units in it that are sharded already and for `ignored` parameters.

        Args:
            reshard: free its gathered weights after the forward.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        sharing, replicas = sharing_of(module), self._replicas
        if sharing is not None:
            replicas = DeviceMesh.from_group(sharing.replicas.group, replicas.device_type, mesh_dim_names=("dp",))
        sharded = fully_shard(
            module,
            mesh=replicas,
            mp_policy=self._policy,
            reshard_after_forward=reshard,
            ignored_params=set(ignored) or None,
        )
        if sharing is not None:
            # `fully_shard` averages over all ranks, but gradients of ranks that share samples must be summed.
            scale_gradients(sharded, sharing.sharers.size)


def cutting_of(sch: ScheduledModule, context: Any) -> Cutting | None:
    """Returns the sharding of a model over its replicas at `build`; None without sharding."""
    settings = next((work.arguments for work in sch.tree.deferred if work.apply is _apply), None)
    if settings is None or max([settings["zero"], *settings["stages"].values()]) < 2:
        return None
    if context.cutting is None:
        context.cutting = Cutting(sch, context, settings)
    return context.cutting


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, **settings: Any) -> None:
    if balances(module):
        add_layer(module, BalancedTogether(_data_parallel(sch, "shard_data")))
    cutting = cutting_of(sch, context)
    if cutting is None:
        _replicate(sch, module, context, settings)
        return
    for unit in cutting.units:
        cutting.cut(unit)
    if context.pipeline is None:
        _cut_root(sch, module, context, settings, cutting)
    else:
        _share_buffers(context.pipeline, cutting.units)
    if context.pipeline is not None and cutting.stage < 3:  # gathered until the last micro-batch
        for unit in cutting.units:
            unit.set_reshard_after_backward(False)
            context.pipeline.after_passes += [submodule.reshard for submodule in (unit, *spread_experts(unit))]


def _share_buffers(pipeline: Any, units: Sequence[nn.Module]) -> None:
    """Lets the units of a pipeline stage free the buffers of their gradients one after the other.

    Each unit is a root of FSDP, which would keep its buffer until the backward pass of the stage has ended; units of one
    root share a communication context that frees them earlier.
    """
    from torch.distributed.fsdp import share_comm_ctx

    for stage in pipeline.own_stages:
        stage_modules = [block.module for block in pipeline.units if block.stage == stage]
        share_comm_ctx([module for module in stage_modules if module in units])


def _cut_root(
    sch: ScheduledModule, module: nn.Module, context: Any, settings: Mapping[str, Any], cutting: Cutting
) -> None:
    """Shards the parameters outside all units, or replicates those that stay unsharded, and sets the units' prefetching."""
    sharded = {param for unit in cutting.units for param in unit.parameters()}
    replicated = {param for param in module.parameters() if param not in sharded}
    if cutting.root:
        replicated &= {param for block in cutting.blocks for param in block.parameters()}
    if replicated:
        if context.optimizer is not None:
            context.optimizer = partial(_in_groups, context.optimizer)
        _replicate(sch, module, context, settings, replicated)
    if cutting.root:
        cutting.cut(module, replicated)
    else:
        cutting.shard(module, False, replicated)
    for block, following in pairwise(cutting.units):
        block.set_modules_to_forward_prefetch([following, *spread_experts(following)])
        following.set_modules_to_backward_prefetch([block, *spread_experts(block)])
    gathered_for_a_step: dict[int, nn.Module] = {}
    for unit in (*cutting.units, *([module] if cutting.root else [])):
        if cutting.stage_of(unit) < 3:
            # The experts of the root's units are listed with these.
            experts = spread_experts(unit) if unit is not module else []
            gathered_for_a_step |= {id(submodule): submodule for submodule in (unit, *experts)}
    module.__dict__["whole_for_a_step"] = list(gathered_for_a_step.values())


def _replicate(
    sch: ScheduledModule,
    module: nn.Module,
    context: Any,
    settings: Mapping[str, Any],
    replicated: "set[nn.Parameter] | None" = None,
) -> None:
    """Adds `Replicas`, which averages the gradients of all parameters, or of those in `replicated`."""
    pipeline = context.pipeline
    late = pipeline.tied_parameters() if pipeline is not None else ()
    axis = _data_parallel(sch, "shard_data")
    params = [param for param in module.parameters() if replicated is None or param in replicated]
    shared = {param: sharing.replicas for param, sharing in shared_parameters(module).items()}
    axis_by_param = {**shared, **copies_of_experts(module)}
    stages = dict.fromkeys(params, settings["zero"])
    for path, stage in settings["stages"].items():
        stages |= dict.fromkeys(sch[path].module.parameters(), stage)
    # ZeRO 1: one replica updates each of them.
    owned = [param for param in params if stages[param] >= 1]
    replicas = Replicas(params, axis, owned, late, settings["reduce_dtype"], axis_by_param)
    if pipeline is not None:
        replicas.by_itself = False
        pipeline.after_step.append(replicas.finish)
    make = context.optimizer
    if owned and make is not None:
        averaged = set(params)
        context.optimizer = lambda params: replicas.optimizer(
            make, [param for param in params if param not in averaged]
        )
    module.__dict__["replicas"] = replicas


def _in_groups(make: Callable[..., Any], params: Iterable[nn.Parameter]) -> Any:
    """Makes an optimizer with FSDP's sharded parameters in groups of their own.

    Fused and vectorised updates do not support DTensors and plain tensors in one group.
    """
    optimizer = make(params)
    for group in list(optimizer.param_groups):
        unsharded = [param for param in group["params"] if not is_dtensor(param)]
        sharded = [param for param in group["params"] if is_dtensor(param)]
        if unsharded and sharded:
            group["params"] = unsharded
            optimizer.param_groups.append({**group, "params": sharded})
    return optimizer


def no_tied_stages(tied: str) -> str:
    """Returns the reason against ZeRO 2 and 3 in a pipeline stage with tied weights.

    Each unit of a stage is sharded separately, because no forward of the root runs around them.
    """
    return f"zero must be 0 or 1 in this pipeline, because one stage has tied weights, {tied}, which would be sharded separately"


def outermost_blocks(root: nn.Module) -> list[nn.Module]:
    """Returns the elements of the module lists that are in no other module list."""
    if isinstance(root, nn.ModuleList):
        return list(root)
    return [block for child in root.children() for block in outermost_blocks(child)]


_OFFLOADABLE = ("activations", "optimizer")


@primitive
def offload(sch: ScheduledModule, what: str = "activations") -> None:
    """Keeps state in host memory while the device does not need it.

    Args:
        what: `activations`: tensors that this module saves for the backward pass are copied out in the forward and
            back in the backward. `optimizer` (on the root): the optimizer's state and step are on the CPU, on copies
            of the weights; each step copies the gradients out and the weights in.

    Raises:
        ScheduleError: unknown `what`; `optimizer` on a module below the root; or called before.
    """
    label = f"offload on '{sch.name}'"
    if what not in _OFFLOADABLE:
        raise ScheduleError(f"{label}: {unknown('what', what, _OFFLOADABLE)}")
    if what == "optimizer" and sch.path:
        raise ScheduleError(f"{label}: there is one optimizer, so call it on the root's schedule")
    apply = _activations if what == "activations" else _optimizer
    if sch.deferred(apply):
        raise ScheduleError(f"{label}: {what} are offloaded already")
    check_called(sch, "offload")
    sch.defer("offload", apply)


class OffloadedActivations(Layer):
    """Copies tensors saved for the backward pass to host memory, except weights, which stay on the device."""

    order = 50

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pin = torch.cuda.is_available() and torch.cuda.is_initialized()
        host_hooks = torch.autograd.graph.save_on_cpu(pin_memory=pin)
        # Listed, so that no other storage gets the id of one of these.
        storages = [local(param).untyped_storage() for param in module.parameters()]
        weight_ids = set(map(id, storages))

        def pack(tensor: torch.Tensor) -> Any:
            return tensor if id(local(tensor).untyped_storage()) in weight_ids else host_hooks.pack_hook(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else host_hooks.unpack_hook(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return inner(*args, **kwargs)


def _activations(sch: ScheduledModule, module: nn.Module, context: Any) -> None:
    add_layer(module, OffloadedActivations())


def _optimizer(sch: ScheduledModule, module: nn.Module, context: Any) -> None:
    if (make := context.optimizer) is not None:
        context.optimizer = lambda params: OffloadedOptimizer(params, make)
