"""The load-balancing loss of a mixture of experts, computed over the micro-batches of all replicas together.

With E experts, f the rows of each expert per token and P its mean probability, the loss is E sum(f P); f has no gradient.
Each replica computes P of its own tokens and uses f of all replicas, so that the mean over replicas is the loss of their
samples together. The mean of each replica's own loss would balance the experts within every replica instead.

Source: Fedus et al., Switch Transformers (arXiv:2101.03961), section 2.2; over replicas: Qiu et al. (arXiv:2501.11873).
"""

import inspect
import sys
from typing import Any

import torch
from torch import nn

from ..forward import Inner, Layer, named_arguments
from .collectives import Axis, all_reduce
from .experts import mixtures_of, num_experts, rows_of_experts

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
