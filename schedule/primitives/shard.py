"""shard: cut a parameter or buffer over the tensor-parallel axis of the mesh."""

from collections.abc import Sequence

import torch
from torch import nn

from ...base._torch import buffers_of, parameters_of
from ...base.errors import ScheduleError
from ..forward import Layer, add_layer, layers_of
from ..graph.trace import Traced
from ..parallel.checksums import checksum
from ..parallel.collectives import Axis, axis_of
from ..parallel.sharding import Shard, cut_tensor, holders, put, shards_of
from ..primitive import primitive
from ..tree import ScheduledModule
from .annotate import tensor_of
from .kinds import Follow, kind_of

USED_WHOLE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear)
"""Modules of torch whose kernels take several weights at once, whole."""
HEADS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "split_size",
    "all_head_size",
    "inner_dim",
)
"""What an attention module counts that its projections' outputs are cut along with."""
COUNTS_OF_HEADS = HEADS[:5]
"""Those of them that are numbers of heads; the rest are numbers of features."""
WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim")
"""What an attention module calls the features of one head."""


@primitive
def shard(
    sch: ScheduledModule,
    param: str | Sequence[str],
    axis: int,
    parts: int | Sequence[int] = 1,
    tied: bool = False,
    pad: bool = False,
) -> None:
    """Cuts a parameter or buffer of this module over the `tp` axis of the mesh; each rank keeps its piece.

    Counts follow on the side that is cut, and there only: `out_features` or `in_features` of a linear layer,
    `nf` or `nx` of GPT-2's Conv1D, `num_embeddings` or `embedding_dim`, and the heads of the attention module
    around it. A linear layer cut along its input gives partial sums, to which the bias is added once; an
    embedding cut along its vocabulary gives zeros for the tokens of other ranks: `sync` adds them up.

    Args:
        param: its name, or several names that are cut alike (`["weight", "bias"]`).
        axis: the dimension of the tensor to be cut.
        parts: how many tensors of equal size are fused along it, each cut by itself (3 for q, k, v in one
            weight), or their sizes.
        tied: cut it also wherever else it is held.
        pad: fill up what the ranks do not divide with zeros at the end (a vocabulary of 50257). An embedding
            never looks them up, and `parallel_loss` leaves them out; whole again, the tensor has none.

    Raises:
        ScheduleError: no `tp` axis; no such parameter; a size that the ranks do not divide; sharded already;
            tied to another parameter without `tied=True`; heads would be cut apart.
    """
    names = [param] if isinstance(param, str) else list(param)
    if len(set(names)) < len(names):
        raise ScheduleError(f"shard on '{sch.name}': names must differ, but got {names}")
    ranks = tensor_parallel(sch, "shard")
    cuts = [cut for name in names for cut in _cuts_of(sch, name, axis, parts, tied, pad, ranks)]
    follows = _distinct([follow for cut in cuts for follow in cut[3]])
    for module, attribute, divisor in follows:
        value = getattr(module, attribute)
        if value % divisor and not pad:
            raise ScheduleError(
                f"shard on '{sch.name}': {divisor} ranks must divide {type(module).__name__}.{attribute}, "
                f"but it is {value}"
            )
    _check_traced(sch, [module for module, _, _ in follows])
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module, name, cut, _, layer in cuts:
        tensor = parameters_of(module).get(name, buffers_of(module).get(name))
        if tensor not in made:
            made[tensor] = cut_tensor(tensor, cut)
        put(module, name, made[tensor])
        module.__dict__["_shards"] = {**shards_of(module), name: cut}
        if layer is not None and not layers_of(module, type(layer)):
            add_layer(module, layer)
    for module, attribute, divisor in follows:
        setattr(module, attribute, -(-getattr(module, attribute) // divisor))
        module.__dict__["_followed"] = {*module.__dict__.get("_followed", ()), attribute}


def tensor_parallel(sch: ScheduledModule, primitive: str) -> Axis:
    """The mesh's `tp` axis.

    Raises:
        ScheduleError: there is none.
    """
    found = axis_of(sch.mesh, "tp")
    if found is None:
        names = "no mesh" if sch.mesh is None else f"axes {', '.join(sch.mesh.mesh_dim_names)}"
        raise ScheduleError(
            f"{primitive} on '{sch.name}': the mesh must have an axis named tp, but there is {names}; "
            "pass create_schedule(model, mesh=init_device_mesh(..., mesh_dim_names=('tp',)))"
        )
    return found


def _cuts_of(
    sch: ScheduledModule, name: str, axis: int, parts: int | Sequence[int], tied: bool, pad: bool, ranks: Axis
) -> list[tuple[nn.Module, str, Shard, list[Follow], Layer | None]]:
    tensor = tensor_of(sch, name, "shard")
    label = f"shard of '{name}' on '{sch.name}'"
    if isinstance(sch.module, USED_WHOLE):
        kind = type(sch.module).__name__
        raise ScheduleError(
            f"{label}: {kind} hands its weights to a kernel that takes them whole, so that a piece cannot be computed "
            "with; replace it by a module of linear layers, and shard these"
        )
    if name in shards_of(sch.module):
        cut = shards_of(sch.module)[name]
        raise ScheduleError(f"{label}: a tensor is sharded once, but it is already along dimension {cut.dim}")
    if not -tensor.dim() <= axis < tensor.dim():
        raise ScheduleError(f"{label}: axis must be a dimension of its shape {tuple(tensor.shape)}, but got {axis}")
    dim = axis % tensor.dim()
    size = tensor.shape[dim]
    sizes = _sizes(label, parts, size)
    for each in sizes:
        if each % ranks.size and not pad:
            what = f"size {size} of dimension {dim}" if len(sizes) == 1 else f"part of size {each}"
            raise ScheduleError(f"{label}: {ranks.size} ranks must divide the {what}, but do not")
    places = holders(sch.tree.module, tensor)
    if len(places) > 1 and not tied:
        others = ", ".join(f"{path}.{held}" for path, _, held in places if path != sch.path)
        raise ScheduleError(
            f"{label}: of tied weights all must be sharded, and it is tied to {others}; pass tied=True to "
            "shard them together"
        )
    cut = Shard(dim, sizes, tuple(tensor.shape), ranks, checksum(tensor))
    out = []
    for path, module, held in places:
        kind = kind_of(module, held, dim)
        follow = list(kind.follow(module, ranks.size))
        if kind.side:
            follow += _heads(sch, label, path, sizes, ranks, kind.side)
        layer = kind.layer(ranks, cut) if kind.layer is not None else None
        out.append((module, held, cut, follow, layer))
    return out


def _sizes(label: str, parts: int | Sequence[int], size: int) -> tuple[int, ...]:
    if isinstance(parts, int):
        if parts < 1 or size % parts:
            raise ScheduleError(f"{label}: the number of parts must divide the size {size}, but got parts={parts}")
        return (size // parts,) * parts
    if sum(parts) != size:
        raise ScheduleError(f"{label}: the parts must add up to the size {size}, but got {tuple(parts)}")
    return tuple(parts)


def _heads(sch: ScheduledModule, label: str, path: str, sizes: tuple[int, ...], ranks: Axis, side: str) -> list[Follow]:
    """What the attention module around a projection counts, and that no head is cut apart."""
    around = path.rpartition(".")[0]
    parent = sch.tree.module.get_submodule(around)
    if getattr(parent, "base_layer", None) is not None:  # an adapted projection (peft) stands in between
        around = around.rpartition(".")[0]
        parent = sch.tree.module.get_submodule(around)
    width = next((getattr(parent, name) for name in WIDTHS if hasattr(parent, name)), None)
    if path == "" or not isinstance(width, int):
        return []
    done = parent.__dict__.get("_followed", ())
    counts = {
        getattr(parent, name) * (ranks.size if name in done else 1)
        for name in COUNTS_OF_HEADS
        if isinstance(getattr(parent, name, None), int)
    }
    for size in sizes:
        # A tensor may have a number for each head, as T5's bias of relative positions has.
        heads = size if size in counts else size // width if size % width == 0 else 0
        if heads % ranks.size:
            raise ScheduleError(f"{label}: {ranks.size} ranks must divide the {heads} heads of '{around}'")
    if side != "output":
        return []
    return [
        (parent, name, ranks.size)
        for name in HEADS
        if name not in done and isinstance(getattr(parent, name, None), int)
    ]


def _check_traced(sch: ScheduledModule, modules: list[nn.Module]) -> None:
    """Refuses to change counts that a graph has taken in as constants."""
    parts = sch.path.split(".") if sch.path else []
    for depth in range(len(parts) + 1):
        path = ".".join(parts[:depth])
        traced = sch.tree.module.get_submodule(path)
        for layer in layers_of(traced, Traced):
            _check_inlined(sch, path, traced, layer, modules)


def _check_inlined(sch: ScheduledModule, path: str, traced: nn.Module, layer: Traced, modules: list[nn.Module]) -> None:
    kept = {traced.get_submodule(node.target) for node in layer.graph.nodes if node.op == "call_module"}
    inlined = {traced}
    if layer.flatten:
        inlined = set(traced.modules()) - {each for child in kept for each in child.modules()}
    for module in modules:
        if module in inlined:
            raise ScheduleError(
                f"shard on '{sch.name}': counts of {type(module).__name__} are constants in the graph of "
                f"'{path or type(traced).__name__}'; shard before tracing"
            )


def _distinct(follows: list[Follow]) -> list[Follow]:
    out: list[Follow] = []
    for each in follows:
        if not any(each[0] is other[0] and each[1] == other[1] for other in out):
            out.append(each)
    return out
