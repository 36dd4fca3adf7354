"""How the parts of a model are shared out among pipeline stages."""

from dataclasses import dataclass
from functools import lru_cache

from .model_facts import ModelFacts, Part


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage, or several alike."""

    index: int
    """The first of those alike: it holds the most micro-batches."""
    blocks: tuple[tuple[Part, int], ...]
    """Block kinds and how many of each it holds."""
    first: bool
    """Whether it holds the embedding."""
    last: bool
    """Whether it holds head and loss."""
    ends: tuple[Part, ...]
    """Parts that are not blocks."""


@lru_cache(maxsize=4096)
def cut(blocks: int, pp: int, balance: str, head: float) -> tuple[int, ...]:
    """Blocks of each of `pp` stages.

    `layers` spreads them evenly, earlier stages taking one more. `cost` fills a stage until it holds its share
    of the cost of all blocks and the head, which costs `head` blocks; later stages may stay empty.
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
    for index, count in enumerate(cut(blocks, pp, balance, head)):
        first, last = index == 0, index == pp - 1
        if distinct and (count, first, last) in seen:
            continue
        seen.add((count, first, last))
        share = tuple((part, count * part.count / blocks) for part in kinds) if blocks else ()
        ends = (*(front if first else ()), *(back if last else ()))
        made.append(Stage(index=index, blocks=share, first=first, last=last, ends=ends))
    return made


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
