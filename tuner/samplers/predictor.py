"""What is expected of a configuration before it runs, as it stands beside what was measured."""

import numpy as np

from ...space import Config
from .posterior import SurrogatePrior


class Predictor:
    """States what the estimate of a search says.

    Args:
        knowledge: of the space.
    """

    def __init__(self, knowledge: SurrogatePrior) -> None:
        self.knowledge = knowledge

    def prediction(self, config: Config) -> tuple[float | None, float | None]:
        """Throughput and peak memory (MiB) that the prior states; None where it states none."""
        answers = self.knowledge.answers
        if answers is None or self.knowledge.relative:
            return None, None
        if not answers.knows(config) and self.knowledge.small:
            answers.of(list(self.knowledge.space))  # all at once: what is wrong with the prior is said of all
        found = answers.of([config])
        throughput, memory = found.log_throughput[0], found.log_memory[0]
        return _number(throughput), _number(memory)


def _number(log: float) -> float | None:
    return float(np.exp(log)) if np.isfinite(log) else None
