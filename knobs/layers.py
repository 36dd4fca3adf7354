"""A strategy per run of repeated blocks, as the text of the knob `strategy`: `0-7:tp2,ckpt 8-31:tp1,zero3`.

    strategy : run (' ' run)*
    run      : range ':' item (',' item)*
    range    : block | block '-' block                   both ends belong to it; blocks count from 0
    item     : name number | 'zero' stage | 'ckpt' | 'offload'                '-' for none
    name     : 'tp' | 'sp' | 'cp' | 'ep'

Runs cover all blocks once, in order. An item that a run lacks has the value of the configuration's own knob; `ckpt`
recomputes the blocks of the run, and without it they keep their activations; `offload` keeps and updates their
optimizer state in host memory. Modules outside of blocks (embeddings, head) follow the knobs.

`tp` of a run divides the knob `tp`, which is that of the mesh: with `tp=4` the blocks of a `tp2` run are each cut over two
ranks, and two such pairs compute half of the samples of a micro-batch each (docs/parallel.md). With `tp2,sp2` or `tp2,cp2`
they compute half of each sequence instead. `sp` and `cp` of a run are those of all ranks that share a sequence there, so they
are multiples of the knobs.

Source: Miao et al., Galvatron (arXiv:2211.13878), whose plans name the strategy of each layer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..base.errors import UsageError, unknown

MOST_BLOCKS = 10_000
"""Largest number of blocks of a model."""
FLAGS = ("ckpt", "offload")
"""Items without a number."""
RANKS = ("tp", "sp", "cp", "ep")
"""Items that are a number of ranks."""
ITEMS = (*RANKS, "zero", *FLAGS)
"""Items of a run, in the order in which they are printed."""
_ITEM = re.compile(r"(?P<name>[A-Za-z_]+)(?P<number>[0-9]*)\Z")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?\Z")


class LayersError(UsageError):
    """A text is not a strategy per layer. `column` counts from 1."""

    def __init__(self, problem: str, text: str, offset: int) -> None:
        self.problem, self.text, self.column = problem, text, offset + 1
        start = max(0, offset - 60)
        excerpt = text[start : offset + 60]
        super().__init__(f"strategy, character {offset + 1}: {problem}\n  {excerpt}\n  {' ' * (offset - start)}^")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks with the same strategy. None: the configuration's knob applies."""

    first: int
    last: int
    tp: int | None = None
    sp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero: int | None = None
    ckpt: bool = False
    offload: bool = False

    @property
    def count(self) -> int:
        """Blocks of the run."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        blocks = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        degrees = ((name, getattr(self, name)) for name in (*RANKS, "zero"))
        items = [f"{name}{value}" for name, value in degrees if value is not None]
        items += [name for name in FLAGS if getattr(self, name)]
        return f"{blocks}:{','.join(items) or '-'}"


@dataclass(frozen=True, slots=True)
class BlockStrategy:
    """Strategy of one block."""

    tp: int
    """Ranks that share the block's weights."""
    ep: int
    """Ranks that share its experts."""
    zero: int
    """Stage of ZeRO of its weights."""
    ckpt: bool
    """True if its activations are recomputed."""
    offload: bool = False
    """True if its optimizer state is in host memory; the knob `offload` sets that for all blocks."""
    sp: int = 1
    """Ranks that share its sequences and exchange heads."""
    cp: int = 1
    """Ranks that share its sequences in a ring."""

    @property
    def ranks(self) -> int:
        """Ranks that compute one sample together."""
        return self.tp * self.sp * self.cp


@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[Run, ...]:
    """Returns the runs of a text, in order.

    Raises:
        LayersError: it is not in the grammar, or its runs overlap, leave blocks out, or do not begin at block 0.
    """
    runs: list[Run] = []
    if not text.strip():
        raise LayersError("a strategy names runs of blocks, such as 0-7:tp2,ckpt 8-31:zero3, but is empty", text, 0)
    for word in re.finditer(r"\S+", text):
        run = _run(text, word.group(), word.start())
        expected = runs[-1].last + 1 if runs else 0
        if run.first > expected:
            missing = f"block {expected}" if run.first == expected + 1 else f"blocks {expected} to {run.first - 1}"
            raise LayersError(f"{missing} would have no strategy: runs cover all blocks, in order", text, word.start())
        if run.first < expected:
            final = min(run.last, expected - 1)
            again = f"block {final} has" if run.first == final else f"blocks {run.first} to {final} have"
            raise LayersError(f"{again} a strategy already: runs cover each block once", text, word.start())
        runs.append(run)
    return tuple(runs)


def canonical(text: str) -> str:
    """Returns the same strategy in its canonical spelling: single spaces, items in order, equal neighbours joined to
    one run.

    >>> canonical(" 0:ckpt,tp2   1-3:tp2,ckpt 4:- ")
    '0-3:tp2,ckpt 4:-'
    """
    return printed(parse(text))


def printed(runs: Iterable[Run]) -> str:
    """Formats runs as text, with equal neighbours joined to one run."""
    joined: list[Run] = []
    for run in runs:
        if joined and replace(joined[-1], first=run.first, last=run.last) == run:
            joined[-1] = replace(joined[-1], last=run.last)
        else:
            joined.append(run)
    return " ".join(map(str, joined))


def own_knobs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a configuration's knobs that blocks follow where a run lacks the item."""
    return {**{name: int(config.get(name, 1)) for name in RANKS}, "zero": int(config.get("zero", 0))}


