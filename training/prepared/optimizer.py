"""The optimizer as a loop of somebody's own calls it."""

from typing import Any

import torch

from ...base.errors import UsageError
from .steps import Steps


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` does what the configuration needs: unscales float16, clips where asked, steps.

    Parameter groups and state are those of `optimizer`, the one that the loop asked for, over this rank's parameters:
    learning-rate schedulers of PyTorch work on it. Behind `step` the gradients are gone; `zero_grad` without a step drops them.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.optimizer = steps.training.optimizer
        """The one that steps."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """That of the optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Those of the optimizer."""
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:
        """One step.

        Raises:
            UsageError: a closure is given, or there are no gradients.
        """
        if closure is not None:
            raise UsageError("optimizer.step() takes no closure: a step's passes run once, in the call of the model")
        self._steps.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        self._steps.drop()

    def state_dict(self) -> dict[str, Any]:
        """That of this rank's part; `info.save` keeps the whole, for any other configuration."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of this rank's part."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: parameters are cut and exchanged by what was known when they were prepared."""
        raise UsageError("parameters cannot be added to a prepared optimizer; freeze or group them in optimizer=")

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"
