"""Expert parallelism: rows of tokens are sent to the ranks that have their experts, and back.

It supports any experts module of the form that transformers' mixtures share: `forward(hidden, index, weights)`, with
parameters stacked by expert along their first dimension and a count `num_experts`. The router is unchanged. Each rank
computes with its own experts by the module's own code, which sorts rows by expert and uses torch's grouped matrix products
if available.

| symbol | meaning |
|---|---|
| T, K, D | tokens on this rank; experts of a token; features |
| E, P | experts of the layer; ranks that share them (`ep`), each with E / P |
| N | rows that arrive at this rank: those of its experts, from all P ranks |
| f, C | capacity factor, and capacity: rows of this rank that an expert computes, ceil(f T K / E) |

Without a capacity no row is dropped, and the only synchronization with the device is for the row counts, which the exchange
needs on the host. With a capacity (`ExpertCapacity`) each expert gets C rows of every rank, so that all sizes are known if T is
the same on all ranks.

The loss that balances experts is computed over the micro-batches of all replicas together. With f the rows of each expert per
token and p its mean probability, it is E sum(f p); f has no gradient. Each replica computes p of its own tokens and uses f of all
replicas, so that the mean over replicas is the loss of their samples together. The mean of each replica's own loss would balance
the experts within every replica instead.

Source: Lepikhin et al., GShard (arXiv:2006.16668); Gale et al., MegaBlocks (arXiv:2211.15841), on dropless dispatch; Fedus et
al., Switch Transformers (arXiv:2101.03961), section 2.2, on the balance; over replicas: Qiu et al. (arXiv:2501.11873).
"""

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base._torch import parameters_of
from ...base.errors import ScheduleError
from .. import collectives as differentiable
from ..forward import Inner, Layer, argument_names, layers_of, named_arguments
from .collectives import Axis, all_reduce, all_to_all_rows, axis_of, through
from .sharding import scale_gradients


