"""Base of the package: errors, devices, files, locks, processes, and private names of torch, transformers and Optuna."""
