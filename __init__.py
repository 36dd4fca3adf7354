"""redline finds the fastest way to train a model on the hardware you have.

Public names are resolved on first use, so `import redline` loads neither torch nor transformers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
