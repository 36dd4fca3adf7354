"""Metrics of a command: the numbers that it reports in its output and by `redline.report`, the one to optimise, and bounds on
them."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import SpaceError, UsageError, unknown
from ...base.option import option
from ...space.expression import Expression
from ...space.grammar import parse
from ...space.knob import Knob

RATES = {
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "steps_per_second": "steps/s",
}
"""Metrics that are throughputs, with their units."""
STEP_TIMES = {"step_ms": 1.0, "step_s": 1e3}
"""Metrics that are step times, with their factor to ms."""
BESIDE = ("loss", "step", "memory_mib", "memory_gib")
"""Metrics that are recorded besides the objective; `step` is the number of the step that a loss is of."""
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


_NOT_TRAINING = re.compile(
    r"scan|token[iz]|load|cach|valid|\bval\b|eval|\btest|infer|predict|generat|download|\bmap\b|filter|extract|sanity|sav(?:e|ing)|"
    r"checkpoint|prepar|process",
    re.IGNORECASE,
)
"""Words of lines about other work than training."""


LONGEST_LINE = 64 * 1024
"""Longest part of a line that is read, bytes."""
_NUMBER = re.compile(
    r"(?P<number>[-+]?(?:\d[\d.,]*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))(?P<scale>[kKMG])?", re.IGNORECASE
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
"""A number with commas between thousands, such as `1,234.5`."""
_DECIMAL_COMMA = re.compile(r"[-+]?(?:\d+,(?:\d{1,2}|\d{4,})|\d{1,3}(?:\.\d{3})+,\d+)")
"""A number with a decimal comma, such as `13,25` or `1.234,5`."""
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
"""Factors of the letters behind a number. Trainers print tokens and samples in powers of ten."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Control sequences of a terminal (ECMA-48), which set colours and move the cursor."""
_RANK = re.compile(r"^(?:(?:\[(?:rank ?|default)\d+\]|\[\d+,\d+\]<std(?:out|err)>): ?)+")
"""Prefixes of a rank's lines by torchrun (`--tee`, `--local-ranks-filter`), by torch's own exception hook and by mpirun."""
_SPLIT = re.compile(rb"[\r\n]")
_PATTERN_CHARACTERS = re.compile(r"\(\?|[\\\[\]*+^$|{}]")
"""Characters that regular expressions contain and names, such as `throughput(tps)`, do not."""
_LOSS = re.compile(
    r"(?<![\w/.])(?:lm[ _]|train[/_ ]?|reduced_train_)?loss(?: train)?['\"]?\s*[:=]\s*'?"
    r"(?P<loss>[-+]?\d[\d.]*(?:[eE][-+]?\d+)?|nan)\b",
    re.IGNORECASE,
)
"""A training loss, as programs print it."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Numbers reported at one time."""

    values: Mapping[str, float]
    """By metric."""
    at: float
    """Time, s of the monotonic clock."""


@dataclass
class Lines:
    """Splits a stream into lines, also at carriage returns, and reads numbers from them.

    Args:
        patterns: regular expressions whose groups are named by metrics.
        names: metrics by their names in JSON objects.
        requested: the requested metrics in order; empty for the usual ones.
    """

    patterns: Sequence[re.Pattern[str]]
    names: Mapping[str, str] = field(default_factory=dict)
    requested: Sequence[str] = ()
    _incomplete: bytes = field(default=b"", init=False)

    @property
    def objective(self) -> str | None:
        """The requested objective; None if none was requested."""
        return next((name for name in self.requested if name not in BESIDE), None)

    def feed(self, data: bytes) -> Iterator[str]:
        """Yields the lines that these bytes complete."""
        *lines, self._incomplete = _SPLIT.split(self._incomplete + data)
        # A program may print without line ends, such as binary data: this bounds the memory.
        self._incomplete = self._incomplete[:LONGEST_LINE]
        for line in lines:
            if line:
                yield _text(line[:LONGEST_LINE])

    def remaining(self) -> Iterator[str]:
        """Yields the last line if it has no line end."""
        incomplete, self._incomplete = self._incomplete, b""
        if incomplete:
            yield _text(incomplete)

    def read(self, line: str) -> dict[str, float]:
        """Returns the numbers in a line, by metric. If several patterns match, the first one counts."""
        values: dict[str, float] = {}
        for pattern in self.patterns:
            if match := pattern.search(line):
                for name, printed in match.groupdict().items():
                    if printed is not None and name not in values and (value := number(printed)) is not None:
                        values[name] = value
        if self.names and line.lstrip().startswith("{"):
            numbers = _json_numbers(line)
            values = {**{self.names[name]: numbers[name] for name in self.names if name in numbers}, **values}
        return values if self.requested else {**_printed_loss(line), **values}


