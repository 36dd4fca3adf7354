"""Hyperparameters of a training: learning rate, weight decay, clipping; each a function of the step alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ..base.errors import UsageError
from ..base.option import Option, check_options, either

if TYPE_CHECKING:
    import torch
    from torch import nn

LR_SCHEDULES = ("constant", "linear", "cosine", "wsd")
DEFAULT_LR = 1e-4


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters of the optimization, which do not depend on the configuration.

    Raises:
        UsageError: a value is out of its range.
    """

    steps: Annotated[int, Option("Optimizer steps in all.", type=int, least=1, metavar="N")] = 1000
    lr: Annotated[
        float | None, Option("Highest learning rate.  [default: 1e-4]", type=float, above=0, below=math.inf)
    ] = None
    """Highest learning rate; None for 1e-4, or for that of the workload's own optimizer."""
    lr_schedule: Annotated[
        str, Option(f"Learning-rate schedule: {either(LR_SCHEDULES)}.", choices=LR_SCHEDULES, in_file=True)
    ] = "cosine"
    """Schedule after the warm-up: `constant`, `linear`, `cosine`, or `wsd`: stable, then linear over the last `decay`."""
    lr_steps: Annotated[
        int | None,
        Option(
            "Steps after which the learning rate stays at its minimum.  [default: --steps, as first asked]",
            type=int,
            least=1,
            in_file=True,
        ),
    ] = None
    """Steps after which the learning rate stays at its minimum; None for all steps."""
    warmup: Annotated[int, Option("Warm-up steps; the first has lr/N.", type=int, least=0, in_file=True)] = 0
    """Warm-up steps, n: step k, counted from 1, has k/n of the highest rate. Transformers' Trainer counts from 0: its
    first step has a rate of 0, and every other step the rate of the previous step here.
    """
    min_lr: Annotated[
        float, Option("Minimum learning rate, as a share of the highest.", type=float, least=0, most=1, in_file=True)
    ] = 0.1
    decay: Annotated[
        float, Option("Share of the steps over which wsd falls.", type=float, above=0, most=1, in_file=True)
    ] = 0.2
    """Share of the steps over which `wsd` falls (arXiv:2404.06395)."""
    weight_decay: Annotated[
        float, Option("AdamW's weight decay, for weight matrices.", type=float, least=0, in_file=True)
    ] = 0.01
    """AdamW's weight decay for parameters with two dimensions or more; biases and norms have none."""
    betas: Annotated[
        tuple[float, float],
        Option("AdamW's decay rates of gradients and squared gradients.", type=float, least=0, below=1, in_file=True),
    ] = (0.9, 0.999)
    eps: Annotated[float, Option("AdamW's epsilon.", type=float, above=0, in_file=True)] = 1e-8
    clip: Annotated[
        float | None, Option("Largest global gradient norm; 0 for any.", type=float, least=0, in_file=True)
    ] = 1.0
    """Largest norm of all gradients together; None or 0 for no limit."""

    def __post_init__(self) -> None:
        check_options(self)
        if len(self.betas) != 2:
            raise UsageError(f"betas must be two numbers, but got {self.betas!r}")

    def lr_factor(self, step: int) -> float:
        """Learning rate of a step, numbered from 0, as a share of the highest."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        remaining = max(1, (self.lr_steps or self.steps) - self.warmup)
        done = min(1.0, (step - self.warmup) / remaining)
        if self.lr_schedule == "constant":
            share = 1.0
        elif self.lr_schedule == "linear":
            share = 1.0 - done
        elif self.lr_schedule == "cosine":
            share = (1.0 + math.cos(math.pi * done)) / 2
        else:
            share = min(1.0, (1.0 - done) / self.decay)
        return self.min_lr + (1.0 - self.min_lr) * share

    def optimizer(self, params: "Iterable[nn.Parameter]", fused: bool = False) -> "torch.optim.Optimizer":
        """AdamW, with weight decay for parameters with two dimensions or more."""
        import torch

        groups: dict[bool, list[nn.Parameter]] = {}
        for param in params:
            groups.setdefault(param.dim() >= 2, []).append(param)
        param_groups = [
            {"params": params_of_group, "weight_decay": self.weight_decay if decays else 0.0}
            for decays, params_of_group in groups.items()
        ]
        # Not fused leaves the choice to torch: foreach on CUDA, a loop over parameters on a CPU.
        return torch.optim.AdamW(
            param_groups,
            lr=self.lr if self.lr is not None else DEFAULT_LR,
            betas=self.betas,
            eps=self.eps,
            fused=True if fused else None,
        )
