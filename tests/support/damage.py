"""Folders of runs, whole and damaged, and functions that read them in every way."""

import contextlib
import io
import json
import random
import re
import shutil
from pathlib import Path

from redline.base.errors import RedlineError
from redline.frameworks import export_targets, render
from redline.results import Measurement, RankReport, RunFolder, Status, View, table_frame
from redline.results.listing import knob_names
from redline.results.probe import Computed, Probe
from redline.views.dashboard.library import Library
from redline.views.report import Source, document, page
from redline.views.report.page import exports
from redline.views.show import render as show
from rich.console import Console

KNOBS = {
    "tp": (1, 2),
    "pp": (1, 2),
    "micro_batch": (1, 2, 4, 8),
    "checkpoint_ratio": (0, 0.5, 1),
    "precision": ("fp32", "bf16", "bf16_pure"),
    "attention": ("eager", "sdpa"),
    "fusion": (False, True),
    "zero": (0, 1, 2, 3),
    "grad_accum": None,
}
ASKED = {
    "model": "gpt2-tiny",
    "workload": {"id": "3f2a", "spec": "gpt2-tiny"},
    "shape": {
        "family": "gpt2", "layers": 4, "hidden": 64, "heads": 4, "intermediate": 256, "vocabulary": 1000,
        "positions": 128, "tied": True, "activation": "gelu_new", "norm_eps": 1e-5, "dropout": 0.1,
    },
    "space": {
        "knobs": [{"name": name, "values": list(values)} for name, values in KNOBS.items() if values],
        "derived": [{"name": "grad_accum", "value": "8 // micro_batch", "help": "what is left"}],
        "constraints": [{"require": "tp * pp <= 4", "reason": "more devices than there are"}],
    },
    "devices": {"type": "cuda", "name": "H100", "count": 8, "used": 8, "per_host": 8, "memory_mib": 81000, "features": ["bf16"]},
    "seq_len": 128,
    "global_batch": 64,
    "memory_limit_mib": 80000,
    "sampler": "bayes",
    "seed": 0,
    "runner": "ray",
    "trial_timeout_s": 300.0,
    "lossy": {"precision": ["bf16_pure"]},
}  # fmt: skip
FILES = ("run.yaml", "best.yaml", "study.log", "trials.csv", ".lock")


def make_run(folder: Path, asked=ASKED, configs=None, storage=None) -> Path:
    """Writes a finished run of eight trials with every kind of outcome, re-measurements, ranks and a probe."""
    computed = Computed(loss=6.9, gradient=1.2, blocks=(0.1, 0.2), vectors=(0.3,), samples=4)
    probe = Probe(quiet=computed, step=computed, logits=(0.1, 0.2), roundoff=2**-24, loss_roundoff=2**-24)
    names = {name: None for each in configs or () for name in each} or KNOBS
    with RunFolder.open(folder, asked, knobs=names, storage=storage) as run:
        for number in range(8):
            config = {
                "tp": 1 + number % 2,
                "pp": 1 + number // 2 % 2,
                "micro_batch": 2 ** (number % 4),
                "fusion": number > 3,
            }
            config |= {
                "checkpoint_ratio": (0, 0.5, 1)[number % 3],
                "zero": number % 4,
                "grad_accum": 4,
                "attention": "sdpa",
            }
            config["precision"] = KNOBS["precision"][number % 3]
            config = configs[number % len(configs)] if configs else config
            trial = run.start(
                config,
                sampler="default" if number == 0 else "bayes",
                predicted_throughput=900.0,
                predicted_memory_mib=700.0,
            )
            common = {
                "started": 1e9 + number, "seconds_total": 3.5, "seconds_overhead": 0.5, "devices": 8, "unit": "tokens/s",
                "peak_memory_mib": 500.0 + number, "memory_limit_mib": 80000.0, "log": f"logs/{number}.log", "probe": probe,
            }  # fmt: skip
            if number % 4 < 2:
                ranks = tuple(RankReport(rank=rank, status=Status.OK, step_ms=2.0) for rank in range(2))
                outcome = Measurement(
                    status=Status.OK,
                    throughput=1000.0 + number,
                    step_ms=2.5,
                    step_ms_spread=0.1,
                    loss=6.9,
                    ranks=ranks,
                    **common,
                )
            else:
                status = (Status.OOM, Status.CRASH)[number % 2]
                outcome = Measurement(status=status, reason=f"rank 0: trial {number} needed more", **common)
            run.finish(trial.number, outcome)
            run.log_path(number).write_text(f"[rank 0] trial {number}\n")
        run.remeasure(1, [990.0, 1010.0])
        run.remeasure(4, [], Measurement(status=Status.TIMEOUT, reason="too slow"))
        run.start(config, sampler="bayes")
        run.write_best(["redline", "tune", "gpt2-tiny"])
    return folder


