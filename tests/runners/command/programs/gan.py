"""A GAN, as in PyTorch's DCGAN tutorial: two optimizers that step in turn.

python gan.py --batch 8
"""

import argparse

import torch
from clock import Clock
from cost import wait
from small import FEATURES, samples
from torch import nn
from torch.utils.data import DataLoader

NOISE = 8


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(FEATURES, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        wait(len(x))
        return self.main(x).view(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator, discriminator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, FEATURES)), Discriminator()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    clock = Clock()
    loader = DataLoader(samples(options.batch * options.steps), batch_size=options.batch, shuffle=True)
    for i, (real, _) in enumerate(loader):
        ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
        discriminator.zero_grad()
        error_real = criterion(discriminator(real), ones)
        error_real.backward()
        fake = generator(torch.randn(len(real), NOISE))
        error_fake = criterion(discriminator(fake.detach()), zeros)
        error_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        error_g = criterion(discriminator(fake), ones)
        error_g.backward()
        optimizer_g.step()
        for loss in (error_real, error_fake, error_g):
            clock.loss(loss.item())
        clock.step(len(real))
        print(f"[{i}/{len(loader)}] Loss_D: {(error_real + error_fake).item():.4f} Loss_G: {error_g.item():.4f}")


if __name__ == "__main__":
    main()
