"""Trials of a user's own command: rendered for a configuration, started, read while it runs, and ended."""
