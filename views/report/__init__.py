"""A run as one self-contained HTML page, made from trials.csv and what lies beside it."""

from .document import document
from .page import page
from .source import Source
from .write import write_report

__all__ = ["Source", "document", "page", "write_report"]
