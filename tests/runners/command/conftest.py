"""Fixtures of commands."""

import pytest
from redline.space import Space


@pytest.fixture
def space():
    """A space of one knob."""
    made = Space()
    made.choice("micro_batch", [1, 2, 4])
    return made
