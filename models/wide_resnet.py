"""Wide residual networks for image classification, as a workload.

Source: Zagoruyko and Komodakis, Wide Residual Networks (2016), with group normalisation (Wu and He, 2018) in place of
batch normalisation: statistics over a batch would make the loss depend on micro-batches and devices, but every
configuration must compute the same.
"""

from collections.abc import Mapping
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..base.errors import WorkloadError
from .data import ImageBatches
from .families import schedule_of
from .workload import DEFAULT_GLOBAL_BATCH, Workload

GROUPS = 32
"""Number of groups of channels, if it divides them."""


class WideBlock(nn.Module):
    """Two convolutions with a residual connection, normalisation first: (n, channels, h, w) -> (n, out_channels, h', w')."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm2 = _norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        same = channels == out_channels and stride == 1
        self.shortcut = None if same else nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(x))
        residual = x if self.shortcut is None else self.shortcut(y)
        return residual + self.conv2(F.relu(self.norm2(self.conv1(y))))


class WideResNet(nn.Module):
    """WRN-depth-width: three groups of (depth - 4) / 6 blocks with 16, 32 and 64 times `width` channels.

    Raises:
        WorkloadError: depth is not one of 10, 16, 22, 28, ...
    """

    def __init__(self, depth: int = 28, width: int = 10, classes: int = 10, channels: int = 3) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise WorkloadError(f"a wide ResNet's depth must be 6 n + 4 with n of at least 1, but got {depth}")
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        blocks, channels_so_far = [], 16
        for group in range(3):
            for index in range((depth - 4) // 6):
                out_channels = 16 * width * 2**group
                blocks.append(WideBlock(channels_so_far, out_channels, stride=2 if group and not index else 1))
                channels_so_far = out_channels
        self.blocks = nn.ModuleList(blocks)
        self.norm = _norm(channels_so_far)
        self.classifier = nn.Linear(channels_so_far, classes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of images (n, channels, h, w)."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.classifier(F.relu(self.norm(x)).mean((2, 3)))


def classification_loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(output, batch["labels"])


def wide_resnet(arguments: Mapping[str, Any], *, name: str, spec: str, global_batch: int | None = None) -> Workload:
    """Returns the workload that trains a WideResNet with the given `depth`, `width` and `classes`, on 32 by 32 pixels."""
    return Workload(
        name=name,
        spec=spec,
        model=partial(WideResNet, **arguments),
        batch=ImageBatches(channels=3, height=32, width=32, classes=arguments.get("classes", 10)),
        loss=classification_loss,
        schedule=schedule_of("wide_resnet"),
        global_batch=global_batch if global_batch is not None else DEFAULT_GLOBAL_BATCH,
        identity={"architecture": {"model_type": "wide_resnet", **arguments}, "task": "image", "data": None},
    )


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(gcd(GROUPS, channels), channels)
