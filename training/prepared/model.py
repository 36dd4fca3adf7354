"""The model as a loop of somebody's own calls it: with a batch, for a loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .steps import Steps


class PreparedModel(nn.Module):
    """`loss = model(**batch)`, for a tuple `model(*batch)`, in any configuration; then `loss.backward()`.

    A call takes this replica's samples of a step, runs their forward and backward passes (micro-batch by micro-batch, or
    through the pipeline) and returns the mean loss over the global batch, the same on all ranks. `loss.backward()` makes the
    gradients those of what it is called on: `(loss / 2).backward()` halves them. Under `torch.no_grad()` the forward passes
    run alone, with any number of samples.

    The model that is trained is `model.module`: scheduled, and this rank's part of it.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.module = steps.training.model
        self.__dict__["steps"] = steps
        self.__dict__["anchor"] = torch.zeros((), device=steps.training.device, requires_grad=True)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch."""
        steps: Steps = self.__dict__["steps"]
        batch = kwargs or args
        if not torch.is_grad_enabled():
            return steps.evaluated(batch)
        loss: torch.Tensor = _Computed.apply(self.__dict__["anchor"], steps.loss(batch), steps.backward)
        return loss

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of `module`: this rank's part, by the names of the original model. `info.state_dict()` puts it together."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of `module`."""
        return self.module.load_state_dict(*args, **kwargs)


class _Computed(torch.autograd.Function):
    """A loss whose gradients are in place already: going back from it tells what they are to be multiplied by."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, told: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.told = told
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.told(gradient)
        return None, None, None
