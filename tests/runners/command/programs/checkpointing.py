"""A training with activation checkpointing, and one whose optimizers run in the backward pass, as in PyTorch's tutorials.

python checkpointing.py --batch 8 --in-backward
"""

import argparse

import torch
from clock import Clock
from cost import wait
from small import CLASSES, FEATURES, samples
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        wait(len(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def step_in_backward(model: nn.Module) -> None:
    """Gives each parameter an optimizer, which runs as soon as its gradient is there."""
    optimizers = {parameter: torch.optim.Adam([parameter], lr=1e-3) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--in-backward", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Checkpointed()
    optimizer = None
    if options.in_backward:
        step_in_backward(model)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock = Clock()
    for step, (x, y) in enumerate(DataLoader(samples(options.batch * options.steps), batch_size=options.batch)):
        # A reentrant checkpoint needs an input with a gradient, and runs a backward pass of its own inside the outer one.
        loss = nn.functional.cross_entropy(model(x.requires_grad_()), y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        clock.loss(loss.item())
        clock.step(len(x))
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
