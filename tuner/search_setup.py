"""What a search knows before its first trial: an estimate, earlier runs, where it begins, and who proposes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..runners.host import HostAgent
from ..runners.work import Work
from .default_prior import assumed_hardware, default_prior
from .first_trial import FirstTrial, first_trial
from .predicting import estimate_to_begin_with, usable
from .request import Request
from .running import make_work, memory_of_rank
from .samplers import Sampler, make_sampler
from .samplers.bayes import BayesSampler
from .samplers.judge import Judge
from .samplers.posterior import SurrogatePrior
from .samplers.predictor import Predictor
from .task import Task
from .transfer import Transferred, calibrations
from .warm_start import WarmStart

if TYPE_CHECKING:
    from ..estimator import Estimator


@dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """What a search begins with."""

    work: Work | None
    """What the processes of a trial run; None where there are none."""
    limit_mib: float | None
    """Memory of a rank, MiB; None for the device's own."""
    estimator: "Estimator | None"
    """Predicts the task's configurations; None where there is no model, or its machine cannot be measured."""
    first: FirstTrial
    """Trial 0."""
    sampler: Sampler
    """Proposes."""
    judge: Judge
    """Says what is left to gain, whoever proposes."""
    predictor: Predictor
    """States what is expected of a trial."""


def begin(
    request: Request,
    task: Task,
    earlier: Sequence[Transferred],
    agent: HostAgent | None,
    warn: Callable[[str], None],
    *,
    earlier_mib: float | None = None,
) -> SearchSetup:
    """Predicts what can be predicted, and makes who proposes.

    Args:
        request: what is asked.
        task: what is tuned.
        earlier: what counts of earlier runs.
        agent: is waited for before this machine is measured, since its imports would be in the way.
        warn: told what its user should know.
        earlier_mib: memory of a rank in the run that is resumed, MiB; None for a new run.
    """
    work, limit_mib = make_work(request, task), memory_of_rank(request, task, warn, earlier_mib=earlier_mib)
    prior: Any = request.prior
    estimator = None
    if task.workload is not None:
        estimator = estimate_to_begin_with(
            task.workload,
            task.space,
            warn,
            devices=task.devices,
            hardware=request.hardware,
            memory_limit_mib=limit_mib,
            free_batch=task.free_batch,
            without=task.without,
            settle=agent.wait_ready if agent is not None else lambda: None,
        )
        if prior is None and estimator is not None:
            if request.listener is not None:
                request.listener.waiting("predicting")
            prior = usable(estimator, task.space, warn)
    elif prior is None and not earlier and request.sampler == BayesSampler.name:
        prior = default_prior(task.space, task.devices, assumed_hardware(task.device, task.space, task.devices))
    first = first_trial(task.space, prior if task.workload is not None else None, request.headroom)
    if earlier:
        for each in earlier:
            warn(each.said)
        own = calibrations(earlier, request.hardware, warn) if estimator is not None and prior is estimator else []
        prior = WarmStart(task.space, earlier, prior, warn, own)
    knowledge = SurrogatePrior(
        task.space,
        seed=request.seed,
        prior=prior,
        warn=warn,
        headroom=request.headroom,
        # A command may count samples or steps where the estimate counts tokens.
        relative=task.command is not None and not task.simulated,
    )
    if request.sampler == BayesSampler.name:
        sampler: Sampler = BayesSampler(task.space, seed=request.seed, knowledge=knowledge)
    else:
        sampler = make_sampler(request.sampler, task.space, seed=request.seed)
        if request.prior is not None or earlier:
            warn(f"the sampler '{request.sampler}' makes no use of a prior or a warm start; '{BayesSampler.name}' does")
    return SearchSetup(
        work=work,
        limit_mib=limit_mib,
        estimator=estimator,
        first=first,
        sampler=sampler,
        judge=Judge(knowledge),
        predictor=Predictor(knowledge),
    )
