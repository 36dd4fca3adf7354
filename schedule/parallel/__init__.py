"""What several ranks need: tensors, batches and layers cut over a mesh, and what travels between its ranks."""
