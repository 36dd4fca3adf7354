"""Gradient averaging over the replicas of a model, by buckets, overlapped with the backward pass."""

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
"""The size at which a bucket is full, as in DistributedDataParallel."""
ALIGNMENT = 16
"""Bytes to which each parameter in a bucket is aligned: the widest load of matrix products and vectorised updates on GPUs."""


class Replicas:
    """Averages the gradients of replicas; `model.replicas` of a model built with `shard_data` at ZeRO 0 or 1.

    Parameters are assigned to buckets in reverse order, which is about the order in which their gradients are complete.
    After the last backward pass of a step has accumulated a gradient, it is divided by the number of replicas and becomes a
    view of its bucket. A complete bucket is reduced while that pass continues. All ranks reduce buckets in the same order.
    Between steps buckets take no additional memory.

    At ZeRO 1 each parameter in `owned` has an owner among the ranks. Only the owner gets the averaged gradient; it updates
    the parameter and broadcasts it. The communication volume is that of all-reducing gradients.

    Args:
        params: the parameters that this rank trains, in an order that all ranks share.
        axis: the replicas.
        owned: the parameters that have owners.
        late: parameters whose gradients are not complete after their accumulation in the backward pass; `finish` reduces
            them.
        reduce_dtype: the dtype in which gradients are reduced; None for the dtype of the gradients.
        axis_by_param: the axis of parameters that are replicated over other ranks than `axis`. It has fewer ranks for
            experts that are spread over ranks, whose gradients already include the samples of the other ranks, and more
            ranks if ranks share samples, whose gradients are summed. Either sum, divided by the number of replicas, is the
            mean over all samples.

    Source: Li et al., PyTorch Distributed (2020), section 3.2, on buckets; Rajbhandari et al., ZeRO (2020).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        axis: Axis,
        owned: Collection[nn.Parameter],
        late: Iterable[nn.Parameter],
        reduce_dtype: torch.dtype | None,
        axis_by_param: Mapping[nn.Parameter, Axis],
    ) -> None:
        self.axis = axis
        self.passes = 1
        """Backward passes in a step; gradients are reduced in the last. Set it before the first pass."""
        self.by_itself = True
        """True if the last pass of a step calls `finish`. Otherwise the caller must call it."""
        self._reduce_dtype = reduce_dtype
        params = [param for param in params if param.requires_grad]
        late = set(late)
        axes = {param: axis_by_param.get(param, axis) for param in params}
        owners: dict[nn.Parameter, int] = {}
        owned_params = set(owned)
        for replica_axis in dict.fromkeys(axes.values()):
            along_axis = [param for param in params if param in owned_params and axes[param] == replica_axis]
            owners |= _owners(along_axis, replica_axis.size)
        self.owned = [param for param in params if owners.get(param, axes[param].rank) == axes[param].rank]
        """The parameters that this rank updates: those that it owns, and those without an owner."""
        early_order = [param for param in reversed(params) if param not in late]
        late_order = [param for param in reversed(params) if param in late]
        # Late buckets come last: buckets are reduced in this order on all ranks.
        self.buckets = [*_buckets(early_order, owners, axes), *_buckets(late_order, owners, axes)]
        self._done = 0
        """Buckets whose reduction has started or ended in this step."""
        self._passed = 0
        """Backward passes of this step that have ended."""
        self._queued = False
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        for bucket in self.buckets:
            if bucket.owner is not None:
                bucket.flatten()
            for param in bucket.places:
                self._bucket_of[param] = bucket
                if param not in late:
                    param.register_post_accumulate_grad_hook(self._arrived)

    def finish(self) -> None:
        """Reduces the remaining buckets and waits for all; the step's averaged gradients are then in place."""
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
        """Returns the optimizer that `make` creates for the parameters that this rank updates, and for `others`.

        `others` are not averaged here. After each of the optimizer's steps all ranks have all parameters.
        """
        # A rank without parameters needs an optimizer too, since all ranks take part in `share` after a step.
        device = next(iter(self._bucket_of)).device
        optimizer = make([*self.owned, *others] or [nn.Parameter(torch.zeros(0, device=device))])
        optimizer.register_step_post_hook(lambda *_: self.share())
        return optimizer

    def share(self) -> None:
        """Broadcasts every parameter from its owner."""
        # All started before the first wait: broadcasts of different owners overlap.
        works = [
            dist.broadcast(bucket.flat, group=bucket.axis.group, group_src=bucket.owner, async_op=True)
            for bucket in self.buckets
            if bucket.flat is not None and bucket.axis.size > 1
        ]
        for work in works:
            work.wait()

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns a parameter's gradient on every rank. All ranks call it, because an owner broadcasts it."""
        if not self.has_owner(param):
            return param.grad
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        bucket = self._bucket_of[param]
        if bucket.axis.size > 1:
            dist.broadcast(grad, group=bucket.axis.group, group_src=bucket.owner)
        return grad

    def has_owner(self, param: nn.Parameter) -> bool:
        """Returns True if only the parameter's owner has its gradient after a step."""
        return param in self._bucket_of and self._bucket_of[param].owner is not None

    def holders(self, param: nn.Parameter) -> int:
        """Returns the number of ranks over which the parameter is replicated; 1 for one that is not averaged here."""
        return self._bucket_of[param].axis.size if param in self._bucket_of else 1

    def _arrived(self, param: nn.Parameter) -> None:
        """Handles the accumulation of a parameter's gradient in a backward pass, and reduces buckets that are complete."""
        if self.by_itself and not self._queued:
            self._queued = True
            # Autograd calls it once, at the end of this backward pass.
            Variable._execution_engine.queue_callback(self._pass_ended)
        bucket = self._bucket_of[param]
        bucket.arrived[param] = bucket.arrived.get(param, 0) + 1
        if bucket.arrived[param] >= self.passes:
            bucket.take(param, self.axis.size)
        # Only in the order of the list: gradients may arrive in another order on other ranks, but collectives must match.
        while self._done < len(self.buckets) and self.buckets[self._done].complete(self.passes):
            self.buckets[self._done].reduce(self.axis.size, self._reduce_dtype)
            self._done += 1

    def _pass_ended(self) -> None:
        self._queued = False
        self._passed += 1
        if self._passed >= self.passes:
            self.finish()


