"""A training like timm's `train.py`: autocast, an average of batch times in the printed rate, and a validation every epoch.

python amp.py -b 8 --amp --amp-dtype bfloat16 --grad-accum-steps 2
"""

import argparse
import time
from contextlib import nullcontext
from functools import partial

import torch
from clock import Clock
from small import Net, samples
from torch import nn
from torch.utils.data import DataLoader


class AverageMeter:
    def __init__(self) -> None:
        self.val = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, options, amp_autocast, clock):
    model.train()
    losses, update_time = AverageMeter(), AverageMeter()
    updates = len(loader) // options.grad_accum_steps
    start = time.time()
    for batch_idx, (x, target) in enumerate(loader):
        with amp_autocast():
            loss = loss_fn(model(x), target)
        clock.loss(loss.item())
        losses.update(loss.item(), len(x))
        (loss / options.grad_accum_steps).backward()
        if (batch_idx + 1) % options.grad_accum_steps:
            continue
        optimizer.step()
        optimizer.zero_grad()
        global_batch = len(x) * options.grad_accum_steps
        clock.step(global_batch)
        update_time.update(time.time() - start)
        start = time.time()
        update_idx = batch_idx // options.grad_accum_steps
        print(
            f"Train: {epoch} [{update_idx:>4d}/{updates} ({100 * update_idx / updates:>3.0f}%)]  "
            f"Loss: {losses.val:#.3g} ({losses.avg:#.3g})  "
            f"Time: {update_time.val:.3f}s, {global_batch / update_time.val:>7.2f}/s  "
            f"({update_time.avg:.3f}s, {global_batch / update_time.avg:>7.2f}/s)"
        )


@torch.inference_mode()
def validate(model, loader, loss_fn, amp_autocast):
    model.eval()
    losses = AverageMeter()
    for batch_idx, (x, target) in enumerate(loader):
        with amp_autocast():
            losses.update(loss_fn(model(x), target).item(), len(x))
        print(f"Test: [{batch_idx:>4d}/{len(loader) - 1}]  Loss: {losses.val:>7.3f} ({losses.avg:>6.3f})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--amp-dtype", default="float16", choices=["float16", "bfloat16"])
    options = parser.parse_args()
    amp_autocast = nullcontext
    if options.amp:
        amp_autocast = partial(torch.autocast, "cpu", dtype=getattr(torch, options.amp_dtype))
    torch.manual_seed(42)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    loss_fn = nn.CrossEntropyLoss()
    train_samples = options.batch_size * options.grad_accum_steps * options.steps
    loader_train = DataLoader(samples(train_samples), options.batch_size, shuffle=True, drop_last=True)
    loader_eval = DataLoader(samples(options.batch_size * 3), options.batch_size)
    clock = Clock()
    for epoch in range(options.epochs):
        train_one_epoch(epoch, model, loader_train, optimizer, loss_fn, options, amp_autocast, clock)
        with clock.apart("evaluation"):
            validate(model, loader_eval, loss_fn, amp_autocast)


if __name__ == "__main__":
    main()
