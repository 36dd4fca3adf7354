"""How a workload is trained in one configuration: mesh, precision, passes, and what it computes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
