"""Primitives of replicas (sharded weights, gradients and optimizer state), of shared sequences, and of host memory."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...base.errors import ScheduleError, unknown
from ...knobs.sequence import SequenceShards
from ..forward import Inner, Layer, add_layer, layers_of
from ..graph.called import check_called
from ..offloaded import OffloadedOptimizer
from ..parallel.balance import BalancedTogether, balances, replicas_obstacle
from ..parallel.collectives import Axis, axis_of, divided, neighbours
from ..parallel.experts import copied_experts, copies_of_experts, cut_copies, spread_experts
from ..parallel.replicas import Replicas
from ..parallel.sequences import CutSequence, cut_sequence as cut, obstacle
from ..parallel.sharding import is_dtensor, local, scale_gradients
from ..parallel.sharing import shared_parameters, sharing_of
from ..primitive import primitive
from ..tree import ScheduledModule

_STAGES = ("optimizer", "gradients", "weights")
"""State that each stage of ZeRO shards in addition to the one before."""


@primitive
def shard_data(
    sch: ScheduledModule,
    zero: int = 0,
    blocks: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    hsdp: int = 1,
    cut: Sequence[str] | None = None,
    gather: str | None = None,
    stages: Mapping[str, int] | None = None,
) -> None:
    """Trains replicas on different data over the `dp` axis of the mesh; gradients are averaged.

     zero | sharded over the ranks | by |
    ---|---|---|
     0 | nothing | `Replicas`: buckets are reduced while the last backward pass of a step runs |
     1 | optimizer state | the same, each parameter to the rank that updates it, and from there to all |
     2 | and gradients; parameters until the forward | `fully_shard`, whole from forward to backward |
     3 | and parameters between forward and backward | `fully_shard`, sharded again after the forward |

    At stage 3 the last block and parameters outside all blocks stay whole from forward to backward, because backward
    begins with them; the next block is gathered while one computes.

    Args:
        zero: the ZeRO stage, 0 to 3.
        blocks: pattern of the modules that are gathered one at a time at stages 2 and 3; by default the
            elements of the outermost module lists, and what remains together with the root.
        param_dtype: at stages 2 and 3, the format in which parameters are gathered and used, and to which the
            inputs of blocks are cast; the pieces that the optimizer updates keep theirs. None: theirs.
        reduce_dtype: the format in which gradients travel; None: float32 where `param_dtype` is given, and the
            parameters' otherwise.
        hsdp: at stages 2 and 3, into how many groups of neighbours the ranks are divided. Each group holds
            all pieces: it gathers and reduces within, and sums the pieces of gradients with the others.
        cut: what is cut, of `optimizer`, `gradients` and `weights`, in place of a stage's number.
        gather: for how long weights that are gathered stay whole, a `step` or a `pass`; None: a pass where
            `weights` are cut.
        stages: the stage of modules that have another one, by path; they are gathered one at a time. Where ranks share the
            samples of a module (`share_samples`), its weights are cut over these too.

    Raises:
        ScheduleError: not the root; no `dp` axis; no such stage; called before; no such blocks; groups that
            are not two ranks or more; stages of their own with such groups. At `build`: stage 2 or 3 in a pipeline
            whose stages hold tied weights.

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
    cut = _STAGES[:zero] if cut is None else tuple(cut)
    if cut != _STAGES[: len(cut)]:
        raise ScheduleError(f"{label}: cut must be the first of {', '.join(_STAGES)}, but is {', '.join(cut)}")
    if gather not in (None, "step", "pass"):
        raise ScheduleError(f"{label}: gather must be step or pass, but got {gather!r}")
    if hsdp != 1 and ("gradients" not in cut or hsdp < 1 or ranks % hsdp or ranks == hsdp):
        raise ScheduleError(
            f"{label}: hsdp needs stage 2 or 3 and must divide the {ranks} ranks into groups of two or more, "
            f"but is {hsdp}"
        )
    if hsdp != 1 and spread_experts(sch.module):
        raise ScheduleError(
            f"{label}: experts that are spread over ranks have replicas of their own, so hsdp must be 1"
        )
    if hsdp != 1 and (stages or sch.tree.shared):
        raise ScheduleError(f"{label}: hsdp divides the replicas of all modules alike, so it must be 1")
    if sch.tree.shared and balances(sch.module):
        raise ScheduleError(f"{label}: a loss that balances experts is not computed from parts of the samples")
    if ranks > 1 and (reason := replicas_obstacle(sch.module)):
        raise ScheduleError(f"{label}: {reason}")
    if sch.deferred(_apply):
        raise ScheduleError(f"{label}: the model is replicated already")
    if blocks is not None:
        sch.select(blocks)
    for path in stages:
        sch[path]
    sch.defer(
        "data",
        _apply,
        cut=cut,
        gather=gather or ("pass" if "weights" in cut else "step"),
        hsdp=hsdp,
        blocks=blocks,
        stages=stages,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )


