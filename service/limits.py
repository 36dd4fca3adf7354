"""Limits of a searcher's process, which resolves and traces models described by users."""

from dataclasses import dataclass

from ..base.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class SearcherLimits:
    """Limits of a searcher's process. A search that exceeds one fails, since a retry would exceed it again."""

    memory_mib: float = 4096.0
    """Memory beyond that shared by all searchers, MiB. Each process that it starts to trace a model has the same limit."""
    cpu_s: float = 12 * 3600.0
    """CPU time of the process, s."""
    preparing_s: float = 900.0
    """Time to resolve and trace the model, from the choice of devices to the first trial, s."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0, but got {getattr(self, name)!r}")

    def broken(self, cpu_s: float, preparing_s: float) -> str:
        """Returns an error text for the exceeded time limit; empty if none is exceeded."""
        if cpu_s > self.cpu_s:
            return f"its searcher used more than its limit of {self.cpu_s / 3600:g} hours of CPU time"
        if preparing_s > self.preparing_s:
            return (
                f"resolving and tracing its model took longer than the limit of {self.preparing_s:g} s; "
                "submit a smaller model"
            )
        return ""

    @property
    def too_large(self) -> str:
        """The error text for an exceeded memory limit."""
        return (
            f"its searcher needed more memory than its limit of {self.memory_mib / 1024:g} GiB; submit a "
            "smaller model or space"
        )
