"""The common form of measured training runs, and the recognised names of columns."""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from redline.base.errors import UsageError
from redline.estimator import Hardware, Shape

MIB = 1024.0**2


class Left(Exception):
    """A row is left out; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured training run of a source."""

    source: str
    where: str
    """File and line."""
    model: Shape
    hardware: Hardware
    framework: str
    """Name in `redline.estimator.trainers.TRAINERS`; its facts apply."""
    setup: Mapping[str, Any]
    """Fields of `TrainingSetup` besides those of the framework."""
    config: Mapping[str, Any]
    """The knobs."""
    step_ms: float | None = None
    """None if it is not stated or the run failed."""
    memory_mib: float | None = None
    """Peak of PyTorch's allocator: allocated memory if `setup` has `reserved_memory=False`, otherwise reserved."""
    failed: bool = False
    """True if the run produced no number."""
    choices: tuple[Mapping[str, Any], ...] = ()
    """Knobs that the source does not state: the fastest values that fit are assumed."""

    def devices_of(self, config: Mapping[str, Any]) -> int:
        """Returns the number of devices of one of its configurations."""
        return prod(int(config.get(name, 1)) for name in ("tp", "sp", "cp", "pp", "dp"))


Rows = Iterator[tuple[str, Callable[[], Run]]]
"""The rows of a file: the place of each, and a function that reads it or raises `Left`."""


# Names of columns by their meaning. A pattern must match the whole name.
_COLUMNS: Mapping[str, str] = {
    "model": r"models?|model name( or path)?|base model|checkpoint",
    "devices": r"(num(ber of)? |# ?(of )?|no of |n )?(gpus?|devices?|accelerators?|world size)",
    "nodes": r"(num )?nodes?( num)?",
    "per_node": r"(num )?gpus? per node|gpu num per node",
    "device": r"gpu( type| name)?|systems?|device( type| name)?|hardware|runnable on|accelerator type",
    "tp": r"tp( size| degree)?|tensor (model )?parallel(ism)?( size| degree)?",
    "pp": r"pp( size| degree)?|pipeline (model )?parallel(ism)?( size| degree)?",
    "cp": r"cp( size| degree)?|context parallel(ism)?( size| degree)?",
    "ep": r"ep( size| degree)?|expert (model )?parallel(ism)?( size| degree)?",
    "dp": r"dp( size| degree)?|data parallel(ism)?( size| degree)?",
    "fsdp": r"fsdp( size| degree)?",
    "zero": r"zero( stage)?|zero dp",
    "chunks": r"vp|vpp|virtual (pipeline )?(stages|parallel( size)?)",
    "micro_batch": r"mbs|micro ?batch( ?size)?|(per device|local)( train)? batch( size)?|batch per gpu|batch size per device|bs",
    "global_batch": r"gbs|global ?batch( ?size)?|batch size|gbz",
    "grad_accum": r"ga|grad(ient)? ?accum(ulation)?( steps)?|num accumulation steps",
    "seq_len": r"(packed |max )?seq(uence)? ?len(gth)?|context( length)?|seq|sl",
    "precision": r"precision|dtype|torch dtype|quantization",
    "checkpointing": r"activation ?(checkpointing|recomputation)|act ckpt|ac|gradient checkpointing|recompute",
    "tokens_per_device": r"(tokens|tok|t)/s(ec)?/(gpu|device)|tps/(gpu|device)|throughput \(t/s/gpu\)|tokens/s(ec)?/gpu|wps/gpu",
    "tokens": r"(tokens|tok|t)/s(ec)?|tokens per second|train tokens per second|throughput \(t/s\)|tps|vanilla tp tokens/sec",
    "samples": r"samples/s(ec)?|th[ro]*u[gt]h?put ?\((samples?/s(ec)?|s/s)\)|train samples per second|.* samples s",
    "step_ms": r"(step|iteration) time( s)?( median)?|lat?n?tency|latency|step ms",
    "tflops": r"(model )?tflops?( ?/ ?s(ec)?)?( ?/ ?gpu)?|tflops per (gpu|device)",
    "memory": r"max alloc( mb)?|(peak |max )?(gpu )?mem(ory)?( max)?( allocated| reserved| active| alloc)?( per gpu)?"
    r"( gib| mib| gb| mb)?",
}
_UNITS = {"gib": 1024.0, "mib": 1.0, "gb": 1e9 / MIB, "mb": 1e6 / MIB, "bytes": 1 / MIB}


def plain(name: str) -> str:
    """Returns the normalised name of a column: `Tokens / sec / GPU` is `tokens/sec/gpu`."""
    text = re.sub(r"[*`_]|<[^>]*>", " ", name.lower()).replace("-", " ")
    return re.sub(r"\s+", " ", re.sub(r"\s*/\s*", "/", text)).strip(" :").replace("# ", "#")


def columns(header: list[str]) -> dict[str, str]:
    """Returns the first column of each known meaning."""
    out: dict[str, str] = {}
    for name in header:
        words = plain(name)
        bare = re.sub(r" ?\((k|t|gib|mib|gb|mb|ms|s|%|bf16|fp8)\)", "", words)
        for what, pattern in _COLUMNS.items():
            if what not in out and any(re.fullmatch(pattern, each) for each in (words, bare, words.replace("#", ""))):
                out[what] = name
                break
    return out


def number(text: Any) -> float | None:
    """Returns the first number of a cell; None without one. `5,762` is 5762, and `[888](link)` is 888.

    >>> number("1,671"), number("n/a"), number("~13.5 GiB"), number(None)
    (1671.0, None, 13.5, None)
    """
    found = re.search(r"-?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|-?\.\d+", str(text or ""))
    if found is None:
        return None
    value = float(found[0].replace(",", ""))
    return value if abs(value) < 1e15 else None


