"""Refinement of the winner: a strategy for each block, chosen by the estimator, as a further trial."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..base.errors import UsageError
from ..base.option import option
from ..knobs.rules import RuleContext
from ..models import Workload
from ..results import Trial, summary
from ..results.measurement import REFINEMENT
from ..space import Config, Space
from .search import Refinement

if TYPE_CHECKING:
    from ..estimator import Estimator


def check_refinable(workload: Workload | None, space: Space) -> None:
    """Checks that the workload and the space support refinement block by block.

    Raises:
        UsageError: they do not.
    """
    from ..estimator.layerwise import followed

    if workload is None:
        raise UsageError(
            f"{option('layerwise', True)} needs a workload, whose blocks can be treated unlike each other, not a callable or a "
            "command"
        )
    if not followed(workload):
        raise UsageError(
            f"{option('layerwise', True)} needs a schedule that follows a strategy for each block, but the workload has its own"
        )
    if not {"checkpoint_ratio", "zero", "tp"} & set(space.by_name):
        raise UsageError(
            f"{option('layerwise', True)} chooses tp, zero or checkpointing of each block, but the space has none of these knobs"
        )


def refiner(
    estimator: "Estimator | None", space: Space, headroom: float, warn: Callable[[str], None]
) -> Callable[[Sequence[Trial]], Refinement | None]:
    """Returns a function for `Search.refine` that refines the winner of trials block by block.

    The estimator is calibrated by the trials first, as the plan depends on how much memory is left. Without an
    estimator, if it cannot predict this model, or if it predicts no gain, nothing is refined, and `warn` receives the
    reason.
    """

    def refined(trials: Sequence[Trial]) -> Refinement | None:
        from ..estimator.knob_arrays import knob_arrays
        from ..estimator.layerwise import MARGIN, refine, relatives
        from ..estimator.survey import Ranked

        winner = summary.best(trials)
        if winner is None or winner.sampler == REFINEMENT:
            return None
        if estimator is None:
            warn("the winner is not refined layer by layer: there is no estimate")
            return None
        try:
            learned = estimator.calibrate([trial for trial in trials if not trial.pending])
            facts = learned.facts_of(knob_arrays([winner.config], learned.training), 0)
            refinement = refine(
                learned,
                Ranked(config=winner.config, estimate=learned(winner.config)),
                facts,
                relatives(space, winner.config),
                margin=min(MARGIN, 1.0 - headroom),
                context=space.beyond if isinstance(space.beyond, RuleContext) else None,
            )
        except UsageError as error:
            warn(f"the winner is not refined layer by layer: {error}")
            return None
        amounts = refinement.amounts_to()
        if refinement.gain <= 0 or any(dict(trial.config) == amounts for trial in trials):
            warn("the winner is not refined layer by layer: no gain is expected")
            return None
        return Refinement(
            config=Config(refinement.config),
            # Only the gain is predicted: the speed of the uniform configuration was measured.
            predicted_throughput=(1 + refinement.gain) * winner.throughput,
            predicted_memory_mib=refinement.estimate.peak_memory_mib,
            summary="\n".join(refinement.lines()),
        )

    return refined
