"""Data of a training: from files to batches, in an order that depends only on seed and position."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
