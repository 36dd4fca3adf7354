"""The request of a search: its options, its target, and its record in run.yaml."""
