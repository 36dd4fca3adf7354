"""`python -m redline.train`: `redline train`, whose ranks a launcher such as torchrun has started."""

import sys

from .tuner.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
