"""What is asked of a training that is taken up again: what was asked before, and what may be asked for anew."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...base.errors import UsageError
from ...training.hyperparameters import Hyperparameters
from .request import MAY_CHANGE, OF_A_START, TrainRequest, as_listed


def taken_up(request: TrainRequest, asked: Mapping[str, Any]) -> TrainRequest:
    """A request to go on with what was asked before.

    Raises:
        UsageError: it contradicts that; names what.
    """
    before, given = TrainRequest.again(request.source, asked), request.given()
    was = before.given()
    for name, value in given.items():
        if name not in MAY_CHANGE and value != as_listed(getattr(before, name)):
            raise UsageError(
                f"the training in '{request.out or request.source}' has {name}={was.get(name, 'the default')}, and cannot go "
                f"on with {value!r}; start another one for that"
            )
    starts = {each: getattr(request, each) for each in OF_A_START if each != "source"}
    return TrainRequest.again(request.source, asked, **{**given, **starts})


def with_schedule(request: TrainRequest, before: TrainRequest, step: int) -> tuple[TrainRequest, str]:
    """A request that has other steps than the training had so far, with a learning rate that goes on by the schedule of
    before; and what a user should know of that, empty where there is nothing to know.

    The schedule moves along with the steps only where that changes nothing at the step the training goes on from, as in the
    stable part of `wsd`; otherwise the rate would jump.

    Args:
        request: what is asked.
        before: what was asked until now.
        step: steps that are done.
    """
    old, new = before.section(Hyperparameters), request.section(Hyperparameters)
    was, horizon = old.lr_factor(step), old.lr_steps or old.steps
    if new.lr_factor(step) == was:
        return request, ""
    if request.lr_steps == before.lr_steps:
        request = replace(request, lr_steps=horizon)
        kept = request.section(Hyperparameters)
        end = f" and stays at {_rate(kept, horizon)} behind it" if request.steps > horizon else ""
        return request, (
            f"the learning rate goes on by its schedule over {horizon} steps, from {_rate(old, step)}{end}; "
            f"--lr-steps {request.steps} has it fall over all {request.steps}, from {_rate(new, step)}"
        )
    return request, (
        f"by --lr-steps {request.lr_steps} the learning rate jumps from {_rate(old, step)} to {_rate(new, step)} at step {step}"
    )


def _rate(hyper: Hyperparameters, step: int) -> str:
    """The learning rate of a step, in words."""
    factor = hyper.lr_factor(step)
    return f"{factor * hyper.lr:.2e}" if hyper.lr is not None else f"{100 * factor:.0f} % of the highest"
