"""Exit codes of the command line."""

FOUND = 0
FAILED = 1
"""A failure of redline itself or of the system, not of the candidates."""
USAGE = 2
NOTHING_FEASIBLE = 3
INTERRUPTED = 130
