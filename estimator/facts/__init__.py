"""Facts of a model: from a trace of one step without memory or arithmetic, or from shape numbers."""
