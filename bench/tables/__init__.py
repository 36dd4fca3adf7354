"""Measured tables of redline and of others in one form: `read_tables` for the estimator, `read_folder` for searches."""

from .form import Left, Run
from .reading import Source, read_source, read_tables
from .recorded import Surface, read_folder, read_surface