class ExpertParallel(Layer):
    """Wraps an experts module with this rank's E / P experts: each row is computed on the rank of its expert."""

    order = 10

    def __init__(self, axis: Axis, replicas: Axis, experts: int) -> None:
        self.axis = axis
        """The P ranks that share the experts."""
        self.replicas = replicas
        """The ranks that have the same experts as this one."""
        self.experts = experts
        """E."""
        self.rows: torch.Tensor | None = None
        """The number of this rank's rows that each expert got at the last call, (E,)."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, index, weights = routed(module, args, kwargs)
        if hidden.is_meta:
            # Tracing and pipelines infer shapes on the meta device.
            return hidden.clone()
        equal = module.training and any(layer.equal_tokens for layer in layers_of(module, ExpertCapacity))
        return self._spread(inner, hidden, index, weights, equal)

    @torch.compiler.disable
    def _spread(
        self, inner: Inner, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, equal: bool
    ) -> torch.Tensor:
        """Sends rows to their experts, computes them there, and returns the weighted sums of the results.

        Args:
            equal: True if every expert gets the same number of rows of every rank, so that the sizes need no exchange. All
                ranks must have the same number of tokens.
        """
        tokens = hidden.reshape(-1, hidden.shape[-1])
        experts_of_rows = index.reshape(-1)
        self.rows = rows_of_experts(experts_of_rows, self.experts)
        if self.axis.size == 1:
            return inner(hidden, index, weights)
        order = experts_of_rows.argsort(stable=True)
        sending = self.rows.view(self.axis.size, -1)
        if equal:
            arriving, sent = sending, [len(experts_of_rows) // self.axis.size] * self.axis.size
            received = sent
        else:
            arriving = all_to_all_rows(sending, [1] * self.axis.size, [1] * self.axis.size, self.axis)
            sent, received = torch.stack([sending.sum(1), arriving.sum(1)]).tolist()
        to_experts = partial(all_to_all_rows, sent=sent, received=received, axis=self.axis)
        from_experts = partial(all_to_all_rows, sent=received, received=sent, axis=self.axis)
        arrived_rows = through(tokens[order // index.shape[-1]], to_experts, from_experts)
        # Arrived rows are ordered by source rank, then by expert.
        local_experts = torch.arange(arriving.shape[1], device=arrived_rows.device).repeat(self.axis.size)
        local_experts = local_experts.repeat_interleave(arriving.view(-1), output_size=len(arrived_rows))
        count = len(arrived_rows)
        if not count:
            # Every rank takes part in the exchanges of the backward pass: a row of zeros keeps this rank's graph connected.
            arrived_rows, local_experts = nn.functional.pad(arrived_rows, (0, 0, 0, 1)), local_experts.new_zeros(1)
        computed = inner(arrived_rows, local_experts.unsqueeze(1), weights.new_ones(len(arrived_rows), 1))
        returned = through(computed[:count], from_experts, to_experts)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        row_outputs = returned[position].view(*index.shape, -1)
        return _shaped((row_outputs * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype), hidden)


class ExpertCapacity(Layer):
    """Wraps an experts module: in training each expert computes C rows of this rank, and rows beyond these are dropped.

    The rows of an expert with the largest weights are kept, the first of equal ones; Megatron-LM calls this drop policy
    `probs`. A dropped row adds nothing to its token, whose other weights do not change. Experts with fewer rows compute
    zeros instead, as with Megatron-LM's `--moe-pad-expert-input-to-capacity`. In evaluation no row is dropped.
    """

    order = 12

    def __init__(self, factor: float, experts: int) -> None:
        self.factor = factor
        """f."""
        self.experts = experts
        """E."""
        self.equal_tokens = True
        """True if all ranks have the same number of tokens in a forward pass. Ranks that share experts then need not exchange
        the numbers of rows."""
        self.rows = 0
        """The number of rows that were routed in training."""
        self.dropped: torch.Tensor | None = None
        """The number of routed rows that were dropped, a scalar on the device."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, index, weights = routed(module, args, kwargs)
        if not module.training or hidden.is_meta:
            return inner(*args, **kwargs)
        return self._limited(inner, hidden, index, weights)

    @torch.compiler.disable
    def _limited(self, inner: Inner, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        experts_of_rows, capacity = index.reshape(-1), math.ceil(self.factor * index.numel() / self.experts)
        # Stable sorts: by expert, within it by weight, and equal weights by row, so that all ranks drop the same rows.
        order = weights.detach().reshape(-1).argsort(descending=True, stable=True)
        order = order[experts_of_rows[order].argsort(stable=True)]
        routed_to = rows_of_experts(experts_of_rows, self.experts)
        row_numbers = torch.arange(len(order), device=order.device)
        # Rows keep their rank by weight within their expert. All dropped rows get the one position after those of all experts.
        rank_in_expert = row_numbers - (routed_to.cumsum(0) - routed_to)[experts_of_rows[order]]
        num_positions = self.experts * capacity
        position = torch.empty_like(order)
        kept_position = experts_of_rows[order] * capacity + rank_in_expert
        position[order] = torch.where(rank_in_expert < capacity, kept_position, num_positions)
        token_of_position = position.new_full((num_positions + 1,), len(tokens))
        token_of_position[position] = row_numbers // index.shape[-1]
        rows = nn.functional.pad(tokens, (0, 0, 0, 1))[token_of_position[:num_positions]]
        experts_of_positions = torch.arange(self.experts, device=rows.device).repeat_interleave(capacity)
        computed = inner(rows, experts_of_positions.unsqueeze(1), weights.new_ones(num_positions, 1))
        row_outputs = nn.functional.pad(computed, (0, 0, 0, 1))[position].view(*index.shape, -1)
        dropped = (routed_to - capacity).clamp_(min=0).sum()
        self.rows += len(experts_of_rows)
        self.dropped = dropped if self.dropped is None else self.dropped + dropped
        return _shaped((row_outputs * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype), hidden)


class DividedTokens(Layer):
    """Wraps unsharded experts that ranks of the `tp` axis share: each rank computes an equal share of the tokens."""

    order = 14

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, index, weights = routed(module, args, kwargs)
        if hidden.is_meta:
            return hidden.clone()
        tokens = hidden.reshape(-1, hidden.shape[-1])
        count, ranks = len(tokens), self.axis.size
        if count % ranks:
            raise ScheduleError(
                f"{ranks} ranks share the tokens of unsharded experts, so they must divide {count} tokens"
            )
        output = inner(
            differentiable.scatter(tokens, 0, self.axis),
            index.reshape(count, -1).chunk(ranks)[self.axis.rank],
            differentiable.scatter(weights.reshape(count, -1), 0, self.axis),
        )
        return _shaped(differentiable.all_gather(output, 0, self.axis), hidden)


def divides_tokens(module: nn.Module) -> bool:
    """Returns True for an experts module whose tokens are divided over the `tp` ranks."""
    return bool(layers_of(module, DividedTokens))


def expect_unequal_tokens(root: nn.Module) -> None:
    """Makes ranks that share experts with a capacity exchange the numbers of rows, because numbers of tokens may differ."""
    for module in root.modules():
        for layer in layers_of(module, ExpertCapacity):
            layer.equal_tokens = False


def dropped_rows(root: nn.Module) -> tuple[int, int] | None:
    """Returns the numbers of dropped and of routed rows on this rank so far in training; None without a capacity."""
    layers = [layer for module in root.modules() for layer in layers_of(module, ExpertCapacity)]
    if not layers:
        return None
    return sum(int(layer.dropped) for layer in layers if layer.dropped is not None), sum(layer.rows for layer in layers)


def _shaped(tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the shape of `template`; the tensor itself if it has that shape, because FSDP's hooks lose views."""
    return tensor if tensor.shape == template.shape else tensor.reshape(template.shape)


def routed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the arguments of an experts module: tokens (T, D), the indices of their experts (T, K), and their weights."""
    arguments = named_arguments(module, args, kwargs)
    hidden, index, weights = (arguments[name] for name in argument_names(module))
    return hidden, index, weights


def rows_of_experts(chosen: torch.Tensor, experts: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the number of rows of each expert, (E,), or the sum of their weights, from the rows' expert indices.

    Unlike torch.bincount, it does not synchronize with the device."""
    weights = torch.ones_like(chosen) if weights is None else weights
    return weights.new_zeros(experts).scatter_add_(0, chosen, weights)


@contextmanager
def counted_rows(root: nn.Module, hooks: bool = True) -> Iterator[dict[str, torch.Tensor]]:
    """Yields a mapping, by path, to the number of this rank's rows that each expert of a mixture got at its last call.

    The counts of mixtures that are spread over ranks are added on exit.

    Args:
        hooks: also count the rows of mixtures that are not spread. Their hooks recompile compiled code.
    """
    rows_by_path: dict[str, torch.Tensor] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, index, _ = routed(module, args, kwargs)
        rows_by_path[path] = rows_of_experts(index.reshape(-1), num_experts(module))

    mixtures = mixtures_of(root)
    unspread = {path: mixture for path, mixture in mixtures.items() if hooks and not is_spread(mixture)}
    handles = [
        mixture.register_forward_pre_hook(partial(note, path), with_kwargs=True) for path, mixture in unspread.items()
    ]
    try:
        yield rows_by_path
        for path, mixture in mixtures.items():
            for layer in layers_of(mixture, ExpertParallel):
                if layer.rows is not None:
                    rows_by_path[path] = layer.rows
    finally:
        for handle in handles:
            handle.remove()


def mixtures_of(root: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules below a root whose experts can be spread, by path, in order."""
    return {path: module for path, module in root.named_modules() if stacked_parameters(module)}


def stacked_parameters(module: nn.Module) -> list[str]:
    """Returns the names of a module's own parameters that are stacked by expert; empty if it is not an experts module."""
    experts, parameters = num_experts(module), parameters_of(module)
    for layer in layers_of(module, ExpertParallel):
        experts //= layer.axis.size
    names = [
        name
        for name, param in parameters.items()
        if param is not None and param.dim() > 1 and param.shape[0] == experts
    ]
    return names if experts and len(names) > 1 and len(argument_names(module)) == 3 else []


def num_experts(module: nn.Module) -> int:
    """Returns the number of experts of the whole module, over all ranks; 0 if it has no count."""
    spread = layers_of(module, ExpertParallel)
    if spread:
        return spread[0].experts
    count = getattr(module, "num_experts", None)
    return count if isinstance(count, int) and not isinstance(count, bool) else 0


def is_spread(module: nn.Module) -> bool:
    """Returns True for an experts module that is spread over ranks."""
    return bool(layers_of(module, ExpertParallel))


def spread_experts(module: nn.Module) -> list[nn.Module]:
    """Returns the experts modules in a module that are spread over ranks."""
    return [mixture for mixture in mixtures_of(module).values() if is_spread(mixture)]


def copied_experts(module: nn.Module) -> bool:
    """Returns True if several ranks have the same experts of a mixture that is spread over ranks."""
    return any(
        layer.replicas.size > 1 for mixture in spread_experts(module) for layer in layers_of(mixture, ExpertParallel)
    )


def cut_copies(module: nn.Module, mesh: Any, policy: Any, reshard_after_forward: bool) -> None:
    """Shards experts by FSDP over the ranks that have the same ones: by expert if the number of ranks divides theirs.

    Args:
        policy, reshard_after_forward: arguments of `fully_shard`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    (layer,) = layers_of(module, ExpertParallel)
    axis = layer.replicas
    copies = DeviceMesh.from_group(axis.group, mesh.device_type, mesh_dim_names=("copies",))

    def placement(param: nn.Parameter) -> Shard | None:
        return next((Shard(dim) for dim, size in enumerate(param.shape) if size % axis.size == 0), None)

    sharded = fully_shard(
        module, mesh=copies, mp_policy=policy, reshard_after_forward=reshard_after_forward, shard_placement_fn=placement
    )
    # The gradient must be a mean over all replicas. It already sums those that share the experts, through their rows.
    # (`set_gradient_divide_factor` divides twice in torch 2.13 if one rank has the experts, or gloo refuses it.)
    dp = axis_of(mesh, "dp")
    scale_gradients(sharded, axis.size / (1 if dp is None else dp.size))


def copies_of_experts(module: nn.Module) -> dict[nn.Parameter, Axis]:
    """Returns the parameters of experts that are spread over ranks, each with the axis of the ranks that have the same."""
    return {
        parameters_of(mixture)[name]: layer.replicas
        for mixture in spread_experts(module)
        for layer in layers_of(mixture, ExpertParallel)
        for name in stacked_parameters(mixture)
    }


FORMULA = ["gate_logits", "num_experts", "top_k"]
"""First parameters of transformers' function of this loss; a function with others computes another loss."""


def balances(model: nn.Module) -> bool:
    """Returns True for a transformers model that adds a load-balancing loss to its own."""
    config: Any = getattr(model, "config", None)
    return bool(getattr(config, "output_router_logits", False)) and hasattr(model, "router_aux_loss_coef")


def replicas_obstacle(model: nn.Module) -> str | None:
    """Returns why the load-balancing loss of a model cannot be computed over replicas; None if it can or without one."""
    if not balances(model):
        return None
    config: Any = model.config
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    names = FORMULA if function is None else [*inspect.signature(function).parameters]
    if config.is_encoder_decoder or names[: len(FORMULA)] != FORMULA:
        return (
            f"the loss that balances experts of {config.model_type} is not computed over replicas; set "
            "output_router_logits=False, or use one replica"
        )
    return None


class BalancedTogether(Layer):
    """Wraps a model, and replaces its load-balancing loss on this replica by that of all replicas."""

    order = 55
    divisible = True

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = inner(*args, **kwargs)
        logits = getattr(output, "router_logits", None)
        own_loss = getattr(output, "aux_loss", None)
        if logits is None or own_loss is None or output.loss is None:
            return output
        mask = named_arguments(module, args, kwargs).get("attention_mask")
        joint_loss = self._loss(
            logits, int(module.num_experts_per_tok), None if mask is None else mask.reshape(-1).float()
        )
        output.loss = output.loss + module.router_aux_loss_coef * (joint_loss - own_loss).to(output.loss)
        output.aux_loss = joint_loss
        return output

    def _loss(self, logits: tuple[torch.Tensor, ...], chosen: int, mask: torch.Tensor | None) -> torch.Tensor:
        experts = logits[0].shape[-1]
        counts = logits[0].new_zeros(experts + 1, dtype=torch.float32)
        sums = counts[:experts]
        for layer_logits in logits:
            probabilities = layer_logits.softmax(-1).float()
            weights = torch.ones_like(probabilities[:, 0]) if mask is None else mask
            experts_of_rows = probabilities.topk(chosen, dim=-1).indices.reshape(-1)
            rows = rows_of_experts(experts_of_rows, experts, weights.repeat_interleave(chosen))
            counts = counts + torch.cat([rows, weights.sum().view(1)])
            sums = sums + (probabilities * weights.unsqueeze(-1)).sum(0)
        # One collective for all layers; it has no gradient, as f has none.
        counts = all_reduce(counts, self.axis)
        return experts * (counts[:-1] / counts[-1] * sums).sum() * self.axis.size / counts[-1]


def pipeline_obstacle(model: nn.Module) -> str | None:
    """Returns why a model with a load-balancing loss cannot be divided into stages; None if it can."""
    if not balances(model):
        return None
    count = max((num_experts(mixture) for mixture in mixtures_of(model).values()), default=0)
    experts = f"the {count} experts" if count else "experts"
    return f"the loss that balances {experts} needs all blocks (output_router_logits), but a stage has some of them"
