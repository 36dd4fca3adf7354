"""Data-parallel training with a DistributedSampler, as in PyTorch's tutorials.

torchrun --nproc-per-node 2 ddp.py --batch 8 --steps 40
"""

import argparse

import torch
import torch.distributed as dist
from clock import Clock
from small import Net, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = samples(options.batch * options.accumulate * options.steps * world_size)
    loader = DataLoader(data, batch_size=options.batch, sampler=DistributedSampler(data))
    clock = Clock(rank)
    for index, (x, y) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(x), y)
        clock.loss(loss.item())
        if index % options.accumulate:
            with model.no_sync():
                (loss / options.accumulate).backward()
            continue
        (loss / options.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(options.batch * options.accumulate * world_size)
        if rank == 0:
            print(f"step {index // options.accumulate} loss {loss.item():.4f}", flush=True)
    # Without it torch 2.13 hangs now and then: Gloo's thread wants the interpreter's lock to free its last all-reduce, while the
    # process group's destructor waits for that thread and has the lock.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
