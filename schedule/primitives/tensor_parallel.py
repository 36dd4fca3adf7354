"""Primitives of tensor parallelism: weights cut over the `tp` axis, their communication, random streams."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base._torch import buffers_of, parameters_of
from ...base.errors import ScheduleError, unknown
from .. import collectives as differentiable
from ..forward import Layer, add_layer, layers_of
from ..graph.called import check_called, used_modules
from ..graph.trace import Traced
from ..parallel import collectives
from ..parallel.collectives import Axis, axis_of, through
from ..parallel.exchange import Follow, InputSync, OutputSync, ParameterSync, Sync, kind_of, side_of, syncs_of
from ..parallel.sharding import Shard, checksum, cut_tensor, holders, shards_of
from ..parallel.sharing import Sharing
from ..parallel.vocabulary import SplitLogits
from ..random_state import ForkedRandom
from ..tree import ScheduledModule, is_within, primitive, replace_tensor, with_ancestors
from .fused_loss import FusedLogits
from .modules import tensor_of

USED_WHOLE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear)
"""Modules of torch whose kernels take all of their weights at once, unsharded."""
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
"""Attributes of attention modules that count heads or features of all heads; the ranks divide them."""
COUNTS_OF_HEADS = HEADS[:5]
"""The attributes in HEADS that count heads; the others count features."""
WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim")
"""Attributes of attention modules with the number of features of one head."""


@primitive
def shard(
    sch: ScheduledModule,
    param: str | Sequence[str],
    axis: int,
    parts: int | Sequence[int] = 1,
    tied: bool = False,
    pad: bool = False,
    gathered: bool = False,
) -> None:
    """Cuts a parameter or buffer of this module over the `tp` axis of the mesh; each rank keeps its shard.

    Counts change on the cut side only: `out_features` or `in_features` of a linear layer, `nf` or `nx` of GPT-2's
    Conv1D, `num_embeddings` or `embedding_dim`, and the heads of the attention module around it. A linear layer cut
    along its input returns partial sums, to which the bias is added once; an embedding cut along its vocabulary returns
    zeros for the tokens of other ranks. `sync` adds them up.

    Args:
        param: the tensor's name, or several names that are cut in the same way (`["weight", "bias"]`).
        axis: dimension of the tensor to be cut.
        parts: number of tensors of equal size that are fused along the dimension, each cut separately (3 for q, k, v in
            one weight), or their sizes.
        tied: also cut the tensor in the other modules that have it.
        pad: if the ranks do not divide a size (a vocabulary of 50257), pad it with zeros at the end. An embedding never
            looks them up, `parallel_loss` leaves them out, and the gathered tensor is without them.
        gathered: a later `sync` gathers this module's output, so that the attention module around it has all heads: a
            head may be cut, and the counts do not change.

    Raises:
        ScheduleError: no `tp` axis; unknown parameter; a size that the ranks do not divide; sharded already; tied to
            another parameter without `tied=True`; or a head would be cut.
    """
    names = [param] if isinstance(param, str) else list(param)
    if len(set(names)) < len(names):
        raise ScheduleError(f"shard on '{sch.name}': names must differ, but got {names}")
    ranks = tensor_parallel(sch, "shard")
    cuts = [cut for name in names for cut in _cuts_of(sch, name, axis, parts, tied, pad, gathered, ranks)]
    follows = list(dict.fromkeys(follow for cut in cuts for follow in cut.follows))
    for module, attribute, divisor in follows:
        value = getattr(module, attribute)
        if value % divisor and not pad:
            raise ScheduleError(
                f"shard on '{sch.name}': {divisor} ranks must divide {type(module).__name__}.{attribute}, "
                f"but it is {value}"
            )
    # The last check: from here tensors and modules change.
    _check_traced(sch, [module for module, _, _ in follows])
    shards: dict[torch.Tensor, torch.Tensor] = {}
    for module, name, shard_of_rank, _, layer in cuts:
        tensor = parameters_of(module).get(name, buffers_of(module).get(name))
        if tensor not in shards:  # a tied tensor is cut once and stays tied
            shards[tensor] = cut_tensor(tensor, shard_of_rank)
        replace_tensor(module, name, shards[tensor])
        module.__dict__["_shards"] = {**shards_of(module), name: shard_of_rank}
        if layer is not None and not layers_of(module, type(layer)):
            add_layer(module, layer)
    for module, attribute, divisor in follows:
        setattr(module, attribute, -(-getattr(module, attribute) // divisor))
        module.__dict__["_followed"] = {*module.__dict__.get("_followed", ()), attribute}


def sharing_around(sch: ScheduledModule) -> Sharing | None:
    """Returns how ranks share the samples of a module, by its own `share_samples` or one above it; None without one."""
    return next((sharing for path, sharing in sch.tree.shared.items() if is_within(sch.path, path)), None)


def tensor_parallel(sch: ScheduledModule, primitive: str) -> Axis:
    """Returns the ranks that shard this module's layers: the mesh's `tp` axis, or within `share_samples` a part of it.

    Raises:
        ScheduleError: the mesh has no `tp` axis, or `share_samples` has `tp=1`.
    """
    if (sharing := sharing_around(sch)) is not None:
        if sharing.tp is None:
            raise ScheduleError(f"{primitive} on '{sch.name}': its ranks share samples, one by one, and no layers")
        return sharing.tp
    axis = axis_of(sch.mesh, "tp")
    if axis is None:
        mesh_axes = "no mesh" if sch.mesh is None else f"axes {', '.join(sch.mesh.mesh_dim_names)}"
        raise ScheduleError(
            f"{primitive} on '{sch.name}': the mesh must have an axis named tp, but there is {mesh_axes}; "
            "pass create_schedule(model, mesh=init_device_mesh(..., mesh_dim_names=('tp',)))"
        )
    return axis


class _Cut(NamedTuple):
    """A tensor to be cut at one of its places."""

    module: nn.Module
    name: str
    shard: Shard
    follows: list[Follow]
    """Counts that change."""
    layer: Layer | None
    """Layer that computes with the shard."""


def _cuts_of(
    sch: ScheduledModule,
    name: str,
    axis: int,
    parts: int | Sequence[int],
    tied: bool,
    pad: bool,
    gathered: bool,
    ranks: Axis,
) -> list[_Cut]:
    """Returns the cuts of a tensor at each of its places, after checking them; nothing is changed yet."""
    tensor = tensor_of(sch, name, "shard")
    label = f"shard of '{name}' on '{sch.name}'"
    if isinstance(sch.module, USED_WHOLE):
        raise ScheduleError(
            f"{label}: {type(sch.module).__name__} passes its weights to a kernel that needs all of them, so a shard "
            "is not enough; replace it by a module of linear layers, and shard these"
        )
    if name in shards_of(sch.module):
        earlier = shards_of(sch.module)[name]
        raise ScheduleError(f"{label}: the tensor is sharded already, along dimension {earlier.dim}")
    if not -tensor.dim() <= axis < tensor.dim():
        raise ScheduleError(f"{label}: axis must be a dimension of its shape {tuple(tensor.shape)}, but got {axis}")
    dim = axis % tensor.dim()
    size = tensor.shape[dim]
    sizes = _sizes(label, parts, size)
    for part_size in sizes:
        if part_size % ranks.size and not pad:
            subject = f"size {size} of dimension {dim}" if len(sizes) == 1 else f"part of size {part_size}"
            raise ScheduleError(f"{label}: {ranks.size} ranks must divide the {subject}, but do not")
    occurrences = holders(sch.tree.module, tensor)
    if len(occurrences) > 1 and not tied:
        other_names = ", ".join(f"{path}.{name_there}" for path, _, name_there in occurrences if path != sch.path)
        raise ScheduleError(
            f"{label}: of tied weights all must be sharded, and it is tied to {other_names}; pass tied=True to "
            "shard them together"
        )
    shard = Shard(dim, sizes, tuple(tensor.shape), ranks, checksum(tensor))
    cuts = []
    for path, module, name_there in occurrences:
        kind = kind_of(module, name_there, dim)
        follows = kind.follow(module, ranks.size)
        if kind.side and not gathered:
            follows += _heads(sch, label, path, sizes, ranks, kind.side)
        layer = kind.layer(ranks, shard) if kind.layer is not None else None
        cuts.append(_Cut(module, name_there, shard, follows, layer))
    return cuts


def _sizes(label: str, parts: int | Sequence[int], size: int) -> tuple[int, ...]:
    if isinstance(parts, int):
        if parts < 1 or size % parts:
            raise ScheduleError(f"{label}: the number of parts must divide the size {size}, but got parts={parts}")
        return (size // parts,) * parts
    if sum(parts) != size:
        raise ScheduleError(f"{label}: the parts must add up to the size {size}, but got {tuple(parts)}")
    return tuple(parts)


def _heads(sch: ScheduledModule, label: str, path: str, sizes: tuple[int, ...], ranks: Axis, side: str) -> list[Follow]:
    """Returns the counts of the attention module around a projection that change.

    Raises:
        ScheduleError: a head would be cut.
    """
    parent_path = path.rpartition(".")[0]
    parent = sch.tree.module.get_submodule(parent_path)
    if getattr(parent, "base_layer", None) is not None:  # an adapted projection (peft) is in between
        parent_path = parent_path.rpartition(".")[0]
        parent = sch.tree.module.get_submodule(parent_path)
    width = next((getattr(parent, name) for name in WIDTHS if hasattr(parent, name)), None)
    if path == "" or not isinstance(width, int):
        return []
    divided_counts = parent.__dict__.get("_followed", ())
    counts_of_heads = {
        getattr(parent, name) * (ranks.size if name in divided_counts else 1)
        for name in COUNTS_OF_HEADS
        if isinstance(getattr(parent, name, None), int)
    }
    for size in sizes:
        # A tensor may have a number for each head, like T5's bias of relative positions.
        heads = size if size in counts_of_heads else size // width if size % width == 0 else 0
        if heads % ranks.size:
            raise ScheduleError(f"{label}: {ranks.size} ranks must divide the {heads} heads of '{parent_path}'")
    if side != "output":
        return []
    return [
        (parent, name, ranks.size)
        for name in HEADS
        if name not in divided_counts and isinstance(getattr(parent, name, None), int)
    ]


def _check_traced(sch: ScheduledModule, modules: list[nn.Module]) -> None:
    """Raises ScheduleError if counts of modules are constants in a traced graph, which could not change."""
    for path in with_ancestors(sch.path):
        traced = sch.tree.module.get_submodule(path)
        for layer in layers_of(traced, Traced):
            called_modules = {
                traced.get_submodule(node.target) for node in layer.graph.nodes if node.op == "call_module"
            }
            inlined = {traced}
            if layer.flatten:
                inlined = set(traced.modules()) - {
                    submodule for child in called_modules for submodule in child.modules()
                }
            for module in modules:
                if module in inlined:
                    raise ScheduleError(
                        f"shard on '{sch.name}': counts of {type(module).__name__} are constants in the graph of "
                        f"'{path or type(traced).__name__}'; shard before tracing"
                    )


MODES = ("fwd_pre", "fwd_post", "bwd_pre", "bwd_post")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter", "all_to_all")
GRADIENTS = ("scatter", "reduce_scatter")
SUMS = ("all_reduce", "reduce_scatter")
PARTIAL = ("input", "vocabulary")
"""Sides of a cut that make the output a partial sum."""
ON = ("activations", "parameters")


@primitive
def sync(
    sch: ScheduledModule,
    mode: str,
    op: str | Callable[[torch.Tensor], torch.Tensor],
    axis: int | None = None,
    on: str = "activations",
    join: int | None = None,
    gradient: str | None = None,
) -> None:
    """Exchanges values or gradients between the ranks of the `tp` axis around this module.

     mode | acts on | gradient |
    ---|---|---|
     `fwd_pre` | the input, before the forward | the matching collective on the input's gradient |
     `fwd_post` | the output, after the forward | the matching collective on the output's gradient |
     `bwd_pre` | the gradient of the output, before the backward | |
     `bwd_post` | the gradient of the inputs, after the backward | |

    The gradient of `all_reduce` passes unchanged, that of `reduce_scatter` and `scatter` is gathered, that of
    `all_gather` is scattered after the forward and reduce-scattered before it, where ranks continue with different
    computations; that of `all_to_all` takes the inverse path. The input is the first floating-point argument; an
    output may be a tuple or a mapping, of which the first floating-point tensor is used.

    Args:
        mode: when, as above.
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all`, or a function of a tensor.
        axis: the dimension, for all but `all_reduce`; for `all_to_all` the one that is cut.
        on: `parameters` with `bwd_post` and `all_reduce` sums the gradients of this module's unsharded parameters
            instead: if activations are cut along the sequence, each rank has those of its tokens only.
        join: for `all_to_all`, the dimension along which the pieces of all ranks are concatenated.
        gradient: for `all_gather`, the collective on the gradient instead of the default above: `reduce_scatter` if ranks
            continue with different computations, `scatter` if with the same.

    Raises:
        ScheduleError: unknown mode or op; axis missing; or the sharded weights of this module contradict the exchange.
    """
    ranks = tensor_parallel(sch, "sync")
    check_called(sch, "sync")
    _check_sync(sch, mode, op, axis, on)
    _check_dims(sch, mode, op, join, gradient)
    module = sch.module
    exchange = Sync(mode=mode, op=op, axis=axis, on=on, join=join, gradient=gradient)
    # An exchange of gradients is inserted in the forward, as a function that changes only the gradient: that of the input
    # runs after the module's backward, that of the output before it.
    if on == "parameters":
        module.register_forward_pre_hook(ParameterSync(exchange, ranks))
    elif mode in ("fwd_pre", "bwd_post"):
        module.register_forward_pre_hook(InputSync(exchange, _exchange(exchange, ranks)), with_kwargs=True)
    else:
        module.register_forward_hook(OutputSync(exchange, _exchange(exchange, ranks)))


def check_synced(sch: ScheduledModule) -> None:
    """Checks that partial sums are added up, and that a bias is cut with its weight.

    Raises:
        ScheduleError: a module lacks that; the message names it.
    """
    root = sch.tree.module
    alive, _ = used_modules(root)
    for path, module in root.named_modules():
        if not shards_of(module):
            continue
        bias = parameters_of(module).get("bias")
        side = side_of(module)
        if side == "output" and bias is not None and "bias" not in shards_of(module):
            raise ScheduleError(
                f"build: the weight of '{path}' is cut along the output, so its bias must be too; "
                f"sch['{path}'].shard('bias', axis=0)"
            )
        if side not in PARTIAL:
            continue
        ancestors = map(root.get_submodule, with_ancestors(path))
        syncs = [sync for ancestor in ancestors if ancestor in alive for sync in syncs_of(ancestor)]
        if not any(sync.mode == "fwd_post" and (callable(sync.op) or sync.op in SUMS) for sync in syncs):
            raise ScheduleError(
                f"build: '{path}' returns partial sums on each rank, and nothing adds them up; "
                f"sch['{path}'].sync('fwd_post', 'all_reduce')"
            )


def _check_sync(sch: ScheduledModule, mode: str, op: Any, axis: int | None, on: str) -> None:
    label = f"sync on '{sch.name}'"
    if mode not in MODES:
        raise ScheduleError(f"{label}: {unknown('mode', mode, MODES)}")
    if not callable(op) and op not in OPS:
        raise ScheduleError(f"{label}: {unknown('op', op, OPS)}")
    if on not in ON:
        raise ScheduleError(f"{label}: {unknown('on', on, ON)}")
    if op in OPS[1:] and axis is None:
        raise ScheduleError(f"{label}: {op} needs the dimension to act along; pass axis=")
    if on == "parameters" and (mode, op) != ("bwd_post", "all_reduce"):
        raise ScheduleError(
            f"{label}: on='parameters' goes with 'bwd_post' and 'all_reduce', but got {mode!r} and {op!r}"
        )
    if callable(op) or on == "parameters":
        return
    module = sch.module
    side, is_sharded = side_of(module), any(shards_of(submodule) for submodule in module.modules())
    sums = op in SUMS
    if mode == "fwd_post" and sums and side == "output":
        raise ScheduleError(
            f"{label}: {op} adds up partial sums, but its weight is cut along the output, so each rank "
            "has other features; use all_gather, or cut along the input"
        )
    summed = any(sync.mode == "fwd_post" and (callable(sync.op) or sync.op in SUMS) for sync in syncs_of(module))
    if mode == "fwd_post" and op == "all_gather" and side in PARTIAL and not summed:
        raise ScheduleError(
            f"{label}: all_gather joins pieces, but its weight is cut such that each rank has a partial sum; "
            "use all_reduce or reduce_scatter"
        )
    if mode == "fwd_post" and op == "all_gather" and any(shard.padded for shard in shards_of(module).values()):
        raise ScheduleError(
            f"{label}: all_gather would leave the zeros with which its pieces are filled up among the features; "
            "use parallel_loss, or a size that the ranks divide"
        )
    if mode in ("fwd_post", "bwd_post") and sums and not is_sharded:
        raise ScheduleError(
            f"{label}: {op} adds up partial results of ranks, but nothing in the module is sharded, so "
            "every rank has the full result; shard first"
        )
    if mode == "bwd_post" and sums and side == "input":
        raise ScheduleError(
            f"{label}: its weight is cut along the input, so the gradient of the input is each rank's own "
            f"piece; {op} would mix them"
        )


def _check_dims(sch: ScheduledModule, mode: str, op: Any, join: int | None, gradient: str | None) -> None:
    label = f"sync on '{sch.name}'"
    if (op == "all_to_all") != (join is not None):
        raise ScheduleError(f"{label}: join= is needed with all_to_all, and is not allowed with another op")
    if gradient is None:
        return
    if gradient not in GRADIENTS:
        raise ScheduleError(f"{label}: {unknown('gradient', gradient, GRADIENTS)}")
    if op != "all_gather" or mode not in ("fwd_pre", "fwd_post"):
        raise ScheduleError(
            f"{label}: gradient goes with all_gather at 'fwd_pre' or 'fwd_post', but got {op!r} at {mode!r}"
        )


def _exchange(sync: Sync, ranks: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function of a value with its gradient, or of a gradient alone."""
    forward = sync.mode.startswith("fwd")
    if callable(sync.op):
        return sync.op if forward else partial(through, backward=sync.op)
    options: dict[str, Any] = {} if sync.op == "all_reduce" else {"dim": sync.axis}
    if sync.op == "all_to_all":
        options["join"] = sync.join
    if not forward:
        return partial(through, backward=partial(getattr(collectives, sync.op), axis=ranks, **options))
    if sync.op == "all_gather":
        options["gradient"] = sync.gradient or ("reduce_scatter" if sync.mode == "fwd_pre" else "scatter")
    return partial(getattr(differentiable, sync.op), axis=ranks, **options)


@primitive
def parallel_loss(sch: ScheduledModule) -> None:
    """Computes the cross-entropy of this module's logits without gathering them: they stay cut over the vocabulary.

    For a language-model head whose weight is cut along its output. The model's own loss code does not change:
    `torch.nn.functional.cross_entropy` of these logits exchanges a maximum and two sums per token instead of the
    logits.

    Raises:
        ScheduleError: no `tp` axis; or the module's weight is not cut along its output.
    """
    ranks = tensor_parallel(sch, "parallel_loss")
    if side_of(sch.module) != "output":
        raise ScheduleError(
            f"parallel_loss on '{sch.name}': its weight must be cut along the output (the vocabulary); shard it first"
        )
    check_called(sch, "parallel_loss")
    shard = shards_of(sch.module)["weight"]
    sch.module.register_forward_hook(_Split(ranks, shard.shape[shard.dim]))


class _Split:
    def __init__(self, axis: Any, vocabulary: int) -> None:
        self.axis = axis
        self.vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if isinstance(output, FusedLogits):
            return output.cut(self.axis, self.vocabulary)
        return SplitLogits.of(output, self.axis, self.vocabulary)


@primitive
def fork_rng(sch: ScheduledModule, differ: bool = True) -> None:
    """Makes the ranks of the `tp` axis draw different random numbers within this module, or the same ones.

    Dropout must differ between ranks on sharded activations, where the shards would otherwise share one mask. It must be
    equal on replicated activations, which would otherwise diverge. By default ranks with the same seed draw the same
    numbers. Call `fork_rng()` on a module that computes on shards (attention cut by heads), and `fork_rng(differ=False)`
    on a module inside it that computes on replicated activations.

    Each call draws one number from the shared stream, so that replicated dropout stays synchronised, and recomputation
    by `checkpoint` draws the same masks.

    Args:
        differ: draw different numbers on each rank.

    Raises:
        ScheduleError: no `tp` axis; or called on this module before.
    """
    ranks = tensor_parallel(sch, "fork_rng")
    if sch.deferred(_apply):
        raise ScheduleError(f"fork_rng on '{sch.name}': the module's random stream is set already")
    check_called(sch, "fork_rng")
    sch.defer("random", _apply, axis=ranks, differ=differ)


def _apply(sch: ScheduledModule, module: nn.Module, context: Any, axis: Axis, differ: bool) -> None:
    add_layer(module, ForkedRandom(axis, differ))
