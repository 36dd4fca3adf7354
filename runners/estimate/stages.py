"""How the parts of a model are shared out among pipeline stages."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from ...errors import ScheduleError, UsageError
from .columns import Columns
from .model_facts import ModelFacts, Part


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage, or several alike."""

    index: int
    """The first of those alike: it holds the most micro-batches."""
    blocks: tuple[tuple[Part, float], ...]
    """Block kinds and how many of each it holds: on average, where a model has several, since each stage is
    taken to hold its share of every kind."""
    first: bool
    """Whether it holds the embedding."""
    last: bool
    """Whether it holds head and loss."""
    ends: tuple[Part, ...]
    """Parts that are not blocks."""
    before: int
    """Blocks in the stages before it."""

    @property
    def count(self) -> int:
        """Blocks that it holds."""
        return round(sum(number for _, number in self.blocks))

    def share(self, indices: Collection[int]) -> float:
        """Share of its blocks that are among those of these indices, 0 to 1."""
        mine = sum(self.before <= index < self.before + self.count for index in indices)
        return mine / self.count if self.count else 0.0


@lru_cache(maxsize=4096)
def cut(blocks: int, pp: int, balance: str, head: float) -> tuple[int, ...]:
    """Blocks of each of `pp` stages.

    `layers` spreads them evenly, earlier stages taking one more. `cost` fills a stage until it holds its
    share of the cost of all blocks and the head, which costs `head` blocks; later stages may stay empty.
    """
    if balance == "layers":
        least, more = divmod(blocks, pp)
        return tuple(least + (stage < more) for stage in range(pp))
    total = blocks + head
    counts = [0] * pp
    stage, done = 0, 0.0
    for _ in range(blocks):
        counts[stage] += 1
        done += 1
        if done > total * (stage + 1) / pp and stage < pp - 1:
            stage += 1
    return tuple(counts)


def stages(facts: ModelFacts, pp: int, balance: str, distinct: bool = True) -> list[Stage]:
    """The stages of a pipeline of `pp`: the distinct ones, or all.

    An empty list where there are fewer blocks than stages.
    """
    kinds = [part for part in facts.parts if part.role == "block"]
    blocks = sum(part.count for part in kinds)
    if pp > max(blocks, 1):
        return []
    front = tuple(part for part in facts.parts if part.role == "embedding")
    back = tuple(part for part in facts.parts if part.role in ("norm", "head", "loss", "other"))
    block_cost = sum(part.count * _cost(part) for part in kinds) / max(blocks, 1)
    head = sum(_cost(part) for part in back) / block_cost if block_cost else 0.0
    made: list[Stage] = []
    seen: set[tuple[int, bool, bool]] = set()
    counts = cut(blocks, pp, balance, head)
    for index, count in enumerate(counts):
        first, last = index == 0, index == pp - 1
        if distinct and (count, first, last) in seen:
            continue
        seen.add((count, first, last))
        share = tuple((part, count * part.count / blocks) for part in kinds) if blocks else ()
        ends = (*(front if first else ()), *(back if last else ()))
        before = sum(counts[:index])
        made.append(Stage(index=index, blocks=share, first=first, last=last, ends=ends, before=before))
    return made


def indices(text: str | None, facts: ModelFacts) -> "list[int] | None":
    """The blocks that a text such as `0-3,7` names; None for None.

    Raises:
        UsageError: it is no such text, or the model has fewer blocks.
    """
    from ...models.families.standard import indices_of

    if text is None:
        return None
    try:
        return indices_of(text, facts.blocks)
    except ScheduleError as error:
        raise UsageError(str(error)) from None


def staged(
    facts: ModelFacts, pp: int, balance: str, cols: Columns, checkpointed: str | None, gathered: str | None
) -> list[tuple[Stage, Columns]]:
    """The stages of a pipeline of `pp`, each with the configurations as they are there.

    Where blocks are named all stages are there, since each may hold others; else the distinct ones.

    Raises:
        UsageError: a text names no blocks of this model.
    """
    if checkpointed is None and gathered is None:
        return [(stage, cols) for stage in stages(facts, pp, balance)]
    again, whole = indices(checkpointed, facts), indices(gathered, facts) or []
    return [
        (stage, cols.of_stage(None if again is None else stage.share(again), stage.share(whole)))
        for stage in stages(facts, pp, balance, distinct=False)
    ]


def alike(facts: ModelFacts, pp: int, balance: str) -> list[int]:
    """How many stages of a pipeline each of `stages` stands for."""
    kinds = [part for part in facts.parts if part.role == "block"]
    blocks = sum(part.count for part in kinds)
    back = sum(_cost(part) for part in facts.parts if part.role in ("norm", "head", "loss", "other"))
    block_cost = sum(part.count * _cost(part) for part in kinds) / max(blocks, 1)
    counts = cut(blocks, pp, balance, back / block_cost if block_cost else 0.0)
    keys = [(count, index == 0, index == pp - 1) for index, count in enumerate(counts)]
    return [keys.count(key) for key in dict.fromkeys(keys)]


def _cost(part: Part) -> float:
    return sum(item.k * item.n * item.count * item.rows for item in part.matmuls)
