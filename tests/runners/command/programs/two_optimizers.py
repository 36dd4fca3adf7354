"""A training whose body and head have optimizers of their own that step together.

python two_optimizers.py --batch 8 --accumulate 2
"""

import argparse

import torch
from clock import Clock
from small import Net, samples
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Net()
    optimizers = [
        torch.optim.SGD(model.body.parameters(), lr=0.01, momentum=0.9),
        torch.optim.AdamW(model.head.parameters(), lr=1e-3),
    ]
    data = samples(options.batch * options.accumulate * options.steps)
    clock = Clock()
    for index, (x, y) in enumerate(DataLoader(data, batch_size=options.batch), start=1):
        loss = nn.functional.cross_entropy(model(x), y)
        clock.loss(loss.item())
        (loss / options.accumulate).backward()
        if index % options.accumulate == 0:
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            clock.step(options.batch * options.accumulate)
            print(f"step {index // options.accumulate} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
