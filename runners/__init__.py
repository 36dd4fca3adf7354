"""How a candidate is tried: dry runs in fresh processes, on this machine or where Ray places them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
