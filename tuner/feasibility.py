"""Rules out configurations that need at least the memory of one that failed."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..results import Trial, summary
from ..space import Config, Space

ACCUMULATION = "grad_accum"
"""Standard knob of micro-batches per optimizer step, chosen or derived."""


class OutOfMemoryKnowledge:
    """Finds configurations that need at least as much memory as one that is known not to fit.

    Knobs declare how memory depends on them (`monotone_memory`). A configuration needs at least the memory of a known
    OOM if it has at least as much of every knob that raises memory, at most as much of every one that lowers it, and
    equal values of all others. Derived knobs follow the others and are left out, with one exception: with a single
    micro-batch per step (`grad_accum`) gradients are allocated while activations are freed, so an OOM of a
    configuration that keeps gradients of earlier micro-batches does not rule it out. An OOM is ignored if a
    configuration that needs at least as much memory succeeded.
    """

    def __init__(self, space: Space) -> None:
        chosen = [knob for knob in space.knobs if not knob.derived]
        self._signs: dict[str, int] = {knob.name: knob.monotone_memory for knob in chosen if knob.monotone_memory}
        self._same = [knob.name for knob in chosen if not knob.monotone_memory]

    def blocked_by(self, config: Config, trials: Sequence[Trial]) -> Trial | None:
        """Returns the OOM among `trials` that rules `config` out; None if there is none."""
        if not self._signs:
            return None
        known = [t for t in trials if not t.pending and t.measured.did_not_fit]
        works = [t.config for t in trials if t.ok]
        for trial in known:
            if self.needs_as_much(config, trial.config) and not any(
                self.needs_as_much(each, trial.config) for each in works
            ):
                return trial
        return None

    def needs_as_much(self, config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """True if `config` is known to need at least the memory of `other`."""
        if any(config.get(name) != other.get(name) for name in self._same):
            return False
        if config.get(ACCUMULATION) == 1 and other.get(ACCUMULATION, 1) != 1:
            return False
        for name, sign in self._signs.items():
            here, there = config.get(name), other.get(name)
            if here == there:
                continue
            if here is None or there is None or (here - there) * sign < 0:
                return False
        return True

    def say(self, trial: Trial, config: Config) -> str:
        """Reason why `config` is not run, in a line."""
        differ = [name for name in self._signs if config.get(name) != trial.config.get(name)]
        more = ", ".join(f"{name} {config.get(name)} instead of {trial.config.get(name)}" for name in differ)
        return f"needs at least the memory of trial {trial.number}, which did not fit" + (f" ({more})" if more else "")


HEADROOM = 0.05
"""Share of a device's memory that candidates are expected to leave free."""


def tight_winner(trials: Sequence[Trial], headroom: float) -> str:
    """Warning if the winner leaves less memory free than `headroom`, a share; otherwise empty."""
    winner = summary.best(trials)
    if winner is None:
        return ""
    peak, limit = winner.measured.peak_memory_mib, winner.measured.memory_limit_mib
    if not peak or not limit or peak <= (1.0 - headroom) * limit:
        return ""
    return (
        f"the winner, trial {winner.number}, takes {100 * peak / limit:.1f} % of the memory, more than the headroom of "
        f"{100 * headroom:g} % leaves; it may run out of memory in a long run"
    )
