"""Trainings that end badly in the middle.

torchrun --nproc-per-node 2 failures.py oom        rank 1 raises torch.OutOfMemoryError
python failures.py swallowed                       prints the traceback of its OOM and exits with 0
python failures.py handled                         an OOM is caught, and the training continues with the next batch
python failures.py thread                          a thread dies of an OOM, and the training continues
python failures.py raises                          a ValueError ends it
"""

import argparse
import os
import threading
import traceback

import torch
import torch.distributed as dist
from clock import Clock
from small import Net, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def train(options: argparse.Namespace) -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = Net()
    data = samples(options.batch * options.steps * world_size)
    sampler = None
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock = Clock(rank)
    for step, (x, y) in enumerate(DataLoader(data, batch_size=options.batch, sampler=sampler)):
        if step == options.after:
            if options.kind == "thread":
                thread = threading.Thread(target=run_out_of_memory, name="prefetch")
                thread.start()
                thread.join()
            elif options.kind == "raises":
                raise ValueError("expected 10 classes")
            elif options.kind == "handled":
                try:
                    run_out_of_memory()
                except torch.OutOfMemoryError:
                    print("out of memory, batch skipped", flush=True)
                    continue
            elif rank == world_size - 1:
                run_out_of_memory()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.loss(loss.item())
        clock.step(options.batch * world_size)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["oom", "swallowed", "handled", "thread", "raises"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--after", type=int, default=10)
    options = parser.parse_args()
    if options.kind == "swallowed":
        try:
            train(options)
        except RuntimeError:
            traceback.print_exc()
    else:
        train(options)


if __name__ == "__main__":
    main()