def of_blocks(
    text: str, blocks: int, *, tp: int = 1, sp: int = 1, cp: int = 1, ep: int = 1, zero: int = 0
) -> list[BlockStrategy]:
    """Returns the strategy of each of a model's blocks.

    Args:
        text: the strategy.
        blocks: repeated blocks of the model.
        tp, sp, cp, ep, zero: the configuration's own knobs.

    Raises:
        UsageError: the text is for another number of blocks, or not a strategy.
    """
    runs = parse(text)
    if runs[-1].last + 1 != blocks:
        raise UsageError(
            f"strategy: its runs are for {runs[-1].last + 1} blocks, but the model has {blocks}: the last run must end "
            f"at block {blocks - 1}"
        )
    defaults = {"tp": tp, "sp": sp, "cp": cp, "ep": ep, "zero": zero}
    return [
        BlockStrategy(
            ckpt=run.ckpt,
            offload=run.offload,
            **{name: value if getattr(run, name) is None else getattr(run, name) for name, value in defaults.items()},
        )
        for run in runs
        for _ in range(run.count)
    ]


def uniform(text: str, *, tp: int = 1, sp: int = 1, cp: int = 1, ep: int = 1, zero: int = 0) -> BlockStrategy | None:
    """Returns the strategy of every block, if all have the same, with the degrees of the knobs; else None.

    None also if the optimizer state of the blocks is in host memory: `offload` of all runs is not the knob `offload`,
    which includes the modules outside of blocks.

    >>> uniform("0-3:ckpt", zero=1), uniform("0-1:ckpt 2-3:-")
    (BlockStrategy(tp=1, ep=1, zero=1, ckpt=True, offload=False, sp=1, cp=1), None)
    """
    runs = parse(text)
    strategies = set(of_blocks(text, runs[-1].last + 1, tp=tp, sp=sp, cp=cp, ep=ep, zero=zero))
    common = next(iter(strategies))
    expected = BlockStrategy(tp=tp, sp=sp, cp=cp, ep=ep, zero=common.zero, ckpt=common.ckpt)
    return common if strategies == {expected} else None


def text_of(
    strategies: Sequence[BlockStrategy], *, tp: int = 1, sp: int = 1, cp: int = 1, ep: int = 1, zero: int = 0
) -> str:
    """Formats the strategies of blocks as a text, without items that equal the knobs: the inverse of `of_blocks`.

    >>> text_of([BlockStrategy(2, 1, 0, True)] * 2 + [BlockStrategy(1, 1, 3, False)], tp=2)
    '0-1:ckpt 2:tp1,zero3'
    """
    defaults = {"tp": tp, "sp": sp, "cp": cp, "ep": ep, "zero": zero}
    return printed(
        Run(
            block,
            block,
            ckpt=layer.ckpt,
            offload=layer.offload,
            **{
                name: None if getattr(layer, name) == value else getattr(layer, name)
                for name, value in defaults.items()
            },
        )
        for block, layer in enumerate(strategies)
    )


def _run(text: str, run: str, start: int) -> Run:
    blocks, colon, items = run.partition(":")
    bounds = _RANGE.match(blocks)
    if bounds is None:
        raise LayersError(f"blocks are a number or a range such as 0-7, but here is {blocks!r}", text, start)
    start_block, end_block = int(bounds[1]), int(bounds[2] or bounds[1])
    if end_block < start_block:
        raise LayersError(f"a range goes up, but {start_block} is after {end_block}", text, start)
    if end_block >= MOST_BLOCKS:
        raise LayersError(f"a model has at most {MOST_BLOCKS} blocks, but here is block {end_block}", text, start)
    if not colon:
        problem = f"after the blocks {blocks} a colon and items are expected, such as {blocks}:ckpt"
        raise LayersError(problem, text, start + len(blocks))
    place, parsed = start + len(blocks) + 1, Run(start_block, end_block)
    if items == "-":
        return parsed
    seen: set[str] = set()
    for item in items.split(","):
        name, value = _item(text, item, place)
        if name in seen:
            raise LayersError(f"{name} is given twice for the blocks {blocks}", text, place)
        seen.add(name)
        change: dict[str, Any] = {name: value}
        parsed = replace(parsed, **change)
        place += len(item) + 1
    return parsed


def _item(text: str, item: str, place: int) -> tuple[str, int | bool]:
    match = _ITEM.match(item)
    if match is None:
        examples = "tp2, zero3 or ckpt"
        raise LayersError(f"an item is expected, such as {examples}, but here is {item!r}", text, place)
    name, number = match["name"], match["number"]
    if name not in ITEMS:
        raise LayersError(unknown("item", name, ITEMS), text, place)
    if name in FLAGS:
        if number:
            raise LayersError(f"{name} takes no number, but here is {item!r}", text, place + len(name))
        return name, True
    if not number:
        raise LayersError(f"{name} takes a number, such as {name}2", text, place + len(name))
    value = int(number)
    if name == "zero" and value > 3:
        raise LayersError(f"zero is a stage from 0 to 3, but here is {value}", text, place + len(name))
    if name in RANKS and not 1 <= value <= 1 << 20:  # `MAX_DEVICES` of strategy.py, which imports this module
        raise LayersError(f"{name} is a whole number of at least 1, but here is {value}", text, place + len(name))
    return name, value
