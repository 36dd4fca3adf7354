"""Spaces that other tools state, one format a file: what may vary there, and what of it cannot be carried over."""

from .draft import ForeignSpace
from .narrow import narrow
from .source import FORMATS, Source, find_source

__all__ = ["FORMATS", "ForeignSpace", "Source", "find_source", "narrow"]
