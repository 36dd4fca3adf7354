"""Searches for a team: many searches of many people on one pool of devices, over HTTP."""
