"""When a trial has had its time: compilation does not count, and has a time of its own."""

import math
from dataclasses import dataclass


@dataclass
class Deadline:
    """Tells when a trial is to be ended; moments are those of one clock, s.

    The trial's own time stands still while any of its ranks compiles: the others may wait for that one. All
    its compilations together may take their own time and no more, so that one that hangs ends as well.
    """

    begin: float
    """When the trial began."""
    timeout_s: float | None = None
    """Its own time; None for no end, of compilation neither."""
    compile_timeout_s: float = 0.0
    """Time of all its compilations."""
    _compiled: float = 0.0
    _since: float | None = None

    def compiling(self, yes: bool, now: float) -> bool:
        """Takes note of whether any rank compiles from now on; whether that is news."""
        if yes == self.in_compilation:
            return False
        if self._since is None:
            self._since = now
        else:
            self._compiled += now - self._since
            self._since = None
        return True

    @property
    def in_compilation(self) -> bool:
        """Whether it is compilation's time that runs."""
        return self._since is not None

    @property
    def at(self) -> float:
        """The moment at which the trial is to be ended if nothing changes; infinite for never."""
        if self.timeout_s is None:
            return math.inf
        if self._since is not None:
            return self._since + self.compile_timeout_s - self._compiled
        return self.begin + self.timeout_s + self._compiled

    @property
    def reason(self) -> str:
        """What took too long, in words."""
        if self.in_compilation:
            return f"compilation took more than {self.compile_timeout_s:g} s"
        return f"no result within {self.timeout_s:g} s"
