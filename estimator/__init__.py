"""Memory and time of any configuration on any cluster, predicted without a device."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
