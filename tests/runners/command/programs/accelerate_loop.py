"""A training loop on accelerate, with its gradient accumulation.

accelerate launch --cpu accelerate_loop.py --batch 8 --accumulate 2
"""

import argparse

import torch
from accelerate import Accelerator
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
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, cpu=True)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    samples_per_step = options.batch * options.accumulate * accelerator.num_processes
    loader = DataLoader(samples(samples_per_step * options.steps), batch_size=options.batch, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    clock = Clock(accelerator.process_index)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            clock.loss(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.step(samples_per_step)
            accelerator.print(f"loss {loss.item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
