"""Experts spread over ranks: rows of tokens travel to the ranks that hold their experts, and back.

Any experts module of the form that transformers' mixtures share can be spread: `forward(hidden, index, weights)`, with
parameters stacked by expert along their first dimension and a count `num_experts`. The router stays as it is. Each rank
computes with its own experts by the module's own code, which sorts rows by expert and multiplies them by grouped products
where torch has these.

| symbol | meaning |
|---|---|
| T, K, D | tokens on this rank; experts of a token; features |
| E, P | experts of the layer; ranks that share them (`ep`), of which each holds E / P |
| N | rows that arrive at this rank: those of its experts, from all P ranks |

No token is dropped. The only wait for the device is that for the numbers of rows, which the exchange needs on the host.

Source: Lepikhin et al., GShard (arXiv:2006.16668); Gale et al., MegaBlocks (arXiv:2211.15841), on dropless dispatch.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base._torch import parameters_of
from ..forward import Layer, layers_of
from .collectives import Axis, all_to_all_rows, through
from .sharing import Sharing, copies_with_parts, shared_parameters


class ExpertParallel(Layer):
    """Around an experts module of which this rank holds E / P: each row is computed where its expert is."""

    order = 10

    def __init__(self, axis: Axis, replicas: Axis, experts: int) -> None:
        self.axis = axis
        """The P ranks that share the experts."""
        self.replicas = replicas
        """The ranks that hold the same experts as this one."""
        self.experts = experts
        """E."""
        self.rows: torch.Tensor | None = None
        """How many rows of this rank went to each expert at the last call, (E,)."""

    def __call__(
        self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden, index, weights = routed(module, args, kwargs)
        if hidden.is_meta:
            # Shapes are all that is asked for.
            return hidden.clone()
        return self._spread(inner, hidden, index, weights)

    @torch.compiler.disable
    def _spread(
        self, inner: Callable[..., Any], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows to their experts, through these, and back."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        self.rows = rows_of_experts(chosen, self.experts)
        sending = self.rows.view(self.axis.size, -1)
        arriving = all_to_all_rows(sending, [1] * self.axis.size, [1] * self.axis.size, self.axis)
        sent, received = torch.stack([sending.sum(1), arriving.sum(1)]).tolist()
        there = partial(all_to_all_rows, sent=sent, received=received, axis=self.axis)
        back = partial(all_to_all_rows, sent=received, received=sent, axis=self.axis)
        rows = through(tokens[order // index.shape[-1]], there, back)
        # Rows of one rank are in the order of experts, and those of the next rank follow.
        local = torch.arange(arriving.shape[1], device=rows.device).repeat(self.axis.size)
        local = local.repeat_interleave(arriving.view(-1), output_size=len(rows))
        count = len(rows)
        if not count:
            # Every rank takes part in the exchanges of the backward pass: a row of zeros keeps this one's graph whole.
            rows, local = nn.functional.pad(rows, (0, 0, 0, 1)), local.new_zeros(1)
        computed = inner(rows, local.unsqueeze(1), weights.new_ones(len(rows), 1))
        returned = through(computed[:count], back, there)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        parts = returned[place].view(*index.shape, -1)
        sums = (parts * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype)
        return sums if sums.shape == hidden.shape else sums.reshape(hidden.shape)


def routed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What an experts module is called with: tokens (T, D), the numbers of their experts (T, K), and the weights of these."""
    given = {**dict(zip(_arguments(module), args)), **kwargs}
    hidden, index, weights = (given[name] for name in _arguments(module))
    return hidden, index, weights


