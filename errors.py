"""The errors that redline raises, for `except redline.errors.UsageError`."""

from .base.errors import *  # noqa: F403
