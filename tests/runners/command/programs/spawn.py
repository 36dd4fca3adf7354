"""Data-parallel training in processes that the program itself starts.

python spawn.py --batch 8
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from clock import Clock
from small import Net, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(rank: int, world_size: int, store: str, options: argparse.Namespace) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = samples(options.batch * options.steps * world_size)
    loader = DataLoader(data, batch_size=options.batch, sampler=DistributedSampler(data))
    clock = Clock(rank)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        clock.loss(loss.item())
        clock.step(options.batch * world_size)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.barrier()  # as in ddp.py
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        mp.spawn(train, args=(options.world_size, store, options), nprocs=options.world_size)


if __name__ == "__main__":
    main()