def whole_gradient(model: nn.Module, name: str, param: nn.Parameter) -> torch.Tensor:
    """Returns a parameter's unsharded gradient on every rank that has the parameter; zeros without a gradient.

    All of these ranks call it.
    """
    replicas = model.__dict__.get("replicas")
    grad = param.grad if replicas is None else replicas.gradient(param)
    return whole(*owner(model, name), torch.zeros_like(param) if grad is None else grad.detach())


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype, device, axis and owner, whose gradients are reduced together."""

    axis: Axis
    """The ranks over which they are replicated."""
    owner: int | None
    """The owner's rank along the axis; None if all ranks update them."""
    places: dict[nn.Parameter, slice] = field(default_factory=dict)
    """The parameters, with the position of each, and of its gradient, in the flat tensors."""
    size: int = 0
    """The number of elements of all parameters, including the padding that aligns them."""
    arrived: dict[nn.Parameter, int] = field(default_factory=dict)
    """The number of backward passes of this step that have accumulated each gradient."""
    flat: torch.Tensor | None = None
    """The tensor that the parameters are views of, if they have an owner."""
    _gradients: torch.Tensor | None = None
    """The flat gradients, followed by the number of replicas that have a gradient, for each parameter."""
    _wire: torch.Tensor | None = None
    """The tensor that is being reduced, if it has another dtype."""
    _work: Any = None

    def add(self, param: nn.Parameter) -> None:
        start = -(-self.size * param.element_size() // ALIGNMENT) * ALIGNMENT // param.element_size()
        self.size = start + param.numel()
        self.places[param] = slice(start, self.size)

    def complete(self, passes: int) -> bool:
        """Returns True if all passes have accumulated all gradients of the bucket."""
        return all(self.arrived.get(param, 0) >= passes for param in self.places)

    def flatten(self) -> None:
        """Makes the parameters views of one tensor."""
        flat = self.flat = next(iter(self.places)).new_zeros(self.size)
        for param, place in self.places.items():
            param.data = flat[place].view(param.shape).copy_(param.detach())

    @torch.no_grad()
    def take(self, param: nn.Parameter, ranks: int) -> None:
        """Copies a gradient, divided by `ranks`, into the flat tensor, and replaces it by a view of that."""
        if self._gradients is None:
            self._gradients = param.new_empty(self.size + len(self.places))
            self._usage_counts.fill_(1)  # in the same tensor, so that one collective reduces both
        piece = self._gradients[self.places[param]].view(param.shape)
        if param.grad is None:
            piece.zero_()  # other replicas may have a gradient
        elif param.grad.data_ptr() != piece.data_ptr():
            torch.div(param.grad, ranks, out=piece)
            param.grad = piece

    def reduce(self, ranks: int, dtype: torch.dtype | None) -> None:
        """Starts the reduction of the gradients, each divided by `ranks`: to the owner, or without one to all ranks."""
        for number, param in enumerate(self.places):
            self.take(param, ranks)
            if param.grad is None:
                self._usage_counts[number] = 0
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
        """Waits for the mean; gradients are then None on ranks that do not update the parameters."""
        if self._work is not None:
            self._work.wait()
        if self.owner not in (None, self.axis.rank):  # frees the gradients, which are views of the bucket
            for param in self.places:
                param.grad = None
        else:
            if self._wire is not None:
                self._sums.copy_(self._wire)
            for number, (param, place) in enumerate(self.places.items()):
                # A parameter that no replica used has no gradient, so that an optimizer skips it.
                if param.grad is None and self._usage_counts[number] > 0:
                    param.grad = self._sums[place].view(param.shape)
        self._gradients = self._wire = self._work = None

    @property
    def _usage_counts(self) -> torch.Tensor:
        """1 or 0 for each parameter with or without a gradient; after the reduction, the number of replicas with one."""
        return self._sums[self.size :]

    @property
    def _sums(self) -> torch.Tensor:
        assert self._gradients is not None, "`take` allocates the flat gradients"
        return self._gradients


def _owners(params: Sequence[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """Assigns each parameter to the rank that updates it: the largest first, each to the least loaded rank."""
    loads = [0] * ranks
    owners = {}
    # Stable, so that all ranks assign parameters of one size in the same order.
    for param in sorted(params, key=lambda param: -param.numel()):
        owners[param] = loads.index(min(loads))
        loads[owners[param]] += param.numel()
    return owners


def _buckets(
    params: Sequence[nn.Parameter], owners: dict[nn.Parameter, int], axes: dict[nn.Parameter, Axis]
) -> list[_Bucket]:
    """Returns buckets of parameters in the given order; full buckets come first, in the order in which they are filled.

    Each has one dtype, device, axis and owner.
    """
    full: list[_Bucket] = []
    open_: dict[Any, _Bucket] = {}
    for param in params:
        key = param.dtype, param.device, axes[param], owners.get(param)
        bucket = open_.setdefault(key, _Bucket(axes[param], owners.get(param)))
        bucket.add(param)
        if bucket.size * param.element_size() >= BUCKET_BYTES:
            full.append(open_.pop(key))
    return [*full, *open_.values()]
