"""What a command is tuned for: a number that it tells, and how that becomes a throughput."""

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
"""Metrics that say how long a step takes, in ms; of `step`, its number, it is told by when it was said."""
BESIDE = ("loss", "memory_mib", "memory_gib")
"""Metrics that are kept beside it."""
PREFERRED = (*RATES, *STEP_TIMES)
"""Which of several is the objective where nobody says."""
DIRECTIONS = ("max", "min")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A metric, as costs that add up: what is smaller is better, and steadiness is judged by them."""

    name: str
    """The metric."""
    smaller: bool = False
    """Whether a smaller value is better."""
    work: float | None = None
    """Samples of a step, where that is known and the metric is a time of a step."""

    @property
    def unit(self) -> str:
        """Of the throughput."""
        if self.name in RATES:
            return RATES[self.name]
        if self.name in STEP_TIMES:
            return "steps/s" if self.work is None else "samples/s"
        if self.name.endswith("_per_second"):
            return f"{self.name.removesuffix('_per_second')}/s"
        return f"1/{self.name}" if self.smaller else self.name

    def cost(self, value: float) -> float:
        """What a value costs: milliseconds a step or a unit, or the value itself where smaller is better."""
        if self.name in STEP_TIMES:
            return value * STEP_TIMES[self.name]
        return value if self.smaller else 1e3 / value

    def throughput(self, cost: float) -> float:
        """Of a cost."""
        if self.name in STEP_TIMES:
            return (self.work or 1.0) * 1e3 / cost
        return 1.0 / cost if self.smaller else 1e3 / cost

    def cost_of(self, throughput: float) -> float:
        """Of a throughput, as `throughput` gives it."""
        return self.throughput(throughput)  # both are one over the other, by the same factor


def objective_of(name: str | None, direction: str | None) -> tuple[str | None, bool]:
    """The metric that is asked for, None for the first of `PREFERRED` that is seen, and whether smaller is better.

    Raises:
        UsageError: the direction is none, or turns a throughput around.
    """
    if direction is not None and direction not in DIRECTIONS:
        raise UsageError(unknown("direction", direction, DIRECTIONS))
    if direction == "min" and name in RATES:
        raise UsageError(f"{name} is a throughput, of which more is better; leave --direction out")
    if direction == "max" and name in STEP_TIMES:
        raise UsageError(f"{name} is a time, of which less is better; leave --direction out")
    return name, direction == "min"


@dataclass(frozen=True)
class Requirement:
    """A bound on what a command tells, such as `p99_ms < 200`."""

    rule: Expression

    @classmethod
    def read(cls, text: str) -> "Requirement":
        """A bound as it is written, in the grammar of a space's rules.

        Raises:
            UsageError: it is no condition.
        """
        names = [
            name for name in dict.fromkeys(_NAME.findall(text)) if name not in ("and", "or", "not", "in", "min", "max")
        ]
        try:
            rule = parse(text, {name: Knob(name, [0.0, 1.0]) for name in names})
            if not isinstance(rule.evaluate(dict.fromkeys(names, 0.5)), bool):
                raise SpaceError("it is a number, not a condition")
        except SpaceError as error:
            raise UsageError(f"--require '{text}': {error}") from None
        return cls(rule)

    def broken(self, values: Mapping[str, float]) -> str:
        """What is wrong with these values; empty where they keep it."""
        missing = [name for name in self.rule.names if name not in values]
        if missing:
            return f"nothing said {', '.join(missing)}, of which `{self.rule}` is required"
        if self.rule.evaluate(values) is True:
            return ""
        told = ", ".join(f"{name} = {values[name]:g}" for name in self.rule.names)
        return f"{told}, but `{self.rule}` is required"


def chosen(name: str | None, seen: Sequence[str]) -> str | None:
    """The objective among the metrics that were seen; None where it is not among them."""
    if name is not None:
        return name if name in seen else None
    return next((each for each in PREFERRED if each in seen), None)


def usable(value: float) -> bool:
    """Whether a number can be an objective's."""
    return math.isfinite(value) and value > 0
