"""`python -m redline.train`: `redline train`, whose ranks a launcher such as torchrun has started."""

import sys

from .cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
