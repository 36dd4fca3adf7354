"""The check that a model computes the same in a parallel configuration as one process.

It holds if, without dropout and in float32, the loss of the first step, all its gradients, and all weights after three
steps equal those of one process at the same global batch, up to rounding (`schedule/rounding.py`).

A capacity drops rows of experts by the tokens of a forward pass on one rank, so one process is then given the same
capacity and the same micro-batches: those of the first rank, then those of the second, and so on. Ranks must not share
samples (`sp`, `cp`, runs of a smaller `tp`), which would divide these tokens.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..models.workload import Workload
    from ..schedule.compare import Comparison, Numbers

STEPS = 3
LEARNING_RATE = 1e-3
EPSILON = 1e-2
"""Epsilon of AdamW, in the order of the gradients: with the usual 1e-8 their rounding errors alone would move weights."""


def departure(
    workload: "Workload", config: Mapping[str, Any], seed: int = 0, expected: "Reference | None" = None
) -> "Comparison":
    """Returns the deviation of a workload in a configuration from one process in float32, on this rank.

    Its model must not draw random numbers (dropout off). Its optimizer is replaced by AdamW with an epsilon in the
    order of the gradients.

    Args:
        config: its configuration, of precision fp32 or bf16; on several ranks, called alike on every rank.
        expected: the result of `reference` for the workload, the seed and `for_one_process(config)`, if known.
    """
    import torch

    from ..base._torch import dynamo

    expected = expected or reference(workload, seed, for_one_process(config))
    workload = replace(workload, optimizer=adamw)
    if config.get("fusion"):
        # The limit on compilations counts per function, and models share functions; beyond it nothing is compiled.
        torch.compiler.reset()
    with dynamo.config.patch(fail_on_recompile_limit_hit=True) if config.get("fusion") else nullcontext():
        found, _ = _train(workload, config, seed)
    exact = config.get("precision", "fp32") == "fp32"
    allowed = expected.allowed if exact else expected.allowed_half
    return compare(expected.trained, found, allowed, workload.global_batch * (workload.seq_len or 1))


def for_one_process(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration in which one process trains the same as ranks in another one."""
    same = ("capacity_factor", "micro_batch") if config.get("capacity_factor") else ()
    return {name: config[name] for name in same}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The expected values of a comparison."""

    trained: "Numbers"
    """Results of one process in float32."""
    allowed: float
    """Allowed rounding error of a gradient in float32."""
    allowed_half: float
    """Allowed rounding error of a gradient in bfloat16."""


def reference(workload: "Workload", seed: int = 0, config: Mapping[str, Any] | None = None) -> Reference:
    """Returns the results of one process, computed on each rank by itself; `config` has knobs that are not neutral."""
    import torch

    from ..schedule.rounding import allowance

    numbers, model = _train(replace(workload, optimizer=adamw), config or {}, seed, alone=True)
    batch = workload.batch(workload.global_batch, 0)
    rows = max(each.numel() for each in (batch.values() if isinstance(batch, Mapping) else batch))
    exact, half = (allowance(model, rows, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    return Reference(trained=numbers, allowed=exact, allowed_half=half)


def adamw(params: Any, fused: bool = False) -> "torch.optim.Optimizer":
    """Returns the optimizer of every comparison."""
    import torch

    return torch.optim.AdamW(params, lr=LEARNING_RATE, eps=EPSILON, fused=fused or None)


def trained(model: "nn.Module", passes: Callable[[], Any], update: Callable[[], None]) -> "Numbers":
    """Returns the results of `STEPS` steps with `adamw`: loss and gradients of the first, weights after the last.

    `passes` returns the loss; `update` discards the gradients.
    """
    from ..schedule.compare import Numbers, gradients_of, weights_of

    loss = float(passes())
    gradients = gradients_of(model)
    update()
    for _ in range(STEPS - 1):
        passes()
        update()
    return Numbers(loss=loss, gradients=gradients, weights=weights_of(model))


def compare(expected: "Numbers", found: "Numbers", allowed: float, terms: int) -> "Comparison":
    """Returns the deviation of the results of `trained` on this rank from those on one process.

    Rounding may change a gradient by `allowed`; the loss is a mean of `terms` tokens or samples.
    """
    from ..schedule import rounding
    from ..schedule.compare import compare

    assert found.gradients.keys() == found.weights.keys() & expected.gradients.keys()
    weights = partial(rounding.adamw_allowance, lr=LEARNING_RATE, eps=EPSILON, steps=STEPS)
    return compare(expected, found, rounding.Tolerance.of_tensors(allowed, terms=terms, weights=weights))


def _train(
    workload: "Workload", config: Mapping[str, Any], seed: int, alone: bool = False
) -> "tuple[Numbers, nn.Module]":
    """Trains three steps on the same batches in any configuration; returns the results and the model."""
    import torch
    import torch.distributed as dist

    from ..training.training import Training

    cuda = torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rank, ranks = (0, 1) if alone or not dist.is_initialized() else (dist.get_rank(), dist.get_world_size())
    knobs = {"attention": "eager", **config}
    training = Training(workload, knobs, device, seed=seed, rank=rank, world_size=ranks)
    return trained(training.model, training.passes, training.update), training.model
