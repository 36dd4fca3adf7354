"""The objective of a command: a metric that it reports, and its conversion to a throughput."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...base.errors import SpaceError, UsageError, unknown
from ...space.expression import Expression
from ...space.grammar import parse
from ...space.knob import Knob

RATES = {
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "steps_per_second": "steps/s",
}
"""Metrics that are throughputs, with their units."""
STEP_TIMES = {"step_ms": 1.0, "step_s": 1e3, "step": 1.0}
"""Metrics that are step times, with their factor to ms. `step`, a step's number, is timed by when it is reported."""
BESIDE = ("loss", "memory_mib", "memory_gib")
"""Metrics that are recorded besides the objective."""
PREFERRED = (*RATES, *STEP_TIMES)
"""Default objectives, by preference."""
DIRECTIONS = ("max", "min")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A metric as a cost: smaller is better, and costs add up, so that steadiness can be judged by them."""

    name: str
    smaller: bool = False
    """True if a smaller value is better."""
    samples_per_step: float | None = None
    """If known, for a metric that is a step time."""

    @property
    def unit(self) -> str:
        """Unit of the throughput."""
        if self.name in RATES:
            return RATES[self.name]
        if self.name in STEP_TIMES:
            return "steps/s" if self.samples_per_step is None else "samples/s"
        if self.name.endswith("_per_second"):
            return f"{self.name.removesuffix('_per_second')}/s"
        return f"1/{self.name}" if self.smaller else self.name

    def cost(self, value: float) -> float:
        """Returns the cost of a value: milliseconds per step or unit, or the value itself if smaller is better."""
        if self.name in STEP_TIMES:
            return value * STEP_TIMES[self.name]
        return value if self.smaller else 1e3 / value

    def throughput(self, cost: float) -> float:
        """Returns the throughput for a cost."""
        if self.name in STEP_TIMES:
            return (self.samples_per_step or 1.0) * 1e3 / cost
        return 1.0 / cost if self.smaller else 1e3 / cost

    def cost_of(self, throughput: float) -> float:
        """Returns the cost for a throughput."""
        return self.throughput(throughput)  # throughput = factor / cost is its own inverse


def smaller_is_better(name: str | None, direction: str | None) -> bool:
    """True if smaller values of the requested metric are better. The metric is None for the first of `PREFERRED` that is
    reported.

    Raises:
        UsageError: the direction is unknown, or wrong for a throughput or step time.
    """
    if direction is not None and direction not in DIRECTIONS:
        raise UsageError(unknown("direction", direction, DIRECTIONS))
    if direction == "min" and name in RATES:
        raise UsageError(f"{name} is a throughput, so larger is better; leave direction out")
    if direction == "max" and name in STEP_TIMES:
        raise UsageError(f"{name} is a time, so smaller is better; leave direction out")
    return direction == "min"


@dataclass(frozen=True)
class Requirement:
    """A bound on a command's metrics, such as `p99_ms < 200`."""

    rule: Expression

    @classmethod
    def read(cls, bound: str) -> "Requirement":
        """Parses a bound, in the grammar of a space's rules.

        Raises:
            UsageError: it is not a condition.
        """
        names = [
            name for name in dict.fromkeys(_NAME.findall(bound)) if name not in ("and", "or", "not", "in", "min", "max")
        ]
        try:
            rule = parse(bound, {name: Knob(name, [0.0, 1.0]) for name in names})
            # Evaluated once at any values, because a rule without a comparison parses as well.
            if not isinstance(rule.evaluate(dict.fromkeys(names, 0.5)), bool):
                raise SpaceError("it is a number, not a condition")
        except SpaceError as error:
            raise UsageError(f"require '{bound}': {error}") from None
        return cls(rule)

    def violation(self, values: Mapping[str, float]) -> str | None:
        """Returns an error if these values break the bound, otherwise None."""
        missing = [name for name in self.rule.names if name not in values]
        if missing:
            return f"the command did not report {', '.join(missing)}, but `{self.rule}` is required"
        if self.rule.evaluate(values) is True:
            return None
        reported = ", ".join(f"{name} = {values[name]:g}" for name in self.rule.names)
        return f"{reported}, but `{self.rule}` is required"


def chosen(name: str | None, reported: Sequence[str]) -> str | None:
    """Returns the objective among the metrics reported so far; None if it is not among them."""
    if name is not None:
        return name if name in reported else None
    return next((metric for metric in PREFERRED if metric in reported), None)


def usable(value: float) -> bool:
    """True if a number can be a value of an objective."""
    return math.isfinite(value) and value > 0
