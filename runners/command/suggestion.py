"""Suggests a `--metric` for output that contains a speed in an unknown form, and tries it on the same lines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...base.option import option
from ..trial import failure

_NUMBER = r"\d[\d,]*\.?\d*[kKMG]?"
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
        if (match := re.search(rf"(?P<number>{_NUMBER}){unit}", line, re.IGNORECASE)) is not None:
            prefix = _literal(line[: match.start()])
            suffix = _escaped(line[match.end("number") : match.end()])
            readings.append((rf"{prefix}(?P<{name}>[\d.,]+[kKMG]?){suffix}", match["number"]))
    for name, label in _NAMES:
        if (match := re.search(rf"(?P<label>{label})(?P<number>{_NUMBER})", line, re.IGNORECASE)) is not None:
            readings.append((rf"{_escaped(match['label'])}(?P<{name}>[\d.,]+[kKMG]?)", match["number"]))
    return readings


def _literal(prefix: str) -> str:
    """Returns the words directly in front of a number as a pattern; numbers in them may differ."""
    words = re.search(r"[A-Za-z_(\[|,:=][^\d]{0,20}$", prefix)
    return _escaped(words[0]) if words else ""


def _escaped(literal: str) -> str:
    """Escapes a literal for a regular expression, with spaces as they are, so that it can be read."""
    return re.escape(literal).replace(r"\ ", " ")
