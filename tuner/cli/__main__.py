"""`python -m redline.tuner.cli`, the same as `redline`."""

from . import main

main()
