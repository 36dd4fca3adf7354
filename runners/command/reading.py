"""What a command tells while it runs: numbers in the lines it prints, in files it writes, and by `redline.report`."""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import UsageError
from ...reporting import TIME
from .objective import BESIDE, PREFERRED

LONGEST_LINE = 64 * 1024
"""Bytes of a line that are looked at; of a longer one the first."""
_NUMBER = re.compile(
    r"(?P<number>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))(?P<scale>[kKMG])?",
    re.IGNORECASE,
)
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SPLIT = re.compile(rb"[\r\n]")

KNOWN = {
    # megatron/training/training.py
    "Megatron-LM": r"elapsed time per iteration \(ms\): (?P<step_ms>[\d.]+)(?:.*?lm loss: (?P<loss>[\d.Ee+-]+|nan))?",
    # NeMo's progress on Lightning
    "NeMo": r"reduced_train_loss: (?P<loss>[\d.eE+-]+|nan) \| train_step_timing in s: (?P<step_s>[\d.]+)",
    # src/nanotron/trainer.py; earlier versions wrote 8.66E+05
    "nanotron": r"tokens_per_sec: (?P<tokens_per_second>[\d.]+(?:[KMG]|E[+-]\d+)?) \|(?:.*?lm_loss: (?P<loss>[\d.Ee+-]+|nan))?",
    # torchtitan/components/metrics.py: tps is a device's
    "torchtitan": r"step: +(?P<step>\d+) +(?:loss: +(?P<loss>[\d.]+|nan))?.*?tps: +[\d,]+",
    # deepspeed/utils/timer.py
    "DeepSpeed": r"CurrSamplesPerSec=(?P<samples_per_second>[\d.]+)",
    # litgpt/pretrain.py, litgpt/finetune/lora.py; the time beside it is a micro-batch's
    "LitGPT": r"\biter \d+ step (?P<step>\d+) \| loss train: (?P<loss>[\d.]+|nan),",
    # tqdm, by which transformers.Trainer, accelerate's examples, LLaMA-Factory, axolotl and Lightning show progress; a bar
    # with a name is of steps only where that says so: others are of files that are loaded, or of data
    "a progress bar": (
        r"^\s*(?:[^|%]*\b(?i:epochs?|train\w*|steps?|iter\w*)\b[^|%]*)?\d+%\|[^|]*\| *(?P<step>\d+)/\d+ "
        r"\[\d+:\d+(?::\d+)?<(?!\?, \?)[^\]]*(?:it/s|s/it)"
    ),
}
"""How frameworks print what a step took, and where in their sources that is."""
_SPOKEN = {
    # transformers.Trainer prints its losses as a dict, Megatron and others in their own lines
    "transformers.Trainer": r"\{'loss': '?(?P<loss>[\d.eE+-]+|nan)'?,",
}


@dataclass(frozen=True, slots=True)
class Told:
    """Numbers that were told at one moment."""

    values: Mapping[str, float]
    """By metric."""
    at: float
    """When, s of the monotonic clock."""


@dataclass
class Lines:
    """Splits a stream into lines, at carriage returns too, and finds numbers in them.

    Args:
        patterns: regular expressions whose groups have the names of metrics.
        names: metrics to be taken of lines that are JSON objects.
        names_known: whether nobody asked for these, so that they are what known frameworks print.
    """

    patterns: Sequence[re.Pattern[str]]
    names: Sequence[str] = ()
    names_known: bool = False
    _rest: bytes = field(default=b"", init=False)

    @property
    def first(self) -> str | None:
        """The metric that was asked for first; None where none was."""
        if self.names_known:
            return None
        groups = [name for pattern in self.patterns for name in pattern.groupindex]
        return next((name for name in (*groups, *self.names) if name not in BESIDE), None)

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that are complete with these bytes."""
        *whole, self._rest = _SPLIT.split(self._rest + data)
        self._rest = self._rest[:LONGEST_LINE]
        for line in whole:
            if line:
                yield _text(line[:LONGEST_LINE])

    def last(self) -> Iterator[str]:
        """What is left without an end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _text(rest)

    def read(self, line: str) -> dict[str, float]:
        """The numbers in a line, by metric; of several patterns the first that finds one."""
        found: dict[str, float] = {}
        for pattern in self.patterns:
            if match := pattern.search(line):
                for name, text in match.groupdict().items():
                    if text is not None and name not in found and (value := number(text)) is not None:
                        found[name] = value
        if self.names and line.lstrip().startswith("{"):
            found = {**_of_object(line, self.names), **found}
        return found