def whole(text: Any, default: int | None = None) -> int | None:
    """Returns a cell that is a whole number of at least 1; the default if it is empty or states none.

    Raises:
        Left: it is another number.
    """
    value = number(text)
    if value is None or value == 0:
        return default
    if value != int(value) or value < 1:
        raise Left(f"'{text}' is not a whole number of at least 1")
    return int(value)


def flag(text: Any) -> bool:
    return str(text).strip().lower() in ("true", "yes", "1", "on", "full")


def memory_mib(text: Any, column: str) -> float | None:
    """Returns a peak in MiB: the unit is that of the cell or of the column, otherwise MiB."""
    value = number(text)
    if value is None or value <= 0:
        return None
    for words in (plain(str(text)), plain(column)):
        for unit, mib in _UNITS.items():
            if re.search(rf"(?<![a-z]){unit}(?![a-z])|{unit}\b", words):
                return value * mib
    return value


def read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[int, dict[str, str]]]:
    """Returns rows with their lines."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for at, row in enumerate(csv.DictReader(file, delimiter=delimiter), 2):
            yield at, {str(name): value or "" for name, value in row.items() if name is not None}


@dataclass(frozen=True)
class Table:
    """A table of a Markdown page."""

    title: tuple[str, ...]
    """The headings above it, outermost first, and the line before it."""
    rows: tuple[tuple[int, dict[str, str]], ...]
    """The rows with their lines."""

    @property
    def header(self) -> list[str]:
        return list(self.rows[0][1]) if self.rows else []

    @property
    def words(self) -> str:
        return " / ".join(self.title)


def read_markdown(path: Path) -> list[Table]:
    """Returns the tables of a page: rows of cells between bars, with or without bars at the ends."""
    out: list[Table] = []
    titles: dict[int, str] = {}
    before, header, rows = "", None, []
    for at, line in enumerate([*path.read_text(encoding="utf-8", errors="replace").splitlines(), ""], 1):
        cells = [each.strip() for each in line.strip().strip("|").split("|")]
        if "|" in line and len(cells) > 1:
            if header is None:
                header = cells
            elif not all(re.fullmatch(r":?-+:?", each) or not each for each in cells) or not any(cells):
                rows.append((at, dict(zip(header, [*cells, *[""] * len(header)]))))
            elif rows:  # a ruler after rows: the row before it is the header of another table
                header = list(rows.pop()[1].values())
                out.append(Table((*titles.values(), before), tuple(rows)))
                rows = []
            continue
        if header is not None:
            out.append(Table((*titles.values(), before), tuple(rows)))
            header, rows = None, []
        if found := re.match(r"(#+)\s*(.*)", line):
            level = len(found[1])
            titles = {each: title for each, title in titles.items() if each < level} | {level: found[2]}
            before = ""
        elif line.strip():
            before = line.strip()
    return [each for each in out if each.rows]


def degrees(
    devices: int, *, tp: int = 1, pp: int = 1, cp: int = 1, dp: int | None = None, fsdp: int | None = None
) -> dict[str, int]:
    """Returns the degrees of parallelism on a number of devices.

    Raises:
        Left: their product is not the number of devices.
    """
    split = tp * pp * cp
    if devices % split:
        raise Left(f"tp {tp} * pp {pp} * cp {cp} does not divide {devices} devices")
    made = devices // split
    if dp is not None and dp != made:
        raise Left(f"tp {tp} * pp {pp} * cp {cp} * dp {dp} is not {devices} devices")
    return {"tp": tp, "pp": pp, "cp": cp, "dp": made}


def spread_of(ep: int, tp: int, etp: int, split: Mapping[str, int]) -> dict[str, int]:
    """Returns the knobs of experts that are spread over `ep` groups of `etp` ranks each; empty for experts on all ranks.

    Raises:
        Left: experts are cut over another number of ranks than 1 or tp, or the ranks do not share them evenly.
    """
    if ep == 1 and etp in (1, tp):
        return {"etp": 1} if etp < tp else {}
    if etp not in (1, tp) or split["dp"] * split.get("cp", 1) * (tp // etp) % ep:
        raise Left(f"experts over {ep} * {etp} ranks, where tp is {tp} and dp {split['dp']}")
    return {"ep": ep, **({"etp": 1} if etp < tp else {})}


def batches(dp: int, micro: int | None, total: int | None, accum: int | None) -> dict[str, int]:
    """Returns micro-batch and accumulation: any two of micro-batch, global batch and accumulation give the third.

    Raises:
        Left: they contradict each other.
    """
    if micro is None and total is not None and accum is not None:
        micro = max(total // (dp * accum), 1)
    if micro is None:
        raise Left("the micro-batch is not stated")
    if total is not None:
        if total % (micro * dp):
            raise Left(f"micro-batch {micro} * dp {dp} does not divide the global batch {total}")
        accum = total // (micro * dp)
    return {"micro_batch": micro, "grad_accum": accum or 1}


def step_of(
    config: Mapping[str, Any], seq_len: int, *, tokens_per_device: float | None = None, tokens: float | None = None,
    samples: float | None = None,
) -> float | None:  # fmt: skip
    """Returns the step time, ms, from a rate; None without one."""
    per_step = config["micro_batch"] * config["grad_accum"] * config["dp"]
    devices = config["tp"] * config["pp"] * config.get("cp", 1) * config["dp"]
    if tokens_per_device:
        tokens = tokens_per_device * devices
    if tokens:
        samples = tokens / seq_len
    return per_step / samples * 1e3 if samples and samples > 0 else None


def check_source(name: str, known: list[str]) -> None:
    """Raises UsageError, with the known names, for an unknown source."""
    if name not in known:
        raise UsageError(f"there is no source '{name}': there are {', '.join(known) or 'none'}")
