"""Replicas of a model that average their gradients, bucket by bucket while the backward pass still runs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from .collectives import Axis
from .sharding import owner, whole

BUCKET_BYTES = 25 * 1024 * 1024
"""What is exchanged at once, at most, but for larger parameters: as DistributedDataParallel has it."""


class Replicas:
    """Averages the gradients of replicas; `model.replicas` of a model built with `shard_data` at ZeRO 0 or 1.

    Parameters are put into buckets in the reverse of their order, which is about the order in which their
    gradients are finished. When the last backward pass of a step has added to a gradient, this rank's part of
    the mean becomes a view of its bucket, which is reduced once all of it is there, while that pass goes on.
    Buckets are reduced in order, so that all ranks do so alike. Between steps they take no memory.

    With `owned`, at ZeRO 1, every parameter has an owner among the ranks, who alone gets the averaged gradient,
    updates it and sends it to the others: as many bytes on the wire as reducing gradients takes.

    Args:
        params: those that this rank trains, in an order that all ranks share.
        axis: the replicas.
        owned: whether parameters have owners; or those that have.
        late: of these gradients are not complete when the backward pass has been there: they are reduced by
            `finish`.
        reduce_dtype: gradients travel in it, and are kept in their own; None for their own.
        apart: parameters that other ranks hold alike, and these: fewer where experts are spread over the others, whose
            gradients are in theirs already; more where ranks share samples, whose gradients add up. Divided by the number
            of replicas, either sum is the mean over all samples.

    Source: Li et al., PyTorch Distributed (2020), section 3.2, on buckets; Rajbhandari et al., ZeRO (2020).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        axis: Axis,
        owned: bool | Collection[nn.Parameter] = False,
        late: Iterable[nn.Parameter] = (),
        reduce_dtype: torch.dtype | None = None,
        apart: Mapping[nn.Parameter, Axis] | None = None,
    ) -> None:
        self.axis = axis
        self.passes = 1
        """Backward passes of a step, of which the last one's gradients are reduced; set before the first."""
        self.by_itself = True
        """Whether the end of the last pass is the end of reducing. Otherwise `finish` is to be called."""
        self._reduce_dtype = reduce_dtype
        params = [each for each in params if each.requires_grad]
        late = set(late)
        axes = {each: (apart or {}).get(each, axis) for each in params}
        owners: dict[nn.Parameter, int] = {}
        having = set(params if owned is True else owned or ())
        for along in dict.fromkeys(axes.values()):
            owners |= _owners([each for each in params if each in having and axes[each] == along], along.size)
        self.owned = [each for each in params if owners.get(each, axes[each].rank) == axes[each].rank]
        """The parameters that this rank updates: all of them where they have no owners."""
        early = [each for each in reversed(params) if each not in late]
        behind = [each for each in reversed(params) if each in late]
        self.buckets = [*_buckets(early, owners, axes), *_buckets(behind, owners, axes)]
        self._done = 0
        """Buckets under way, or reduced, in this step."""
        self._passed = 0
        """Backward passes of this step that have ended."""
        self._queued = False
        self._of: dict[nn.Parameter, _Bucket] = {}
        for bucket in self.buckets:
            if bucket.owner is not None:
                bucket.flatten()
            for param in bucket.places:
                self._of[param] = bucket
                if param not in late:
                    param.register_post_accumulate_grad_hook(self._arrived)

    def finish(self) -> None:
        """Reduces what is not under way yet and waits for all; the step's averaged gradients are in place."""
        for bucket in self.buckets[self._done :]:
            bucket.reduce(self.axis.size, self._reduce_dtype)
        for bucket in self.buckets:
            bucket.wait()
            bucket.arrived.clear()
        self._done = self._passed = 0

    def optimizer(
        self,
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        others: Sequence[nn.Parameter] = (),
    ) -> torch.optim.Optimizer:
        """The optimizer that `make` returns for the parameters that this rank owns, and for others that are not averaged
        here; after each of its steps all ranks have all parameters."""
        # A rank that owns nothing has an optimizer too, since all take part in what follows a step.
        device = next(iter(self._of)).device
        made = make([*self.owned, *others] or [nn.Parameter(torch.zeros(0, device=device))])
        made.register_step_post_hook(lambda *_: self.share())
        return made

    def share(self) -> None:
        """Sends every parameter from its owner to the others."""
        works = [
            dist.broadcast(bucket.flat, group=bucket.axis.group, group_src=bucket.owner, async_op=True)
            for bucket in self.buckets
            if bucket.flat is not None and bucket.axis.size > 1
        ]
        for work in works:
            work.wait()

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """A parameter's gradient, on every rank; all call it, since with owners it is sent to the others."""
        if not self.has_owner(param):
            return param.grad
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        bucket = self._of[param]
        if bucket.axis.size > 1:
            dist.broadcast(grad, group=bucket.axis.group, group_src=bucket.owner)
        return grad

    def has_owner(self, param: nn.Parameter) -> bool:
        """True if a step leaves the parameter's gradient with its owner alone."""
        return param in self._of and self._of[param].owner is not None

    def holders(self, param: nn.Parameter) -> int:
        """How many ranks hold the parameter alike; 1 for one that is not averaged here."""
        return self._of[param].axis.size if param in self._of else 1

    def _arrived(self, param: nn.Parameter) -> None:
        """A backward pass has added to a parameter's gradient."""
        if self.by_itself and not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._pass_ended)
        bucket = self._of[param]
        bucket.arrived[param] = bucket.arrived.get(param, 0) + 1
        if bucket.arrived[param] >= self.passes:
            bucket.take(param, self.axis.size)
        while self._done < len(self.buckets) and self.buckets[self._done].complete(self.passes):
            self.buckets[self._done].reduce(self.axis.size, self._reduce_dtype)
            self._done += 1

    def _pass_ended(self) -> None:
        self._queued = False
        self._passed += 1
        if self._passed >= self.passes:
            self.finish()


