"""What a training loop of somebody's own works with: the model, the optimizer and the batches of a configuration."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
