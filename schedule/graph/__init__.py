"""What works on a traced graph of a module: patterns, and the subgraphs that they find."""
