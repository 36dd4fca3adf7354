"""What a searcher may take: it resolves and traces models that somebody else describes."""

from dataclasses import dataclass

from ..base.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class SearcherLimits:
    """Limits of a searcher's process. A search that breaks one has failed, as it would break it again."""

    memory_mib: float = 4096.0
    """Memory beyond what all searchers share, MiB. Processes that it starts to trace a model have each as much."""
    cpu_s: float = 12 * 3600.0
    """Processor time of its process, s."""
    preparing_s: float = 900.0
    """From when its devices are known until its first trial, s: the model is resolved and traced in that time."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0, but got {getattr(self, name)!r}")

    def broken(self, cpu_s: float, preparing_s: float) -> str:
        """Which of the times a searcher has exceeded, in words; empty where it has not."""
        if cpu_s > self.cpu_s:
            return f"its searcher used more than the {self.cpu_s / 3600:g} hours of processor time that it may"
        if preparing_s > self.preparing_s:
            return (
                f"resolving and tracing its model took longer than the {self.preparing_s:g} s that it may; "
                "ask for a smaller model"
            )
        return ""

    @property
    def too_large(self) -> str:
        """What is said where the memory is exceeded."""
        return (
            f"its searcher needed more than the {self.memory_mib / 1024:g} GiB of memory that it may have; ask for a "
            "smaller model or space"
        )
