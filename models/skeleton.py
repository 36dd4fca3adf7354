"""A workload's model without its weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .user_code import user_code_errors
from .workload import Workload

if TYPE_CHECKING:
    from torch import nn


def skeleton(workload: Workload, config: Mapping[str, Any] | None = None) -> "nn.Module":
    """The module on the meta device, or on the CPU where its constructor computes with values.

    The global random state is left as it was.

    Raises:
        WorkloadError: the model cannot be built.
    """
    import torch

    with torch.random.fork_rng(devices=[]), user_code_errors(f"{workload.name}: building the model"):
        try:
            with torch.device("meta"):
                return workload.build_model(config)
        except RuntimeError:  # NotImplementedError included: a value of a meta tensor was asked for
            return workload.build_model(config)
