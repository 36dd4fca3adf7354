"""Numbers that a command reports while it runs, in its output and by `redline.report`, and a suggestion for output that
contains a speed in an unknown form."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import UsageError
from ...base.option import option
from ..trial import failure
from .objective import BESIDE, PREFERRED

_AMOUNT = r"\d[\d,]*\.?\d*[kKMG]?"
_UNITS = (
    ("tokens_per_second", r" ?(?:tok(?:en)?s?(?: per second|/s(?:ec(?:ond)?)?)|tps\b(?! ?[:=]))"),
    (
        "samples_per_second",
        r" ?(?:samples?|seqs?|sequences?|img|imgs|images?|ex|examples?|sentences?)(?:/s(?:ec(?:ond)?)?| per second)",
    ),
    ("steps_per_second", r" ?(?:it|iters?|steps?|batch(?:es)?)/s(?:ec)?\b"),
    ("step_ms", r" ?ms(?:/(?:it|iter|step|batch))?\b"),
    ("step_s", r" ?s(?:ec)?/(?:it|iter|step|batch)\b"),
)
"""Units of speeds behind a number, by metric."""
_NAMES = (
    (
        "tokens_per_second",
        r"(?:tokens?_per_sec(?:ond)?|tok(?:en)?s?/s(?:ec)?(?:ond)?|tps|throughput \(tok\w*/s\))[\"']?[:=]? *",
    ),
    ("samples_per_second", r"(?:samples?_per_sec(?:ond)?|samples?/s(?:ec)?)[\"']?[:=]? *"),
    ("step_ms", r"(?:time per (?:iteration|step) \(ms\)|step_?time_?ms|iter_time \(ms\))[\"']?[:=]? *"),
    ("step_s", r"(?:step_?time|iter_?time|sec(?:onds)?_per_(?:step|iter)|time/step)[\"']?[:=]? *"),
)
"""Names of speeds in front of a number."""
NOT_TRAINING = re.compile(
    r"scan|token[iz]|load|cach|valid|\bval\b|eval|\btest|infer|predict|generat|download|\bmap\b|filter|extract|sanity|sav(?:e|ing)|"
    r"checkpoint|prepar|process",
    re.IGNORECASE,
)
"""Words of lines about other work than training."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A `--metric` that reads a line."""

    metric: str
    """The regular expression."""
    line: str
    """The line that it was built from."""
    value: str
    """The number that it reads there."""
    matches: int
    """Number of the given lines that it reads."""

    @property
    def text(self) -> str:
        """What to add to the command, in words."""
        times = f", and reads {self.matches} of the last lines" if self.matches > 1 else ""
        return (
            f"{option('metric', self.metric)} reads '{self.value}' in "
            f"'{failure.shortened(self.line.strip(), 100)}'{times}"
        )


def suggestion(lines: Sequence[str]) -> Suggestion | None:
    """Returns the metric that reads most of these lines; None if none of them contains a speed."""
    best: Suggestion | None = None
    # From the last line on: of metrics that match equally many lines the latest counts, which is that of the training.
    for line in reversed(lines):
        if NOT_TRAINING.search(line):
            continue
        for metric, value in _candidates(line):
            matches = sum(re.search(metric, output) is not None for output in lines)
            if best is None or matches > best.matches:
                best = Suggestion(metric=metric, line=line, value=value, matches=matches)
    return best


def _candidates(line: str) -> list[tuple[str, str]]:
    """Returns metrics that read a line, with the numbers that they read."""
    readings = []
    for name, unit in _UNITS:
        if (match := re.search(rf"(?P<number>{_AMOUNT}){unit}", line, re.IGNORECASE)) is not None:
            prefix = _literal(line[: match.start()])
            suffix = _escaped(line[match.end("number") : match.end()])
            readings.append((rf"{prefix}(?P<{name}>[\d.,]+[kKMG]?){suffix}", match["number"]))
    for name, label in _NAMES:
        if (match := re.search(rf"(?P<label>{label})(?P<number>{_AMOUNT})", line, re.IGNORECASE)) is not None:
            readings.append((rf"{_escaped(match['label'])}(?P<{name}>[\d.,]+[kKMG]?)", match["number"]))
    return readings