def is_replicated(sch: ScheduledModule) -> bool:
    """True after `shard_data`."""
    return bool(sch.deferred(_apply))


def _data_parallel(sch: ScheduledModule, label: str) -> Axis:
    found = axis_of(sch.mesh, "dp")
    if found is None and (sch.tree.shared or copied_experts(sch.tree.module)):
        return Axis("dp", 1, 0, "")  # ranks that share samples or tokens are replicas of each other
    if found is None:
        raise ScheduleError(f"{label}: the mesh must have an axis named dp; pass create_schedule(model, mesh=...)")
    return found


@dataclass(kw_only=True, slots=True)
class Cutting:
    """How a model is cut over replicas: what ZeRO 2 and 3 cut, one part at a time, then what remains."""

    parts: list[nn.Module]
    """Modules that are gathered one at a time, in order."""
    whole: set[int]
    """Ids of the modules that stay whole from forward to backward."""
    gather: str
    """For how long the others are whole, a `step` or a `pass`."""
    own: dict[int, str]
    """That of parts that have a stage of their own, by their identities."""
    root: bool
    """True if the root is cut too, with what remains."""
    shard: Callable[..., Any]
    """`fully_shard` with mesh and formats."""
    experts: Callable[..., Any]
    """The same for experts that are spread over some of the replicas, which are sharded over the others."""
    done: set[int] = field(default_factory=set)
    """Ids of the sharded modules."""

    def cut(self, module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
        """Cuts a module, once, and experts in it before the rest, each mixture by itself: the gradients of experts are
        reduced behind both exchanges of rows in the backward pass, and not between them. Parameters that are ignored stay
        as they are."""
        if id(module) not in self.done:
            self.done.add(id(module))
            cut_again = self.gather_of(module) == "pass" and id(module) not in self.whole
            for each in spread_experts(module):
                if id(each) not in self.done and not any(param in ignored for param in each.parameters()):
                    self.done.add(id(each))
                    self.experts(each, reshard_after_forward=cut_again)
            self.shard(module, reshard_after_forward=cut_again, ignored=ignored)

    def gather_of(self, module: nn.Module) -> str:
        """For how long a part is whole."""
        return self.own.get(id(module), self.gather)


def cutting_of(sch: ScheduledModule, context: Any) -> Cutting | None:
    """Sharding of a model over its replicas by `build`; None without sharding."""
    due = next((each for each in sch.tree.deferred if each.apply is _apply), None)
    if due is None or not any(stage >= 2 for stage in _stages_of(due.arguments)):
        return None
    return _cutting(sch, context, due.arguments)


def _stages_of(given: Mapping[str, Any]) -> list[int]:
    """The stages of ZeRO that a model's parts have."""
    return [len(given["cut"]), *given["stages"].values()]


def _cutting(sch: ScheduledModule, context: Any, given: Mapping[str, Any]) -> Cutting:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if context.cutting is not None:
        return context.cutting
    module, pipeline = sch.tree.module, context.pipeline
    param_dtype, reduce_dtype = given["param_dtype"], given["reduce_dtype"]
    if param_dtype is not None and reduce_dtype is None:
        reduce_dtype = torch.float32
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    along = _data_parallel(sch, "shard_data")
    stages = {id(sch[path].module): stage for path, stage in given["stages"].items()}
    stage = len(given["cut"])

    def cut(part: nn.Module) -> bool:
        sharing = sharing_of(part)
        return stages.get(id(part), stage) >= 2 and (sharing is None or sharing.replicas.size > 1)

    if pipeline is not None:
        # A stage's forward ends early, so hooks on the root do not run: each part is sharded separately.
        if pipeline.tied_within:
            raise ScheduleError(f"shard_data: {no_tied_stages(pipeline.tied_within)}")
        here = [unit.module for unit in pipeline.units if not pipeline.absent(unit.path)]
        parts = [part for part in here if any(True for _ in part.parameters()) and cut(part)]
        whole = set[int]()
    else:
        blocks = given["blocks"]
        every = [each.module for each in sch.select(blocks)] if blocks else outermost_blocks(module)
        parts = [part for part in every if cut(part)]
        # The backward pass begins with the last block and what is in no block.
        whole = {id(each) for each in (module, *every[-1:])}
    # Weights of experts come as the router made them.
    experts = partial(cut_copies, mesh=sch.mesh, policy=replace(policy, cast_forward_inputs=False))
    context.cutting = Cutting(
        parts=parts,
        whole=whole,
        gather=given["gather"],
        own={id(part): "pass" if stages[id(part)] == 3 else "step" for part in parts if id(part) in stages},
        root=stage >= 2 and pipeline is None and (along.size > 1 or not stages),
        shard=partial(_shard, replicas=_replicas(sch.mesh, given["hsdp"]), policy=policy),
        experts=experts,
    )
    return context.cutting


def _replicas(mesh: Any, hsdp: int) -> Any:
    """The mesh of replicas that a model is cut over. All ranks call it, and once for all parts: the stages of a pipeline have
    different numbers of them, and process groups must be created in the same order everywhere."""
    if hsdp > 1:
        return divided(mesh, "dp", {"replicate": hsdp, "shard": mesh["dp"].size() // hsdp})
    # Without replicas nothing is left that could be cut.
    return mesh["dp"] if "dp" in mesh.mesh_dim_names else mesh


def _shard(
    module: nn.Module,
    reshard_after_forward: bool,
    replicas: Any,
    policy: Any,
    ignored: Collection[nn.Parameter] = (),
) -> None:
    """Cuts a module over the replicas of it, but for what is cut in it already, and for parameters that are ignored."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    sharing = sharing_of(module)
    if sharing is not None:
        replicas = DeviceMesh.from_group(sharing.replicas.group, replicas.device_type, mesh_dim_names=("dp",))
    made = fully_shard(
        module,
        mesh=replicas,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        ignored_params=set(ignored) or None,
    )
    if sharing is not None:
        # A mean over all ranks; over those that share samples it is a sum.
        scale_gradients(made, sharing.parts.size)


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, **given: Any) -> None:
    if balances(module):
        add_layer(module, BalancedTogether(_data_parallel(sch, "shard_data")))
    if not any(stage >= 2 for stage in _stages_of(given)):
        _replicate(sch, module, context, given)
        return
    cutting = _cutting(sch, context, given)
    for part in cutting.parts:
        cutting.cut(part)
    if context.pipeline is None:
        _cut_root(sch, module, context, given, cutting)
    else:
        _share_buffers(context.pipeline, cutting.parts)
    if context.pipeline is not None and cutting.gather == "step":  # whole until the last micro-batch
        for part in cutting.parts:
            part.set_reshard_after_backward(False)
            context.pipeline.after_passes += [each.reshard for each in (part, *spread_experts(part))]


def _share_buffers(pipeline: Any, parts: Sequence[nn.Module]) -> None:
    """Has the parts of a stage free the buffers of their gradients one after the other, as the parts of one module do. Each is a
    root of its own, and would keep its buffer until the backward pass of the whole stage has ended."""
    from torch.distributed.fsdp import share_comm_ctx

    for stage in pipeline.own_stages:
        share_comm_ctx([unit.module for unit in pipeline.units if unit.stage == stage and unit.module in parts])


def _cut_root(
    sch: ScheduledModule, module: nn.Module, context: Any, given: Mapping[str, Any], cutting: Cutting
) -> None:
    """Cuts what is in no part, unless it stays whole, and lets the parts be gathered ahead."""
    inside = {param for part in cutting.parts for param in part.parameters()}
    kept = {param for param in module.parameters() if param not in inside}
    if cutting.root:
        blocks = given["blocks"]
        every = [each.module for each in sch.select(blocks)] if blocks else outermost_blocks(module)
        kept &= {param for part in every for param in part.parameters()}
    if kept:
        if context.optimizer is not None:
            context.optimizer = partial(_in_groups, context.optimizer)
        _replicate(sch, module, context, given, kept)
    if cutting.root:
        cutting.cut(module, kept)
    else:
        cutting.shard(module, reshard_after_forward=False, ignored=kept)
    for block, following in pairwise(cutting.parts):
        block.set_modules_to_forward_prefetch([following, *spread_experts(following)])
        following.set_modules_to_backward_prefetch([block, *spread_experts(block)])
    step = [part for part in (*cutting.parts, *([module] if cutting.root else [])) if cutting.gather_of(part) == "step"]
    module.__dict__["whole_for_a_step"] = list(
        {
            id(each): each for part in step for each in (part, *(spread_experts(part) if part is not module else []))
        }.values()
    )


def _replicate(
    sch: ScheduledModule,
    module: nn.Module,
    context: Any,
    given: Mapping[str, Any],
    kept: "set[nn.Parameter] | None" = None,
) -> None:
    """Has replicas average the gradients of what they keep whole: of all parameters, or of these."""
    pipeline = context.pipeline
    late = pipeline.tied_parameters() if pipeline is not None else ()
    axis = _data_parallel(sch, "shard_data")
    params = [param for param in module.parameters() if kept is None or param in kept]
    shared = {param: sharing.replicas for param, sharing in shared_parameters(module).items()}
    apart = {**shared, **copies_of_experts(module)}
    owned = _owned(sch, given, params)
    replicas = Replicas(params, axis, owned, late, given["reduce_dtype"], apart)
    if pipeline is not None:
        replicas.by_itself = False
        pipeline.after_step.append(replicas.finish)
    make = context.optimizer
    if owned and make is not None:
        averaged = set(params)
        context.optimizer = lambda every: replicas.optimizer(make, [each for each in every if each not in averaged])
    module.__dict__["replicas"] = replicas


def _in_groups(make: Callable[..., Any], params: Iterable[nn.Parameter]) -> Any:
    """The optimizer of parameters of which some are cut by FSDP: those are in groups of their own, since fused and
    vectorised updates take no mixture."""
    optimizer = make(params)
    for group in list(optimizer.param_groups):
        plain, cut = ([each for each in group["params"] if is_dtensor(each) == wanted] for wanted in (False, True))
        if plain and cut:
            group["params"] = plain
            optimizer.param_groups.append({**group, "params": cut})
    return optimizer


def _owned(sch: ScheduledModule, given: Mapping[str, Any], params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those of some parameters that one replica each updates (ZeRO 1)."""
    stages = dict.fromkeys(params, len(given["cut"]))
    for path, stage in given["stages"].items():
        stages |= dict.fromkeys(sch[path].module.parameters(), stage)
    return [param for param in params if stages[param] >= 1]


def no_tied_stages(tied: str) -> str:
    """Reason against ZeRO 2 and 3: each part of a stage is sharded separately, because no forward of the root runs
    around them.
    """
    return f"zero must be 0 or 1 in this pipeline, because one stage has tied weights, {tied}, which would be sharded separately"


def outermost_blocks(root: nn.Module) -> list[nn.Module]:
    """Elements of the module lists that are in no other module list."""
    if isinstance(root, nn.ModuleList):
        return list(root)
    return [block for child in root.children() for block in outermost_blocks(child)]


@primitive
def cut_sequence(sch: ScheduledModule, sp: int = 1, cp: int = 1) -> None:
    """Cuts every sequence over groups of `cp * sp` neighbours along the `dp` axis of the mesh, which then share
    samples.

    Each rank gets whole samples and computes on its piece. Around attention `sp` neighbours exchange tokens for heads
    (Ulysses), for any attention implementation of transformers; keys with fewer heads than ranks are repeated. Keys
    and values are passed around a ring of `cp` ranks (ring attention), each of which has two stretches of the
    sequence, from its beginning and from its end. The model's loss is this rank's part, and its mean over the axis is
    the loss of all samples: `shard_data` averages gradients accordingly. All ranks call it.

    Args:
        sp: number of ranks that exchange heads; it divides the heads.
        cp: number of ranks in a ring; `2 * cp` and `cp * sp` divide a sample's tokens.

    Raises:
        ScheduleError: not the root; no `dp` axis, or one that such groups do not divide; called before; a model with
            its own attention code, or in a ring with more than softmax(Q K') V; or heads that the ranks do not divide.

    Source: Jacobs et al., DeepSpeed-Ulysses (arXiv:2309.14509); Liu et al., Ring Attention (arXiv:2310.01889); both
    together: Fang and Zhao, USP (arXiv:2405.07719).
    """
    label = f"cut_sequence on '{sch.name}'"
    if sch.path:
        raise ScheduleError(f"{label}: sequences are cut for the whole model, so call it on the root's schedule")
    for name, degree in (("sp", sp), ("cp", cp)):
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ScheduleError(f"{label}: {name} must be a whole number of at least 1, but is {degree!r}")
    along = axis_of(sch.mesh, "dp")
    if sp * cp < 2 or along is None or along.size % (sp * cp):
        given = "there is none" if along is None else f"has {along.size} ranks"
        raise ScheduleError(
            f"{label}: the mesh's dp axis must be of groups of cp * sp ranks, two or more, but {given} and cp * sp is "
            f"{cp} * {sp}"
        )
    if layers_of(sch.module, CutSequence):
        raise ScheduleError(f"{label}: sequences are cut already")
    if sch.tree.shared:
        raise ScheduleError(f"{label}: it must come before share_samples, whose blocks may cut sequences further")
    tensor = axis_of(sch.mesh, "tp")
    tp = 1 if tensor is None else tensor.size
    if reason := obstacle(sch.module, sp, cp, tp):
        raise ScheduleError(f"{'sp' if cp == 1 else 'cp' if sp == 1 else 'sp and cp'}: {reason}")
    axes = neighbours(sch.mesh, {"cp": cp, "sp": sp}, along)
    sharing = SequenceShards(sp=sp, cp=cp, rank=along.rank % (sp * cp))
    cut(sch.module, sharing, sp=axes.get("sp"), cp=axes.get("cp"), tp=tp)


WHAT = ("activations", "optimizer")


@primitive
def offload(sch: ScheduledModule, what: str = "activations", blocks: Sequence[str] | None = None) -> None:
    """Keeps state in host memory while the device does not need it.

    Args:
        what: `activations`: tensors that this module saves for the backward pass are copied out in the forward and
            back in the backward. `optimizer` (on the root): the optimizer's state and step are on the CPU, on copies
            of the weights; each step copies the gradients out and the weights in.
        blocks: with `optimizer`, paths of the modules of whose parameters it is; None for all.

    Raises:
        ScheduleError: neither of these; `optimizer` elsewhere than on the root; blocks of activations, or that are not
            there; or called before.
    """
    label = f"offload on '{sch.name}'"
    if what not in WHAT:
        raise ScheduleError(f"{label}: {unknown('what', what, WHAT)}")
    if what == "optimizer" and sch.path:
        raise ScheduleError(f"{label}: there is one optimizer, so call it on the root's schedule")
    apply = _activations if what == "activations" else _optimizer
    if sch.deferred(apply):
        raise ScheduleError(f"{label}: {what} are offloaded already")
    if blocks is not None and what != "optimizer":
        raise ScheduleError(f"{label}: activations are offloaded module by module, so call it on each of the blocks")
    for path in blocks or ():
        sch[path]
    check_called(sch, "offload")
    if what == "optimizer":
        sch.defer("offload", apply, blocks=blocks)
    else:
        sch.defer("offload", apply)


class OffloadedActivations(Layer):
    """Copies tensors saved for the backward pass to host memory, except weights, which stay on the device anyway."""

    order = 50

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pin = torch.cuda.is_available() and torch.cuda.is_initialized()
        moved = torch.autograd.graph.save_on_cpu(pin_memory=pin)
        weights = [local(each).untyped_storage() for each in module.parameters()]
        stays = set(map(id, weights))

        def pack(tensor: torch.Tensor) -> Any:
            return tensor if id(local(tensor).untyped_storage()) in stays else moved.pack_hook(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else moved.unpack_hook(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return inner(*args, **kwargs)


def _activations(sch: ScheduledModule, module: nn.Module, context: Any) -> None:
    add_layer(module, OffloadedActivations())


def _optimizer(sch: ScheduledModule, module: nn.Module, context: Any, blocks: Sequence[str] | None) -> None:
    make = context.optimizer
    if make is None:
        return
    if blocks is None:
        context.optimizer = lambda params: OffloadedOptimizer(params, make)
        return
    inside = [sch[path].module for path in blocks]

    def partly(params: Iterable[nn.Parameter]) -> Any:
        # By now parameters are those that FSDP has put in place.
        chosen = {param for each in inside for param in each.parameters()}
        return OffloadedOptimizer(params, partial(_in_groups, make), chosen)

    context.optimizer = partly
