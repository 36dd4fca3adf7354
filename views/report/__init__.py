"""The report of a run: one self-contained HTML page."""

from .page import document, page, write_report
from .source import Source

__all__ = ["Source", "document", "page", "write_report"]