_WILD = (
    "", "null", "true", "0", "-1", "1.5", "1" + "0" * 400, "1e999", ".nan", "NaN", "Infinity", '"lots"', "=1+1", "\x1b[2J", "fp9",
    "x" * 5000, "[]", "{}", "[[[[1]]]]", '{"a": {"b": [1, {}]}}', '[null, 1, "a"]', "2026-01-01", "[" * 3000 + "]" * 3000,
    '"extra": 1,',
)  # fmt: skip


def _another_value(path: Path, draw: random.Random) -> None:
    """Replaces a word of a YAML file, a cell of a table, or a name or value of a record."""
    text = path.read_text()
    word = draw.choice(list(re.finditer(r"[^\s,:{}\[\]]+", text)))
    path.write_text(text[: word.start()] + draw.choice(_WILD) + text[word.end() :])


def _bytes_flipped(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 2, 20))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)


def _truncated(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def _emptied(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.choice((b"", b"\n", b"\0" * 100, b"---\n", b"{}\n", b"[]\n", b"null\n")))


_DAMAGES = (_another_value,) * 6 + (_bytes_flipped, _truncated, _emptied)


def damage(folder: Path, draw: random.Random) -> list[str]:
    """Damages one to three files of a run and returns a description of each damage."""
    damages = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path, how = folder / draw.choice(FILES[:4] * 4 + FILES[4:]), draw.choice(_DAMAGES)
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            with contextlib.suppress(UnicodeError, IndexError):  # it was damaged before, and is no text or empty
                how(path, draw)
                damages.append(f"{how.__name__} {path.name}")
    return damages


def read_everything(folder: Path, whole: Path) -> list[str]:
    """Reads a run in every way and returns the refusals as text.

    Raises:
        Exception: anything but a refusal by a `RedlineError`.
    """
    refused: list[str] = []

    def attempt(way, function):
        try:
            return function()
        except RedlineError as error:
            refused.append(f"{way}: {error}")
            return None

    view = attempt("show", lambda: View(folder))
    if view is not None:
        for terminal in (False, True):
            out = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
            attempt("show", lambda out=out: show(view, out))
        trials = view.trials()
        attempt("table", lambda: table_frame(trials, knob_names(trials)))
        if trials:
            for target in export_targets():
                for trial in (trials[0], trials[-1]):
                    if target == "deepspeed" and {trial.config.get("tp"), trial.config.get("pp")} == {2}:
                        continue  # DeepSpeed cannot express this, so it is refused for a whole run too
                    attempt(
                        target, lambda target=target, trial=trial: render(target, trial, view.document).text.encode()
                    )
    source = attempt("report", lambda: Source.read(folder))
    if source is not None:
        page(document(source)).encode()
    return refused


def serve_everything(root: Path) -> dict[str, dict]:
    """Reads each run under `root` through the dashboard's API; returns its list's entries by name."""
    library = Library(root)
    lines = {line["run"]: line for line in library.lines()}
    for run in lines:
        json.dumps(library.changes(run), allow_nan=False)
        source = library.source(run)
        for trial in source.trials[:2]:
            json.dumps(exports(source, trial), allow_nan=False)
    json.dumps(list(lines.values()), allow_nan=False)
    return lines


def copied(whole: Path, to: Path) -> Path:
    return Path(shutil.copytree(whole, to))
