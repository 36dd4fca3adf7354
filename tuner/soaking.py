"""The winner soaked before it is named: what is fast on equal batches may run out of memory on those of real data."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..results import Measurement, RunFolder, Trial, summary
from ..runners.soak import SoakPlan
from .budget import Stopwatch


@dataclass(frozen=True, kw_only=True)
class Soaking:
    """Soaks the winner, and where it does not hold up the next one, until one holds."""

    run_folder: RunFolder
    """Trials and files."""
    plan: SoakPlan
    """How long each is soaked."""
    measure: Callable[[Trial, SoakPlan], Measurement]
    """A trial's configuration dry-run and soaked."""
    say: Callable[[str], None]
    """Told what came of each."""
    watch: Stopwatch
    """Time left of the search."""

    def expected_s(self, typical_s: float) -> float:
        """What a soak of the winner takes, s.

        Args:
            typical_s: what a trial takes.
        """
        winner = summary.best(self.run_folder.trials())
        step_ms = None if winner is None else winner.measured.step_ms
        return 0.0 if step_ms is None else typical_s + (self.plan.steps + 2) * step_ms / 1e3

    def run(self) -> None:
        """A trial that does not hold up has the status of its soak from then on, and leads no more."""
        while (winner := summary.best(self.run_folder.trials())) is not None:
            if self.watch.left <= 0:
                self.say(f"the time was up before trial {winner.number}, which leads, was soaked")
                return
            found = self.measure(winner, self.plan)
            if found.ok:
                self.say(f"trial {winner.number} held up: {found.reason}{_memory(found, winner)}")
                return
            failed = replace(found, reason=f"in its soak: {found.reason or found.status}")
            self.run_folder.remeasure(winner.number, winner.remeasured, failed)
            self.say(f"trial {winner.number} led, and did not hold up: {found.status} {failed.reason}")


def _memory(found: Measurement, winner: Trial) -> str:
    now, before = found.peak_memory_mib, winner.measured.peak_memory_mib
    return f"; {now:,.0f} MiB at its peak, {before:,.0f} MiB before" if now and before else ""
