"""Runs candidates in fresh processes, on this machine or on hosts that Ray allocates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
