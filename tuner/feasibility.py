"""What an out-of-memory failure says of other configurations."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..results import Trial, summary
from ..space import Config, Space

ACCUMULATION = "grad_accum"
"""The standard knob of micro-batches per optimizer step, chosen or derived."""


class OutOfMemoryKnowledge:
    """Which configurations need at least as much memory as one that is known not to fit.

    Knobs say how memory follows them (`monotone_memory`): a configuration that has, against a known OOM, at
    least as much of every knob that raises memory, at most as much of every one that lowers it, and the same
    of all others, needs at least as much memory. Derived knobs follow the others and are left out, but for one:
    with a single micro-batch per step (`grad_accum`) gradients come into being while activations go, so that
    an OOM beside gradients kept from an earlier micro-batch says nothing of it. An OOM that a success
    contradicts, because that needed at least as much, says nothing either: it was a fluke.
    """

    def __init__(self, space: Space) -> None:
        chosen = [knob for knob in space.knobs if not knob.derived]
        self._signs: dict[str, int] = {knob.name: knob.monotone_memory for knob in chosen if knob.monotone_memory}
        self._same = [knob.name for knob in chosen if not knob.monotone_memory]

    def blocked_by(self, config: Config, trials: Sequence[Trial]) -> Trial | None:
        """The OOM among `trials` that rules `config` out; None if none does."""
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
        """Whether `config` is known to need at least the memory of `other`."""
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
        """Why `config` is not run, in a line."""
        differ = [name for name in self._signs if config.get(name) != trial.config.get(name)]
        more = ", ".join(f"{name} {config.get(name)} instead of {trial.config.get(name)}" for name in differ)
        return f"needs at least the memory of trial {trial.number}, which did not fit" + (f" ({more})" if more else "")


def tight_winner(trials: Sequence[Trial], headroom: float) -> str:
    """What to say where the winner leaves less memory free than `headroom`, a share; empty where it does not."""
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
