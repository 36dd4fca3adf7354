"""A strategy per run of repeated blocks, as the text of the knob `strategy`: `0-7:tp2,ckpt 8-31:tp1,zero3`.

    strategy : run (' ' run)*
    run      : range ':' item (',' item)*
    range    : block | block '-' block                   both ends belong to it; blocks count from 0
    item     : 'tp' number | 'zero' stage | 'ckpt'                            '-' for none

Runs cover all blocks once, in order. An item that a run lacks has the value of the configuration's own knob; `ckpt`
recomputes the blocks of the run, and without it they keep their activations. Modules outside of blocks (embeddings,
head) follow the knobs.

`tp` of a run divides the knob `tp`, which is that of the mesh: with `tp=4` the blocks of a `tp2` run are each cut over two
ranks, and two such pairs compute half of the samples of a micro-batch each (docs/parallel.md).

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
FOLLOWED = {"tp": 1, "zero": 0}
"""Knobs that blocks follow, and their neutral values."""
ITEMS = (*FOLLOWED, "ckpt")
"""Items of a run, in the order in which they are printed."""
_ITEM = re.compile(r"(?P<name>[A-Za-z_]+)(?P<number>[0-9]*)\Z")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?\Z")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks with the same strategy. None: the configuration's knob applies."""

    first: int
    last: int
    tp: int | None = None
    zero: int | None = None
    ckpt: bool = False

    @property
    def count(self) -> int:
        """Blocks of the run."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        blocks = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        items = [f"{name}{value}" for name in FOLLOWED if (value := getattr(self, name)) is not None]
        items += ["ckpt"] if self.ckpt else []
        return f"{blocks}:{','.join(items) or '-'}"


@dataclass(frozen=True, slots=True)
class BlockStrategy:
    """Strategy of one block."""

    tp: int
    """Ranks that share the block's weights."""
    zero: int
    """Stage of ZeRO of its weights."""
    ckpt: bool
    """True if its activations are recomputed."""


@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[Run, ...]:
    """Returns the runs of a text, in order.

    Raises:
        UsageError: it is not in the grammar, or its runs overlap, leave blocks out, or do not begin at block 0.
    """
    runs: list[Run] = []
    for word in text.split():
        run = _run(word)
        expected = runs[-1].last + 1 if runs else 0
        if run.first > expected:
            missing = f"block {expected}" if run.first == expected + 1 else f"blocks {expected} to {run.first - 1}"
            raise UsageError(f"strategy: {missing} would have no strategy (at {word}): runs cover all blocks, in order")
        if run.first < expected:
            final = min(run.last, expected - 1)
            again = f"block {final} has" if run.first == final else f"blocks {run.first} to {final} have"
            raise UsageError(f"strategy: {again} a strategy already (at {word}): runs cover each block once")
        runs.append(run)
    if not runs:
        raise UsageError("strategy: it names runs of blocks, such as 0-7:tp2,ckpt 8-31:zero3, but is empty")
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
    return {name: int(config.get(name, neutral)) for name, neutral in FOLLOWED.items()}


def of_blocks(text: str, blocks: int, **knobs: int) -> list[BlockStrategy]:
    """Returns the strategy of each of a model's blocks.

    Args:
        text: the strategy.
        blocks: repeated blocks of the model.
        knobs: the configuration's own `tp` and `zero`.

    Raises:
        UsageError: the text is for another number of blocks, or not a strategy.
    """
    runs = parse(text)
    if runs[-1].last + 1 != blocks:
        raise UsageError(
            f"strategy: its runs are for {runs[-1].last + 1} blocks, but the model has {blocks}: the last run must end "
            f"at block {blocks - 1}"
        )
    defaults = own_knobs(knobs)
    return [
        BlockStrategy(
            ckpt=run.ckpt,
            **{name: value if getattr(run, name) is None else getattr(run, name) for name, value in defaults.items()},
        )
        for run in runs
        for _ in range(run.count)
    ]


def uniform(text: str, **knobs: int) -> BlockStrategy | None:
    """Returns the strategy of every block, if all have the same, with the degrees of the knobs; else None.

    >>> uniform("0-3:ckpt", zero=1), uniform("0-1:ckpt 2-3:-")
    (BlockStrategy(tp=1, zero=1, ckpt=True), None)
    """
    strategies = set(of_blocks(text, parse(text)[-1].last + 1, **knobs))
    common = next(iter(strategies))
    expected = BlockStrategy(**{**own_knobs(knobs), "zero": common.zero}, ckpt=common.ckpt)
    return common if strategies == {expected} else None


def text_of(strategies: Sequence[BlockStrategy], **knobs: int) -> str:
    """Formats the strategies of blocks as a text, without items that equal the knobs: the inverse of `of_blocks`.

    >>> text_of([BlockStrategy(2, 0, True)] * 2 + [BlockStrategy(1, 3, False)], tp=2)
    '0-1:ckpt 2:tp1,zero3'
    """
    defaults = own_knobs(knobs)
    return printed(
        Run(
            block,
            block,
            ckpt=layer.ckpt,
            **{
                name: None if getattr(layer, name) == value else getattr(layer, name)
                for name, value in defaults.items()
            },
        )
        for block, layer in enumerate(strategies)
    )


def _run(word: str) -> Run:
    blocks, colon, items = word.partition(":")
    bounds = _RANGE.match(blocks)
    if bounds is None:
        raise UsageError(f"strategy: blocks are a number or a range such as 0-7, but here is {blocks!r}")
    start_block, end_block = int(bounds[1]), int(bounds[2] or bounds[1])
    if end_block < start_block:
        raise UsageError(f"strategy: a range goes up, but {start_block} is after {end_block}")
    if end_block >= MOST_BLOCKS:
        raise UsageError(f"strategy: a model has at most {MOST_BLOCKS} blocks, but here is block {end_block}")
    if not colon:
        raise UsageError(f"strategy: after the blocks {blocks} a colon and items are expected, such as {blocks}:ckpt")
    values: dict[str, Any] = {}
    for item in items.split(",") if items != "-" else ():
        name, value = _item(item)
        if name in values:
            raise UsageError(f"strategy: {name} is given twice for the blocks {blocks}")
        values[name] = value
    return Run(start_block, end_block, **values)


def _item(item: str) -> tuple[str, int | bool]:
    match = _ITEM.match(item)
    if match is None:
        raise UsageError(f"strategy: an item is expected, such as tp2, zero3 or ckpt, but here is {item!r}")
    name, number = match["name"], match["number"]
    if name not in ITEMS:
        raise UsageError(f"strategy: {unknown('item', name, ITEMS)}")
    if name == "ckpt":
        if number:
            raise UsageError(f"strategy: ckpt takes no number, but here is {item!r}")
        return name, True
    if not number:
        raise UsageError(f"strategy: {name} takes a number, such as {name}2")
    value = int(number)
    if name == "zero" and value > 3:
        raise UsageError(f"strategy: zero is a stage from 0 to 3, but here is {value}")
    if name == "tp" and not 1 <= value <= 1 << 20:  # `MAX_DEVICES` of strategy.py, which imports this module
        raise UsageError(f"strategy: tp is a whole number of at least 1, but here is {value}")
    return name, value
