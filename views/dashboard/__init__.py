"""A local web page over every run under a folder, live while they run."""

from .library import Library
from .serve import serve

__all__ = ["Library", "serve"]