def whole_gradient(model: nn.Module, name: str, param: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient as one process has it, on every rank that has the parameter; all of these call it.
    Zeros where it has none."""
    replicas = model.__dict__.get("replicas")
    grad = param.grad if replicas is None else replicas.gradient(param)
    return whole(*owner(model, name), torch.zeros_like(param) if grad is None else grad.detach())


@dataclass(eq=False)
class _Bucket:
    """Parameters of one format, and one owner, whose gradients travel together."""

    axis: Axis
    """The ranks that hold them alike."""
    owner: int | None
    """Rank along the axis; None where all ranks update them."""
    places: dict[nn.Parameter, slice] = field(default_factory=dict)
    """The parameters, and where each of them, or its gradient, lies in the flat tensor."""
    size: int = 0
    """Elements of all."""
    arrived: dict[nn.Parameter, int] = field(default_factory=dict)
    """How many backward passes of this step have added to the gradient of each."""
    flat: torch.Tensor | None = None
    """The parameters themselves, where they have an owner: they are views of it."""
    _gradients: torch.Tensor | None = None
    """One after the other, and behind them, for each parameter, how many replicas have a gradient of it."""
    _wire: torch.Tensor | None = None
    """What is under way, where that is in another format."""
    _work: Any = None

    def add(self, param: nn.Parameter) -> None:
        """Puts a parameter behind the others."""
        self.places[param] = slice(self.size, self.size + param.numel())
        self.size += param.numel()

    def complete(self, passes: int) -> bool:
        """Whether all passes have added to all of its gradients."""
        return all(self.arrived.get(param, 0) >= passes for param in self.places)

    def flatten(self) -> None:
        """Makes the parameters views of one tensor."""
        flat = self.flat = torch.cat([each.detach().reshape(-1) for each in self.places])
        for param, place in self.places.items():
            param.data = flat[place].view(param.shape)

    @torch.no_grad()
    def take(self, param: nn.Parameter, ranks: int) -> None:
        """Moves a gradient, as this rank's part of the mean, to its place, which it is a view of from then on."""
        if self._gradients is None:
            self._gradients = param.new_empty(self.size + len(self.places))
            self._used.fill_(1)
        piece = self._gradients[self.places[param]].view(param.shape)
        if param.grad is None:
            piece.zero_()  # other replicas may have one
        elif param.grad.data_ptr() != piece.data_ptr():
            torch.div(param.grad, ranks, out=piece)
            param.grad = piece

    def reduce(self, ranks: int, dtype: torch.dtype | None) -> None:
        """Starts to sum the parts of a mean over so many replicas, at the owner if there is one."""
        for number, param in enumerate(self.places):
            self.take(param, ranks)
            if param.grad is None:
                self._used[number] = 0
        total, axis = self._sums, self.axis
        if axis.size == 1:
            return
        if dtype is not None and dtype != total.dtype:
            total = self._wire = total.to(dtype)
        if self.owner is None:
            self._work = dist.all_reduce(total, group=axis.group, async_op=True)
        else:
            self._work = dist.reduce(total, group=axis.group, group_dst=self.owner, async_op=True)

    @torch.no_grad()
    def wait(self) -> None:
        """Waits for the mean. Who does not update the parameters has no gradients then."""
        if self._work is not None:
            self._work.wait()
        if self.owner not in (None, self.axis.rank):
            for param in self.places:
                param.grad = None
        else:
            if self._wire is not None:
                self._sums.copy_(self._wire)
            for number, (param, place) in enumerate(self.places.items()):
                # What no replica used has no gradient, and an optimizer leaves it alone.
                if param.grad is None and self._used[number] > 0:
                    param.grad = self._sums[place].view(param.shape)
        self._gradients = self._wire = self._work = None

    @property
    def _used(self) -> torch.Tensor:
        """For each parameter whether there is a gradient, then by how many replicas; it travels with them."""
        return self._sums[self.size :]

    @property
    def _sums(self) -> torch.Tensor:
        assert self._gradients is not None, "there is none before the first gradient"
        return self._gradients


def _owners(params: Sequence[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """For each parameter the rank that updates it: the largest first, each to whom has the least so far."""
    loads = [0] * ranks
    owners = {}
    for param in sorted(params, key=lambda each: -each.numel()):
        owners[param] = loads.index(min(loads))
        loads[owners[param]] += param.numel()
    return owners


def _buckets(
    params: Sequence[nn.Parameter], owners: dict[nn.Parameter, int], axes: dict[nn.Parameter, Axis]
) -> list[_Bucket]:
    """Buckets of parameters in this order, in the order in which they are full; each of one axis, owner and format."""
    full: list[_Bucket] = []
    open_: dict[Any, _Bucket] = {}
    for param in params:
        key = param.dtype, param.device, axes[param], owners.get(param)
        bucket = open_.setdefault(key, _Bucket(axes[param], owners.get(param)))
        bucket.add(param)
        if bucket.size * param.element_size() >= BUCKET_BYTES:
            full.append(open_.pop(key))
    return [*full, *open_.values()]
