"""Traced graphs of modules: patterns, and the subgraphs that they match."""
