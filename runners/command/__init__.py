"""Somebody else's command as a trial: rendered for a configuration, started, read while it runs, and ended."""
