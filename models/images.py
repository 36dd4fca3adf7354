"""Image batches for classifiers: seeded random pixels and classes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ImageBatches:
    """`batches(size, seed)`: `pixel_values`, float32, shape [size, channels, height, width], standard normal as
    images are after normalisation; `labels`, int64, shape [size]."""

    channels: int
    """Channels of an image."""
    height: int
    """Pixels."""
    width: int
    """Pixels."""
    classes: int
    """Labels are below."""

    def __call__(self, size: int, seed: int) -> dict[str, "torch.Tensor"]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn((size, self.channels, self.height, self.width), generator=generator)
        labels = torch.randint(self.classes, (size,), generator=generator)
        return {"pixel_values": pixels, "labels": labels}
