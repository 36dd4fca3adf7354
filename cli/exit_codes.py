"""Exit codes of the command line."""

FOUND = 0
FAILED = 1
"""Redline itself or the system failed, not a candidate."""
USAGE = 2
NOTHING_FEASIBLE = 3
NO_ROOM = 4
"""Others used the devices of the cluster for as long as the search could wait."""
INTERRUPTED = 130
"""128 + 2 (SIGINT), as shells report a command that Ctrl-C ended."""
