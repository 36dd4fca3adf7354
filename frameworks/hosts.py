"""The hosts of a training, and the line that each of them runs."""

from dataclasses import dataclass

PORT = 29500
"""Where the first host listens for the others unless MASTER_PORT says otherwise: torchrun's own default."""
FIRST = f'"$MASTER_ADDR:${{MASTER_PORT:-{PORT}}}"'
"""The first host's address, in a shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """How processes are shared among hosts, as many on each."""

    count: int
    """Hosts."""
    each: int
    """Processes, and so devices, on each."""

    @classmethod
    def of(cls, processes: int, per_host: int | None) -> "Hosts":
        """The fewest hosts for so many processes, `per_host` at most on each; one where that is not known."""
        most = per_host or processes
        count = next(n for n in range(1, processes + 1) if processes % n == 0 and processes // n <= most)
        return cls(count=count, each=processes // count)

    def __str__(self) -> str:
        return f"{self.count} hosts of {self.each}" if self.count > 1 else "one host"

    def torchrun(self) -> str:
        """torchrun with its options, for a shell; each host runs the same, with MASTER_ADDR the first."""
        if self.count == 1:
            return f"torchrun --nproc-per-node {self.each}"
        return (
            f"torchrun --nnodes {self.count} --nproc-per-node {self.each} --rdzv-backend c10d --rdzv-endpoint {FIRST}"
        )
