"""Fusion of a block: linear, norm and activation are found by pattern and compiled as one function.

python examples/block_fusion.py
"""

import time

import redline as rl
import torch
from redline.schedule import call_module
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A linear layer, a norm and an activation, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.norm(self.linear(x)))


class Net(nn.Sequential):
    """Some blocks in a row."""

    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__(*(Block(width) for _ in range(depth)))


def linear_norm_activation(x: torch.Tensor) -> torch.Tensor:
    """The pattern to fuse."""
    return F.gelu(call_module(nn.LayerNorm, call_module("linear", x)))


def schedule(sch: rl.Schedule, compiler: str = "inductor") -> None:
    """Finds the pattern in every block and fuses it."""
    for block in sch:
        block.trace()
    sch.fuse(sch.find(linear_norm_activation), compiler=compiler)


def main() -> None:
    """Verifies the schedule and times a training step with and without it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(256, 512, device=device)
    with torch.device("meta"):
        model, same = Net(), Net()

    sch = rl.create_schedule(model)
    with rl.verify(sch, x, device=device):
        schedule(sch)
    print("verified; the first block is now")
    print(sch["0"].find("fused.*|add")[0])

    plain, _ = rl.build(rl.create_schedule(same), device=device)
    fused, _ = rl.build(sch, device=device)
    for label, each in (("original", plain), ("fused", fused)):
        print(f"{label:10} {step_ms(each, x, device):8.2f} ms a step")


def step_ms(each: nn.Module, x: torch.Tensor, device: torch.device, steps: int = 20) -> float:
    """The fastest of some forward and backward passes, ms; compilation is in the first."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        each(x).pow(2).mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