def _literal(prefix: str) -> str:
    """Returns the words directly in front of a number as a pattern; numbers in them may differ."""
    words = re.search(r"[A-Za-z_(\[|,:=][^\d]{0,20}$", prefix)
    return _escaped(words[0]) if words else ""


def _escaped(literal: str) -> str:
    """Escapes a literal for a regular expression, with spaces as they are, so that it can be read."""
    return re.escape(literal).replace(r"\ ", " ")


LONGEST_LINE = 64 * 1024
"""Longest part of a line that is read, bytes."""
RANKS_APART = 4
"""Number of steps by which ranks that each show a progress bar may differ. A bar that falls to less than half has
restarted.
"""
NEAR_S = 0.005
"""Shortest interval between two times by which a step is timed, s. On a busy machine a line may be read that much late."""
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

_BAR = re.compile(
    r"^\s*(?P<name>.*?)\b\d+%\|[^|]*\| *(?P<step>\d+)/\d+ \[\d+:\d+(?::\d+)?<(?!\?, \?)[^\]]*"
    r"(?:(?:it|step|iter|batch)/s|s/(?:it|step|iter|batch))"
)
"""A progress bar of tqdm, as `tqdm.format_meter` writes it."""
_COUNTS_STEPS = re.compile(r"\b(?:epoch[ :=\[#]*\d|train|steps?\b|iter|fine-?tun|loss\b)", re.IGNORECASE)
"""Names of bars that count training steps. A bar without a name may count anything, one over epochs counts epochs."""
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
        return values if self.requested else {**_printed(line), **values}


class StepNumbers:
    """Measures step times by when step numbers are reported.

    A progress bar is drawn several times per step, and by every rank. On a busy machine its lines arrive late and
    together. A step is timed by the last of several numbers reported together, and never by two reported within
    `NEAR_S`.
    """

    def __init__(self) -> None:
        self._from: tuple[float, float] | None = None
        """The last timed step and when it was reported."""
        self._last: tuple[float, float] | None = None
        """The highest step and when it was first reported."""

    def add(self, step: float, at: float) -> float | None:
        """Adds a step number reported at a time, s.

        Returns:
            The duration of the steps reported before that time, as `step_ms` returns it.
        """
        duration_ms = self.step_ms() if self._last is not None and at > self._last[1] else None
        if self._last is not None and step <= self._last[0]:
            # Another rank that is behind, or the same bar drawn again: only a restart falls further.
            if step >= self._last[0] / 2 or self._last[0] <= RANKS_APART:
                return duration_ms
            self._from = None
        self._last = (step, at)
        return duration_ms

    def step_ms(self) -> float | None:
        """Returns the duration of each step since the last timed one, ms; None if it is not known yet."""
        if self._last is None or self._from is None:
            self._from = self._last
            return None
        steps, seconds = self._last[0] - self._from[0], self._last[1] - self._from[1]
        if not steps or seconds < NEAR_S:
            return None
        self._from = self._last
        return seconds / steps * 1e3


def _printed(line: str) -> dict[str, float]:
    """Returns the metrics that are read without a request: the step of a progress bar over training steps, and a loss."""
    values = {}
    bar = _BAR.match(line)
    if bar is not None and _COUNTS_STEPS.search(bar["name"]) and not NOT_TRAINING.search(bar["name"]):
        values["step"] = float(bar["step"])
    loss = _LOSS.search(line)
    if loss is not None and not NOT_TRAINING.search(line[: loss.start()]):
        values["loss"] = float(loss["loss"])
    return values


def lines_for(metrics: Sequence[str]) -> Lines:
    """Returns the reader of the requested metrics; without any, of progress bars over steps and of JSON lines.

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
