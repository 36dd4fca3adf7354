"""A training whose data come from shards: all samples of a shard are read when the first of them is asked for.

python stalls.py --batch 8 --shard 64 --workers 1

Reading a shard takes 2 ms a sample. With `--shard 1` a sample is read by itself in 1 ms. So shards have the faster median step,
and single samples the larger mean of samples per second.
"""

import argparse
import time

import torch
from clock import Clock
from small import Net, samples
from torch import nn
from torch.utils.data import DataLoader, Dataset

SINGLE_SECONDS, SHARD_SECONDS = 0.001, 0.002


class Shards(Dataset):
    def __init__(self, count: int, shard: int) -> None:
        self.samples = samples(count)
        self.shard = shard

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        if self.shard == 1:
            time.sleep(SINGLE_SECONDS)
        elif index % self.shard == 0:
            time.sleep(SHARD_SECONDS * self.shard)
        return self.samples[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=65)
    parser.add_argument("--shard", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Shards(options.batch * options.steps, options.shard)
    loader = DataLoader(data, batch_size=options.batch, num_workers=options.workers)
    clock = Clock()
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.loss(loss.item())
        clock.step(len(x))
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
