"""Linear regression without torch.

python numpy_loop.py --batch 8
"""

import argparse

import numpy as np
from clock import Clock
from cost import wait


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    truth, weights = generator.normal(size=16), np.zeros(16)
    clock = Clock()
    for step in range(options.steps):
        x = generator.normal(size=(options.batch, 16))
        wait(len(x))
        error = x @ (weights - truth)
        loss = float((error**2).mean())
        weights -= 0.05 * (2 / len(x)) * (x.T @ error)
        clock.loss(loss)
        clock.step(len(x))
        print(f"step {step} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
