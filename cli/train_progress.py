"""Progress of a training: a line for each event."""

import time
from collections.abc import Mapping
from typing import Any, TextIO, cast

from ..knobs.text import config_text
from ..results.columns import fold, speed
from ..trainer.listener import TrainingStart, TrainListener
from . import words
from .progress import Terminal

READING_S = 30.0
"""Interval between reports of the progress of reading data or a checkpoint, s."""


def listener_for(stream: TextIO, *, silent: bool = False) -> TrainListener:
    """Returns the listener for a stream."""
    if silent:
        return TrainListener()
    return Lines(cast(TextIO, Terminal(stream)) if stream.isatty() else stream)


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
    if line.get("seconds_left"):
        cells.append(f"{words.duration(line['seconds_left'])} left")
    return cells


class Lines(TrainListener):
    """Prints one line for each event."""

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
            self._print(f"reading the data: {100 * share:.0f} %")

    def on_line(self, line: Mapping[str, Any]) -> None:
        if line.get("kind") == "progress" and time.monotonic() - self._printed_at < READING_S:
            return
        if message := line_text(line, self._unit):
            self._print(message)

    def on_message(self, message: str) -> None:
        self._print(f"note: {message}")

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        print(fold(line), file=self._stream, flush=True)
