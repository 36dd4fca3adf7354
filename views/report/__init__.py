"""The report of a run: one self-contained HTML page, written from trials.csv and the files beside it."""

from .page import document, page, write_report
from .run_files import RunFiles

__all__ = ["RunFiles", "document", "page", "write_report"]
