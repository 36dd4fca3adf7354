"""Progress of a training: a live line in a terminal, plain lines elsewhere."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ..knobs.text import config_text
from ..results.columns import fold, speed
from ..trainer.listener import TrainingStart, TrainListener
from . import words
from .progress import Terminal

BAR = 20
"""Width of the bar."""
READING_S = 30.0
"""Interval at which a log reports the progress of reading data or a checkpoint, s."""


@contextlib.contextmanager
def listening(stream: TextIO, *, silent: bool = False) -> Iterator[TrainListener]:
    """Yields the listener for a stream."""
    if silent:
        yield TrainListener()
        return
    live = stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    listener = _Live(cast(TextIO, Terminal(stream))) if live else _Lines(stream)
    try:
        yield listener
    finally:
        listener.close()


def headline(start: TrainingStart) -> list[str]:
    """Returns the steps, the devices, the configuration and the data of a training."""
    done = f", {start.step} of them done" if start.step else ""
    lines = [
        f"training {start.name} on {start.where}: {start.steps} steps{done}, in {start.folder}",
        f"configuration: {start.strategy.why}",
        f"  {config_text(start.strategy.config)}",
    ]
    return [*lines, f"data: {_data_in_words(start.data)}"]


def _data_in_words(data: Mapping[str, Any]) -> str:
    """Returns a description of the data in one line."""
    if not data.get("paths"):
        return "made-up tokens" if data.get("made_up") else f"the batches of {data.get('name', 'the workload')}"
    counts = [f"{data[name]:,} {name}" for name in ("documents", "tokens", "samples") if data.get(name) is not None]
    held = f"{data['evaluation_samples']:,} held out" if data.get("evaluation_samples") else ""
    tokenizer = f"tokenizer {data.get('tokenizer')}"
    return f"{' '.join(data['paths'])}: {', '.join(filter(None, (*counts, held, tokenizer)))}"


def _reading_in_words(share: float) -> str:
    return f"reading the data: {100 * share:.0f} %"


def read_in_words(line: Mapping[str, Any]) -> str:
    """Returns the progress of the first rank with a checkpoint, as `checking step-00000400: 1.2 of 3.4 GiB`."""
    done, of = line["bytes"] / 2**20, line["of"] / 2**20
    return f"{line['what']}: {words.memory(done)} of {words.memory(of)}"


def line_text(line: Mapping[str, Any], unit: str) -> str:
    """Returns a line of the log as text; empty if it is shown in another way."""
    kind, step = line.get("kind"), line.get("step")
    if kind == "step":
        return f"step {step}  " + "  ".join(numbers(line, unit))
    if kind == "evaluation":
        return f"step {step}  held-out loss {line['loss']:.4f}"
    if kind == "checkpoint":
        if line.get("failure"):
            return f"THE CHECKPOINT OF STEP {step} WAS NOT SAVED: {line['failure']}"
        return f"step {step}  checkpoint saved in {line['seconds']:.1f} s, with training paused for {line['stalled']:.2f} s"
    if kind == "progress":
        return read_in_words(line)
    if kind == "resumed":
        return f"continuing from {line['checkpoint']}"
    return str(line.get("text", "")) if kind == "note" else ""


def numbers(line: Mapping[str, Any], unit: str) -> list[str]:
    """Returns the numbers of a step as shown."""
    cells = [f"loss {line['loss']:.4f}", f"lr {line['lr']:.2e}"]
    if line.get("grad_norm") is not None:
        cells.append(f"norm {line['grad_norm']:.3g}")
    rate = line["tokens_per_second"] if unit == "tokens/s" else line["samples_per_second"]
    cells.append(speed(rate, unit))
    if line.get("mfu") is not None:
        cells.append(f"MFU {100 * line['mfu']:.0f} %")
    if line.get("memory_mib") is not None:
        cells.append(f"{line['memory_mib']:,.0f} MiB")
    return cells


class _Lines(TrainListener):
    """Prints one plain line for each event, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._unit = stream, "tokens/s"
        self._printed_at = time.monotonic()

    def on_start(self, training: TrainingStart) -> None:
        self._unit = training.unit or self._unit
        for line in headline(training):
            self._print(line)

    def on_wait(self, stage: str) -> None:
        self._print(f"{stage} ...")

    def on_read(self, share: float) -> None:
        if time.monotonic() - self._printed_at >= READING_S:
            self._print(_reading_in_words(share))

    def on_line(self, line: Mapping[str, Any]) -> None:
        if line.get("kind") == "progress" and time.monotonic() - self._printed_at < READING_S:
            return
        if message := line_text(line, self._unit):
            self._print(message)

    def on_message(self, message: str) -> None:
        self._print(f"note: {message}")

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        print(fold(line), file=self._stream, flush=True)


class _Numbers(ProgressColumn):
    """The numbers of a step, as many as fit beside the other columns. With more, rich would shorten the other columns too."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def render(self, task: Task) -> Text:
        other_columns = f"{task.description} {BAR * '━'} {task.total:.0f}/{task.total:.0f} "
        room = self._console.width - len(other_columns)
        first_number, *further_numbers = task.fields["numbers"]
        rendered = Text(first_number, no_wrap=True)
        rendered.truncate(max(room, 1), overflow="ellipsis")
        for number in further_numbers:
            if len(rendered) + 2 + len(number) > room:
                break
            rendered.append(f"  {number}")
        return rendered


class _Live(TrainListener):
    """Prints events, with the progress of the training below."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._unit = "tokens/s"
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=BAR),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            _Numbers(self._console),
            console=self._console,
            refresh_per_second=4,
        )
        self._task: Any = None
        self._status: Any = None

    def on_start(self, training: TrainingStart) -> None:
        self._unit = training.unit or self._unit
        self._rest()
        for line in headline(training):
            self._print(line)
        if self._task is None:
            self._task = self._progress.add_task("step", total=training.steps, numbers=["starting"])
            self._progress.start()
        self._progress.update(self._task, completed=training.step)

    def on_wait(self, stage: str) -> None:
        self._rest()
        if self._task is None:
            self._status = self._console.status(f"{stage} ...")
            self._status.start()
        else:
            self._progress.update(self._task, numbers=[stage])

    def on_read(self, share: float) -> None:
        if self._status is not None:
            self._status.update(_reading_in_words(share))

    def on_line(self, line: Mapping[str, Any]) -> None:
        if line.get("kind") == "progress" and self._task is not None:
            self._progress.update(self._task, numbers=[read_in_words(line)])
        elif line.get("kind") == "step" and self._task is not None:
            loss, *other_numbers = numbers(line, self._unit)
            time_left = [f"{words.duration(line['seconds_left'])} left"] if line.get("seconds_left") else []
            self._progress.update(self._task, completed=line["step"], numbers=[loss, *time_left, *other_numbers])
        elif message := line_text(line, self._unit):
            self._print(message, "bold red" if line.get("failure") else "")

    def on_message(self, message: str) -> None:
        self._print(f"note: {message}", "yellow")

    def close(self) -> None:
        """Leaves the last state of the status line."""
        self._rest()
        if self._task is not None:
            self._progress.stop()

    def _rest(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(fold(line), style=style))
