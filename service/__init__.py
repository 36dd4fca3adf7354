"""Searches for a team on shared devices: an API over HTTP, a queue in SQL, and searches that run on Ray."""
