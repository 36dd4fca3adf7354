"""A training whose optimizer step is compiled, as in PyTorch's recipe: `torch.compile(optimizer.step)`.

python compiled_step.py --batch 8 --model
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", action="store_true", help="compile the model too")
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3))
    forward = torch.compile(model, backend=options.backend) if options.model else model

    @torch.compile(fullgraph=False, backend=options.backend)
    def update():
        optimizer.step()

    clock = Clock()
    loader = DataLoader(samples(options.batch * options.steps), batch_size=options.batch, shuffle=True)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        update()
        optimizer.zero_grad()
        clock.loss(loss.item())
        clock.step(len(x))
        print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
