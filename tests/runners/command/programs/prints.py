"""A training whose output is easily misread; `--style` chooses what it prints.

python prints.py --style scanning --batch 8 --accumulate 2

scanning       a fast bar over the labels before a training that prints losses only
micro-batches  the rate of micro-batches as that of steps
mean           samples/s since the start, slow first steps included
samples        a bar that counts samples
comma          samples/s with a decimal comma
thousands      tokens/s with commas between thousands
epochs         a bar of epochs around the bar of steps
"""

import argparse
import time

import torch
from clock import Clock
from small import Net, samples
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

EPOCHS, WARMUP_SECONDS, TOKENS = 4, 0.2, 512


def main() -> None:
    parser = argparse.ArgumentParser()
    styles = ["scanning", "micro-batches", "mean", "samples", "comma", "thousands", "epochs"]
    parser.add_argument("--style", choices=styles, default="scanning")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40, help="over all 4 epochs")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps_of_epoch = options.steps // EPOCHS
    global_batch = options.batch * options.accumulate
    data = samples(global_batch * steps_of_epoch)
    if options.style == "scanning":
        for _ in tqdm(range(2000), desc="train: Scanning labels"):
            time.sleep(0.0005)
    clock = Clock()
    step, begin = 0, time.perf_counter()
    for _ in tqdm(range(EPOCHS), desc="epochs", disable=options.style != "epochs"):
        loader = DataLoader(data, batch_size=options.batch, shuffle=True)
        bar = tqdm(total=len(data), unit="samples", disable=options.style != "samples")
        start = time.perf_counter()
        for index, (x, y) in enumerate(tqdm(loader, leave=False, disable=options.style != "epochs"), start=1):
            micro_start = time.perf_counter()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / options.accumulate).backward()
            clock.loss(loss.item())
            bar.update(len(x))
            micro_batch_seconds = time.perf_counter() - micro_start
            if index % options.accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            clock.step(global_batch)
            if step < 5:
                time.sleep(WARMUP_SECONDS)
            step += 1
            seconds, start = time.perf_counter() - start, time.perf_counter()
            message = {
                "scanning": f"step {step} loss {loss.item():.4f}",
                "micro-batches": f"step {step} loss {loss.item():.4f} {1 / micro_batch_seconds:.2f} it/s",
                "mean": f"step {step} {step * global_batch / (time.perf_counter() - begin):.1f} samples/s",
                "comma": f"step {step} {global_batch / seconds:.2f} samples/s".replace(".", ","),
                "thousands": f"step {step} {TOKENS * global_batch / seconds:,.0f} tokens/s",
            }
            if options.style in message:
                print(message[options.style], flush=True)
        bar.close()


if __name__ == "__main__":
    main()
