"""Parameters that begin as all zeros or all ones, moved away from that for a while.

While a bias is zero it can be added twice, and while an adapter's outer half is, the inner one can be left
out: nothing shows in what the model computes.
"""

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .training import Training

STIR = 2.0**-5
"""By how much constant parameters are moved: a number that every format has, about 0 and about 1."""


@contextlib.contextmanager
def stirred(training: "Training") -> Iterator[None]:
    """Such parameters hold a pattern around their value, the same in every configuration; all ranks enter."""
    import torch

    from ..schedule.parallel.sharding import local

    names = training.outline.names
    held = [(names[name], name, param) for name, param in training.model.named_parameters() if name in names]
    changed = []
    with torch.no_grad():
        constant = _constants(training, {key: local(param) for key, _, param in held})
        for key, name, param in held:
            if key in constant:
                pattern = _pattern(training, key, name, param)
                local(param).copy_(constant[key] + STIR * pattern)
                changed.append((param, constant[key]))
    try:
        yield
    finally:
        with torch.no_grad():
            for param, value in changed:
                local(param).fill_(value)


def _constants(training: "Training", held: "Mapping[str, torch.Tensor]") -> dict[str, float]:
    """The parameters, by name, that are 0 everywhere, or 1: on every rank that holds a piece."""
    import torch

    names, values = sorted(set(training.outline.names.values())), (0.0, 1.0)
    flags = torch.ones(len(names), len(values))
    for at, name in enumerate(names):
        if name in held and held[name].numel():
            ends = [float(each) for each in held[name].detach().aminmax()]
            flags[at] = torch.tensor([ends == [value, value] for value in values])
    if training.world.size > 1:
        import torch.distributed as dist

        flags = flags.to(training.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return {
        name: value
        for name, row in zip(names, flags.tolist())
        for value, whole in zip(values, row)
        if whole and name in held
    }


def _pattern(training: "Training", key: str, name: str, param: "torch.Tensor") -> "torch.Tensor":
    """This rank's piece of random signs of the whole parameter's shape, the same in every configuration."""
    import torch

    from ..schedule.parallel.sharding import is_dtensor, owner, piece_of, shards_of

    holder, leaf = owner(training.model, name)
    shard = shards_of(holder).get(leaf)
    shape = param.shape if shard is None else shard.shape
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    signs = 2.0 * torch.randint(2, tuple(shape), generator=generator) - 1
    if shard is not None:
        signs = shard.cut(signs)
    if is_dtensor(param):
        # FSDP cuts as torch.chunk does; ranks beyond the last piece have none.
        dim, ranks, rank = piece_of(param)
        pieces = signs.chunk(ranks, dim)
        signs = pieces[rank] if rank < len(pieces) else signs[:0]
    return signs.to(training.device)
