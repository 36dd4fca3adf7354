"""A trial in its ranks: jobs, dry runs, timing, memory, and the classification of failures."""