def rows_of_experts(chosen: torch.Tensor, experts: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """How many rows each expert has of those that are given by their experts' numbers, (E,), or the sum of their weights;
    without a wait for the device, as torch.bincount has one."""
    weights = torch.ones_like(chosen) if weights is None else weights
    return weights.new_zeros(experts).scatter_add_(0, chosen, weights)


@contextmanager
def counted_rows(root: nn.Module, hooks: bool = True) -> Iterator[dict[str, torch.Tensor]]:
    """Within it a mapping, by path, is filled with how many of this rank's rows each expert of a mixture got at its last
    call; of experts that are spread over ranks they are put in at the end.

    Args:
        root: the model.
        hooks: look at mixtures that are not spread too, which code that is compiled would be compiled anew for.
    """
    found: dict[str, torch.Tensor] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, index, _ = routed(module, args, kwargs)
        found[path] = rows_of_experts(index.reshape(-1), num_experts(module))

    mixtures = mixtures_of(root)
    whole = {path: each for path, each in mixtures.items() if not layers_of(each, ExpertParallel)} if hooks else {}
    handles = [each.register_forward_pre_hook(partial(note, path), with_kwargs=True) for path, each in whole.items()]
    try:
        yield found
        for path, each in mixtures.items():
            for layer in layers_of(each, ExpertParallel):
                if layer.rows is not None:
                    found[path] = layer.rows
    finally:
        for handle in handles:
            handle.remove()


def mixtures_of(root: nn.Module) -> dict[str, nn.Module]:
    """The modules below a root whose experts can be spread, by path, in order."""
    return {path: module for path, module in root.named_modules() if stacked_parameters(module)}


def stacked_parameters(module: nn.Module) -> list[str]:
    """The names of a module's own parameters that are stacked by expert; none where it is no module of experts."""
    experts, own = num_experts(module), parameters_of(module)
    for layer in layers_of(module, ExpertParallel):
        experts //= layer.axis.size
    found = [name for name, each in own.items() if each is not None and each.dim() > 1 and each.shape[0] == experts]
    return found if experts and len(found) > 1 and len(_arguments(module)) == 3 else []


def num_experts(module: nn.Module) -> int:
    """The experts of the whole module, on however many ranks they are; 0 where it counts none."""
    spread = layers_of(module, ExpertParallel)
    if spread:
        return spread[0].experts
    count = getattr(module, "num_experts", None)
    return count if isinstance(count, int) and not isinstance(count, bool) else 0


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def spread_experts(module: nn.Module) -> list[nn.Module]:
    """The experts modules in a module that are spread over ranks."""
    return [each for each in mixtures_of(module).values() if layers_of(each, ExpertParallel)]


def cut_copies(
    module: nn.Module, mesh: Any, policy: Any, reshard_after_forward: bool, sharing: Sharing | None = None
) -> None:
    """Cuts experts over the ranks that hold the same ones: by expert where these ranks divide them.

    Args:
        module: the experts.
        mesh, policy, reshard_after_forward: of the schedule, and of `fully_shard`.
        sharing: how the samples of the block around them are shared, if they are.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    (layer,) = layers_of(module, ExpertParallel)
    axis = layer.replicas if sharing is None else copies_with_parts(mesh, layer.axis.size, sharing)
    copies = DeviceMesh.from_group(axis.group, mesh.device_type, mesh_dim_names=("copies",))

    def along(param: nn.Parameter) -> Shard | None:
        return next((Shard(dim) for dim, size in enumerate(param.shape) if size % axis.size == 0), None)

    made = fully_shard(
        module, mesh=copies, mp_policy=policy, reshard_after_forward=reshard_after_forward, shard_placement_fn=along
    )
    # A gradient is a mean over all replicas, of which those that share the experts have added theirs by their rows already.
    # (`set_gradient_divide_factor` divides twice in torch 2.13 where one rank holds the experts, or gloo refuses it.)
    parts = 1 if sharing is None else sharing.parts.size
    made.set_all_reduce_hook(lambda gradients: gradients.mul_(parts / layer.axis.size))


def copies_of_experts(module: nn.Module, mesh: Any) -> dict[nn.Parameter, Axis]:
    """The parameters of experts that are spread, and the ranks that hold the same ones."""
    out: dict[nn.Parameter, Axis] = {}
    shared = shared_parameters(module)
    made: dict[tuple[int, int], Axis] = {}
    for each in spread_experts(module):
        (layer,) = layers_of(each, ExpertParallel)
        params = [parameters_of(each)[name] for name in stacked_parameters(each)]
        axis = layer.replicas
        if (sharing := shared.get(params[0])) is not None:
            key = layer.axis.size, sharing.parts.size
            axis = made[key] = made.get(key) or copies_with_parts(mesh, layer.axis.size, sharing)
        out |= dict.fromkeys(params, axis)
    return out