class Appended:
    """Numbers in a file that grows: JSON lines, or CSV with a header.

    Args:
        path: need not be there yet.
        names: metrics to be taken; all numbers where there are none.
    """

    def __init__(self, path: Path, names: Sequence[str] = ()) -> None:
        self.path = path
        self._names = tuple(names)
        self._at, self._rest = 0, b""
        self._header: list[str] | None = None

    def read(self, now: float) -> list[Told]:
        """What was appended since it was last asked, in its order.

        Args:
            now: the moment that rows without one of their own are from, s.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in whole:
            values = self._row(line.decode("utf-8", "replace").strip())
            at = values.pop(TIME, now)
            if values:
                found.append(Told(values, at))
        return found

    def _row(self, line: str) -> dict[str, float]:
        if line.startswith("{"):
            return _of_object(line, self._names)
        if self.path.suffix != ".csv" or not line:
            return {}
        cells = next(csv.reader([line]))
        if self._header is None:
            self._header = cells
            return {}
        row = {name: number(text) for name, text in zip(self._header, cells)}
        return {
            name: value for name, value in row.items() if value is not None and (not self._names or name in self._names)
        }


def lines_for(metrics: Sequence[str]) -> Lines:
    """What reads the metrics that are asked for, or what known frameworks print where none is.

    Args:
        metrics: names, or regular expressions with named groups.

    Raises:
        UsageError: one is no regular expression, or none of its groups has a name.
    """
    patterns, names = [], []
    for text in metrics:
        if text.isidentifier():
            names.append(text)
            continue
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise UsageError(f"--metric '{text}' is no regular expression: {error}") from None
        if not pattern.groupindex:
            raise UsageError(
                f"--metric '{text}' names no number; write it as a group with a name, such as "
                r"'speed: (?P<tokens_per_second>[\d.]+)'"
            )
        patterns.append(pattern)
    if not metrics:
        patterns = [re.compile(each) for each in (*KNOWN.values(), *_SPOKEN.values())]
        names = [*PREFERRED, *BESIDE]
    return Lines(patterns, names, names_known=not metrics)


def near_misses(lines: Sequence[str], wanted: Sequence[str], most: int = 3) -> list[str]:
    """Of these lines those that may be meant: with a number and a word of a metric's name."""
    words = {
        word for name in wanted for word in name.lower().split("_") if len(word) > 2 and word not in ("per", "second")
    }
    words |= {"tok", "sample", "iter", "step", "it/s", "sec"} if not words else set()
    found = [
        line for line in lines if any(char.isdigit() for char in line) and any(word in line.lower() for word in words)
    ]
    return found[-most:]


def _text(line: bytes) -> str:
    """A line without colours."""
    return _COLOURS.sub("", line.decode("utf-8", "replace"))


def number(text: str) -> float | None:
    """A number as programs print it, `1,234.5`, `26.5K`, `nan`; None where it is none."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    return float(match["number"].replace(",", "")) * _SCALES[(match["scale"] or "").lower()]


def _of_object(line: str, names: Sequence[str]) -> dict[str, float]:
    try:
        given = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(given, dict):
        return {}
    return {
        name: float(value)
        for name, value in given.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and (not names or name in names or name == TIME)
    }
