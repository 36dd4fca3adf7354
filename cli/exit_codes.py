"""Exit codes of the command line."""

FOUND = 0
FAILED = 1
"""The machinery failed, not the candidates."""
USAGE = 2
NOTHING_FEASIBLE = 3
INTERRUPTED = 130
