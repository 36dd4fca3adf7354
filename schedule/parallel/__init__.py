"""Parallelism over several ranks: tensors, batches and layers sharded over a mesh, and the communication between ranks."""
