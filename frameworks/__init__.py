"""Exports, launchers, and readers of files and commands of other trainers, one module per framework.

Names are resolved on first use, so that a framework's module is imported only if it is needed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
