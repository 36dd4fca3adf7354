"""Ranks that a launcher has started, torchrun or whatever sets the variables that it sets; how rank 0 tells the others what it
decided.

What rank 0 decides may take dry runs on the devices of this host. Until it has decided no rank touches them: the others wait
at the launcher's store.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..base.errors import RedlineError, RunnerError
from ..training.checkpoint.saver import patient_group

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

PATIENCE = timedelta(days=7)
"""How long ranks wait for rank 0 to decide: a search takes as long as it takes, and a launcher ends all ranks of a dead one."""
START_S = 1800.0
"""How long ranks wait for one that has not begun, s, as torch's stores do by default."""
_KEY = "redline"
_LOOK_S = 0.05
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
    return found, Joined(place=here, device=_device(here), group=patient_group())


def _at_the_store(here: Place, decide: Callable[[], Any]) -> Any:
    import torch
    import torch.distributed as dist

    found_store, rank, size = next(dist.rendezvous("env://", here.rank, here.size))
    store = own_part(found_store, rank, size)
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


def own_part(store: "Store", rank: int, size: int) -> "Store":
    """The part of a launcher's store that belongs to this start of the ranks alone.

    torchrun's store outlives the ranks that it starts again, with what they wrote, and their number of restarts is not the
    same on every host (https://github.com/pytorch/pytorch/issues/135712). So each process writes a name of its own; rank 0
    says which names it sees, until all those have answered to the same list.

    Raises:
        RunnerError: one of the ranks does not come.
    """
    from torch.distributed import PrefixStore

    own, until = uuid.uuid4().hex, time.monotonic() + START_S
    store.set(f"{_KEY}/here/{rank}", own)
    said, members = "", [""] * size
    while time.monotonic() < until:
        if rank == 0:
            members = [_said(store, f"here/{each}") for each in range(size)]
            if ",".join(members) != said:
                said = ",".join(members)
                store.set(f"{_KEY}/members", said)
            if all(_said(store, f"answer/{each}") == said for each in members[1:] if each) and all(members):
                store.set(f"{_KEY}/all/{own}", said)
                return PrefixStore(f"{_KEY}/{own}", store)
        else:
            said = _said(store, "members")
            members = said.split(",")
            if members[rank : rank + 1] == [own]:
                store.set(f"{_KEY}/answer/{own}", said)
                if _said(store, f"all/{members[0]}") == said:
                    return PrefixStore(f"{_KEY}/{members[0]}", store)
        time.sleep(_LOOK_S)
    missing = [str(each) for each, name in enumerate(members) if not name]
    raise RunnerError(
        f"rank {rank} waits for the others since {START_S:.0f} s; not there: {', '.join(missing) or 'unknown'}"
    )


def _said(store: "Store", key: str) -> str:
    """What was written; empty where nothing was."""
    return str(store.get(f"{_KEY}/{key}").decode()) if store.check([f"{_KEY}/{key}"]) else ""


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