def _printed_loss(line: str) -> dict[str, float]:
    """Returns the training loss that a line contains, by its metric; empty without one."""
    loss = _LOSS.search(line)
    if loss is None or _NOT_TRAINING.search(line[: loss.start()]):
        return {}
    return {"loss": float(loss["loss"])}


def lines_for(metrics: Sequence[str]) -> Lines:
    """Returns the reader of the requested metrics; without any, of JSON lines and of printed losses.

    Args:
        metrics: regular expressions with named groups, or names in JSON lines: `NAME`, or `METRIC=NAME`
            to rename it. Otherwise a name is shortened to the part after the last slash if that is a known metric,
            such as `train/steps_per_second`.

    Raises:
        UsageError: a regular expression is invalid, has no named group, or a name is used twice.
    """
    if not metrics:
        defaults = {name: name for name in (*PREFERRED, *BESIDE)}
        return Lines([], defaults)
    patterns: list[re.Pattern[str]] = []
    names: dict[str, str] = {}
    requested: list[str] = []
    for expression in metrics:
        # Names in JSON lines may contain slashes, brackets and spaces, but not these characters.
        if _PATTERN_CHARACTERS.search(expression) or expression.count("(") != expression.count(")"):
            pattern = _pattern(expression)
            patterns.append(pattern)
            requested += [name for name in pattern.groupindex if name not in requested]
            continue
        metric, equals, name = expression.partition("=")
        if not (equals and metric.isidentifier() and name):
            last_part = expression.rpartition("/")[2]
            metric, name = last_part if last_part in (*PREFERRED, *BESIDE) else expression, expression
        if metric in names.values():
            namesake = next(earlier for earlier in names if names[earlier] == metric)
            raise UsageError(
                f"{option('metric')}: '{namesake}' and '{name}' are both called {metric}; write one as OTHER={name}"
            )
        names[name] = metric
        requested.append(metric)
    return Lines(patterns, names, requested)


def _pattern(expression: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UsageError(f"{option('metric')} '{expression}' is not a valid regular expression: {error}") from None
    if not pattern.groupindex:
        raise UsageError(
            f"{option('metric')} '{expression}' has no named group; write one for the number, such as "
            r"'speed: (?P<tokens_per_second>[\d.]+)'"
        )
    return pattern


def _text(line: bytes) -> str:
    """Decodes a line, without colours and the name of the rank that printed it."""
    return _RANK.sub("", _COLOURS.sub("", line.decode("utf-8", "replace")))


def number(text: str) -> float | None:
    """Parses a number as programs print it, such as `1,234.5`, `13,25`, `26.5K`, `nan`; None if it is not a number.

    A comma in front of exactly three digits separates thousands, any other is a decimal comma.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    digits = match["number"]
    if _DECIMAL_COMMA.fullmatch(digits):
        digits = digits.replace(".", "").replace(",", ".")
    elif digits.count(".") > 1 or ("," in digits and not _THOUSANDS.fullmatch(digits)):
        return None
    return float(digits.replace(",", "")) * _SCALES[(match["scale"] or "").lower()]


def _json_numbers(line: str) -> dict[str, float]:
    """Returns the numbers of a JSON object; none of anything else."""
    try:
        document = json.loads(line)
    except ValueError:
        return {}
    return numbers_of(document) if isinstance(document, dict) else {}


def numbers_of(document: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a mapping."""
    return {
        name: float(value)
        for name, value in document.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
