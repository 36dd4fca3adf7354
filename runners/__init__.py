"""How a candidate is tried: in fresh processes, on this machine or where Ray or Slurm place them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
