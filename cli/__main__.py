"""Runs the command line as `python -m redline.cli`."""

from . import main

main()
