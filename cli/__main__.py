"""`python -m redline.cli`, the same as `redline`."""

from . import main

main()
