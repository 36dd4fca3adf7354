"""Hyperparameters of a training: learning rate, weight decay, clipping, averaging; each a function of the step alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ..base.errors import UsageError, unknown
from ..models.request import Asked, either

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

    steps: Annotated[int, Asked("Optimizer steps in all.", type=int, metavar="N")] = 1000
    """Number of optimizer steps."""
    lr: Annotated[float | None, Asked("Highest learning rate.  [default: 1e-4]", type=float)] = None
    """Highest learning rate; None for 1e-4, or for that of the workload's own optimizer."""
    lr_schedule: Annotated[str, Asked(f"Learning-rate schedule: {either(LR_SCHEDULES)}.", metavar="NAME")] = "cosine"
    """Schedule after the warm-up: `constant`, `linear`, `cosine`, or `wsd`: stable, then linear over the last `decay`."""
    lr_steps: Annotated[
        int | None,
        Asked(
            "Steps after which the learning rate stays at its minimum.  [default: --steps, as first asked]",
            type=int,
            metavar="N",
        ),
    ] = None
    """Steps after which the learning rate stays at its minimum; None for all steps."""
    warmup: Annotated[int, Asked("Warm-up steps; the first has lr/N.", type=int, metavar="N")] = 0
    """Warm-up steps, n: step k, counted from 1, has k/n of the highest rate. Transformers' Trainer counts from 0: its
    first step has a rate of 0, and every other step the rate of the previous step here.
    """
    min_lr: Annotated[float, Asked("Minimum learning rate, as a share of the highest.", type=float)] = 0.1
    """Minimum learning rate, as a share of the highest."""
    decay: Annotated[float, Asked("Share of the steps over which wsd falls.", type=float)] = 0.2
    """Share of the steps over which `wsd` falls (arXiv:2404.06395)."""
    weight_decay: Annotated[float, Asked("AdamW's weight decay, for weight matrices.", type=float)] = 0.01
    """AdamW's weight decay for parameters with two dimensions or more; biases and norms have none."""
    betas: Annotated[
        tuple[float, float], Asked("AdamW's decay rates of gradients and squared gradients.", metavar="X X")
    ] = (
        0.9,
        0.999,
    )
    """AdamW's decay rates of the moving averages of gradients and of their squares."""
    eps: Annotated[float, Asked("AdamW's epsilon.", type=float)] = 1e-8
    """AdamW's epsilon, added to the root of the average of squares."""
    clip: Annotated[float | None, Asked("Largest global gradient norm.", type=float)] = 1.0
    """Largest norm of all gradients together; None or 0 for no limit."""
    average: Annotated[float | None, Asked("Keep a moving average of the weights with this decay.", type=float)] = None
    """Decay of the moving average of the weights per step, such as 0.999; None keeps no average."""

    def __post_init__(self) -> None:
        if self.lr_schedule not in LR_SCHEDULES:
            raise UsageError(unknown("learning-rate schedule", self.lr_schedule, LR_SCHEDULES))
        ranges = {
            "steps": (self.steps, self.steps >= 1, "at least 1"),
            "lr": (self.lr, self.lr is None or 0 < self.lr < math.inf, "above 0"),
            "lr_steps": (self.lr_steps, self.lr_steps is None or self.lr_steps >= 1, "at least 1"),
            "warmup": (self.warmup, self.warmup >= 0, "at least 0"),
            "min_lr": (self.min_lr, 0 <= self.min_lr <= 1, "a share from 0 to 1"),
            "decay": (self.decay, 0 < self.decay <= 1, "a share above 0, of at most 1"),
            "weight_decay": (self.weight_decay, self.weight_decay >= 0, "at least 0"),
            "clip": (self.clip, self.clip is None or self.clip >= 0, "at least 0"),
            "average": (self.average, self.average is None or 0 < self.average < 1, "a share between 0 and 1"),
            "betas": (
                self.betas,
                len(self.betas) == 2 and all(0 <= each < 1 for each in self.betas),
                "two shares below 1",
            ),
            "eps": (self.eps, self.eps > 0, "above 0"),
        }
        for name, (value, holds, rule) in ranges.items():
            if not holds:
                raise UsageError(f"{name} must be {rule}, but got {value!r}")

    def lr_factor(self, step: int) -> float:
        """Learning rate of a step, numbered from 0, as a share of the highest."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = max(1, (self.lr_steps or self.steps) - self.warmup)
        done = min(1.0, (step - self.warmup) / left)
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
        for each in params:
            groups.setdefault(each.dim() >= 2, []).append(each)
        given = [
            {"params": each, "weight_decay": self.weight_decay if decays else 0.0} for decays, each in groups.items()
        ]
        # Not fused leaves the choice to torch: foreach on CUDA, a loop over parameters on a CPU.
        return torch.optim.AdamW(
            given,
            lr=self.lr if self.lr is not None else DEFAULT_LR,
            betas=self.betas,
            eps=self.eps,
            fused=True if fused else None,
        )
