"""Other people's trainers, a module each: exports, launchers, and their files and commands read back.

The names are resolved on first use: a module of a framework is imported when it is asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
