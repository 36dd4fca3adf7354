"""Whether the runs of a command can be compared: they count the same, and learn the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from ...results import Measurement

FAR = 0.2
"""By what share of the first run's loss another's may be off at the same steps; beyond that it is another training."""
SCATTERS = 4.0
"""And by how many times what the first run's loss changes from one step to the next."""
LEAST_STEPS = 3
"""How many steps both have to have told a loss of."""


@dataclass
class Comparison:
    """The first run of a search that ended well, and others beside it."""

    unit: str = ""
    """Of its throughput."""
    samples: float | None = None
    """Of its steps."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """That it told, by step."""

    def why_not(self, measured: Measurement, samples: float | None, losses: Mapping[int, float]) -> str:
        """Why a run that ended well does not count; empty where it does. The first is what others are held against.

        Args:
            measured: what it came to.
            samples: of a step, where that is known.
            losses: that it told, by step.
        """
        if not self.unit:
            self.unit, self.samples, self.losses = measured.unit, samples, dict(losses)
        if measured.unit != self.unit:
            return f"it told {measured.unit}, and {self.unit} before: --metric says which counts"
        return _far_off(losses, self.losses) if samples == self.samples else ""


def _far_off(losses: Mapping[int, float], first: Mapping[int, float]) -> str:
    steps = sorted(losses.keys() & first.keys())
    if len(steps) < LEAST_STEPS:
        return ""
    expected = [first[step] for step in steps]
    off = median(losses[step] - first[step] for step in steps)
    scatter = median(abs(after - before) for before, after in pairwise(expected))
    if abs(off) <= max(FAR * median(map(abs, expected)), SCATTERS * scatter):
        return ""
    at = steps[-1]
    return f"its loss is {losses[at]:.4g} at step {at}, where that of the first run was {first[at]:.4g}"
