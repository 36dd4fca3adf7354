"""Ranks that a launcher has started, torchrun or whatever sets the variables that it sets; how rank 0 tells the others what it
decided.

What rank 0 decides may take dry runs on the devices of this host. Until it has decided no rank touches them: the others wait
at the launcher's store.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import RedlineError, RunnerError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

PATIENCE = timedelta(days=7)
"""How long ranks wait for rank 0 to decide: a search takes as long as it takes, and a launcher ends all ranks of a dead one."""
_KEY = "redline"
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among those that a launcher has started."""

    rank: int
    """Among all."""
    local_rank: int
    """On this host."""
    size: int
    """Ranks."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> "Place | None":
        """What the launcher says; None where there is none."""
        if not all(environment.get(name, "").isdigit() for name in _NAMES):
            return None
        rank, local_rank, size = (int(environment[name]) for name in _NAMES)
        return Place(rank=rank, local_rank=local_rank, size=size)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """This process among the ranks, which have met."""

    place: Place
    """Which it is."""
    device: "torch.device"
    """Where it trains."""
    group: "ProcessGroup | None"
    """Of all ranks, of the gloo backend; None for one rank."""


def place() -> Place:
    """Which rank this process is; the only one where no launcher started it."""
    import torch.distributed as dist

    found = Place.of(os.environ) or Place(rank=0, local_rank=0, size=1)
    if not dist.is_initialized():
        return found
    local_rank = found.local_rank if found.size > 1 else dist.get_rank()
    return Place(rank=dist.get_rank(), local_rank=local_rank, size=dist.get_world_size())


def decided(here: Place, decide: Callable[[], Any]) -> tuple[Any, Joined]:
    """What rank 0 decides, on every rank, once all have met.

    Raises:
        RedlineError: on every rank, what rank 0 refused.
    """
    import torch.distributed as dist

    if here.size == 1 and not dist.is_initialized():
        return decide(), Joined(place=here, device=_device(here), group=None)
    if dist.is_initialized():  # the loop's own doing
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        box = [_tried(decide) if here.rank == 0 else b""]
        dist.broadcast_object_list(box, src=0, group=group)
        return _read(box[0]), Joined(place=here, device=_device(here), group=group)
    found = _at_the_store(here, decide)
    return found, Joined(place=here, device=_device(here), group=dist.new_group(backend="gloo"))


def _at_the_store(here: Place, decide: Callable[[], Any]) -> Any:
    import torch
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", here.rank, here.size))
    if rank == 0:
        store.set(_KEY, _tried(decide))
    else:
        store.wait([_KEY], PATIENCE)
    found = _read(store.get(_KEY))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(here.local_rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.PrefixStore("redline", store), rank=rank, world_size=size
    )
    return found


def _tried(decide: Callable[[], Any]) -> bytes:
    """What was decided, or why not, as bytes."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(decide()))
    except RedlineError as error:
        return bytes(cloudpickle.dumps(error))


def _read(found: bytes) -> Any:
    import cloudpickle

    what = cloudpickle.loads(found)
    if isinstance(what, RedlineError):
        raise what
    if what is None:
        raise RunnerError("rank 0 decided on nothing")
    return what


def _device(here: Place) -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(here.local_rank)
    return torch.device("cuda", here.local_rank)
