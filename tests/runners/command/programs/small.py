"""The model and the data of the programs for which neither matters."""

import torch
from cost import wait
from torch import nn
from torch.utils.data import TensorDataset

FEATURES, CLASSES = 32, 10


class Net(nn.Module):
    """A classifier whose forward pass lasts as long as `cost.seconds` says."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        pause(len(x))
        return self.head(self.body(x))


# A compiled model sleeps as well.
pause = torch.compiler.disable(wait)


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))
