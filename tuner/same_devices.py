"""What earlier runs on the same devices found out of the estimate itself, whatever they trained."""

from collections.abc import Callable, Sequence
from os.path import isabs
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import UsageError
from ..models.resolve import workload as resolve_workload
from ..models.server_model import ServerModel
from ..space import Space
from .earlier_runs import Transferred
from .predicting import estimator_of

if TYPE_CHECKING:
    from ..estimator import Estimator, Hardware


def calibrations(
    earlier: Sequence[Transferred], hardware: "str | Path | Hardware | None", warn: Callable[[str], None]
) -> "list[Estimator | None]":
    """For each earlier run the estimator of what it trained, with what it measured; None for a run on other devices, or
    of which nothing can be predicted.

    Args:
        earlier: what counts of earlier runs.
        hardware: what the estimate of this search takes the devices for.
        warn: told what the runs say of the devices.
    """
    found = [_calibrated(each, hardware) for each in earlier]
    runs = sum(each is not None for each in found)
    if trials := sum(each.calibrated for each in found if each is not None):
        warn(
            f"the estimate begins with what {trials} trials of {runs} earlier run{'s'[: runs > 1]} say of these devices"
        )
    return found


def _calibrated(taken: Transferred, hardware: "str | Path | Hardware | None") -> "Estimator | None":
    asked = taken.run.asked
    what = asked.get("workload") or {}
    spec = what.get("spec")
    # Somebody's file is not run to learn from it, and a command's steps are another trainer's.
    if not taken.same_devices or not spec or ".py" in spec or "command" in what:
        return None
    try:
        # What is not a path from the root on is a name, even where there is a file of that name now.
        named = spec if isabs(spec) else ServerModel.named(spec)
        model = resolve_workload(
            named, seq_len=asked.get("seq_len"), global_batch=asked.get("global_batch"), lora=what.get("lora")
        )
        space = Space.from_dict(asked["space"])
        accumulated = space.by_name.get("grad_accum")
        return estimator_of(
            model,
            space,
            devices=asked["devices"]["used"],
            hardware=hardware,
            memory_limit_mib=asked.get("memory_limit_mib"),
            free_batch=accumulated is not None and not accumulated.derived,
        ).calibrate(taken.run.trials)
    except UsageError:  # a model that is no more there, a space of an earlier version
        return None
