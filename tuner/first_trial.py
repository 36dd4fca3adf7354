"""The trial that a search begins with, which its gain is measured against."""

import contextlib
from collections.abc import Iterator

from ..errors import SpaceError
from ..space import Config, Space


def first_trial(space: Space) -> tuple[tuple[Config, ...], Config | None]:
    """The default configuration, and the same with the smallest micro-batch for when it does not run."""
    default = space.default()
    if "micro_batch" not in default:
        return (default,), None
    smallest = min(space["micro_batch"].values)
    for config in _with_micro_batch(space, default, smallest):
        return (default,), config
    return (default,), None


def _with_micro_batch(space: Space, default: Config, smallest: int) -> Iterator[Config]:
    chosen = {knob.name: default[knob.name] for knob in space.knobs if not knob.derived and knob.name in default}
    with contextlib.suppress(SpaceError):  # it need not be valid with the other defaults
        yield space.config(**{**chosen, "micro_batch": smallest})
