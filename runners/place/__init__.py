"""Runners by where trials run: on this machine, on devices that Ray allocates, or emulated on one device."""
