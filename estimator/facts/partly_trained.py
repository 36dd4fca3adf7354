"""Facts of trainings of some blocks of a model, and of optimizers that project gradients to a low rank."""

from dataclasses import dataclass, replace

from .model_facts import FactsSource, ModelFacts, Part, PerToken


@dataclass(frozen=True)
class PartlyTrained:
    """The facts of a model of which only some blocks are trained."""

    source: FactsSource
    blocks: int
    """Number of trained blocks."""
    last: bool
    """True if they are the last ones, at which backward ends; otherwise it passes through all blocks."""

    def facts(self, *, precision: str, attention: str, fusion: bool, kernels: bool = False) -> ModelFacts:
        """The facts of one variant."""
        facts = self.source.facts(precision=precision, attention=attention, fusion=fusion, kernels=kernels)
        parts: list[Part] = []
        remaining = max(0, facts.blocks - self.blocks)
        for part in facts.parts:
            if part.role != "block":
                parts.append(_frozen(part))
                continue
            frozen = min(remaining, part.count)
            remaining -= frozen
            if frozen:
                parts.append(replace(_passed(part) if self.last else _frozen(part), count=frozen))
            if part.count > frozen:
                parts.append(replace(part, count=part.count - frozen))
        return replace(facts, parts=tuple(parts))


def _frozen(part: Part) -> Part:
    """A part whose weights get no gradients."""
    products = tuple(replace(product, trainable=False) for product in part.matmuls)
    return replace(part, frozen=part.parameters, matmuls=products)


def _passed(part: Part) -> Part:
    """A frozen block before all trained ones, which keeps nothing for backward. Its backward is not free here, as it is in fact:
    one product of each matrix is counted."""
    return replace(_frozen(part), saved=PerToken(), boundary=0.0, saved_fixed=0.0, traffic_backward=PerToken())


def low_rank_share(facts: ModelFacts, rank: int) -> float:
    """Share of an optimizer's two states that is kept if gradients of the blocks' matrices are projected to a rank: the states of
    the longer dimension, and the projection of the shorter one (GaLore, arXiv:2403.03507, section 4)."""
    kept = float(facts.parameters)
    for part in facts.parts:
        for item in part.matmuls if part.role == "block" else ():
            narrow = min(rank, item.k, item.n)
            projected = narrow * max(item.k, item.n) + narrow * min(item.k, item.n) / 2
            kept -= part.count * item.count * item.experts * (item.k * item.n - projected)
    return kept / facts.parameters
