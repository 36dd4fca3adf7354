"""Messages between a runner, a host agent and the ranks of a trial."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...results import Status

TEARDOWN_S = 15.0
"""Time for killed processes to end on a CPU, s."""
CUDA_TEARDOWN_S = 60.0
"""The same on GPUs, where the driver first unmaps their memory and NCCL's buffers, s."""
COLLECTIVE_MARGIN_S = 60.0
"""Time that collectives wait beyond a trial's deadline, s, since hosts do not begin at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The address at which the ranks of a trial connect to each other."""

    host: str = "127.0.0.1"
    """Address of the host of rank 0."""
    port: int = 0
    """Port on it; 0 to let the agent choose a free one (single-host trials only)."""
    world_size: int = 1
    """Number of ranks over all hosts."""
    first_rank: int = 0
    """Rank of the first process on this host."""
    interface: str = ""
    """Network interface of this host's address. If empty, gloo resolves the host's name, often to the loopback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The part of a trial that one host runs."""

    program: bytes
    """A cloudpickled callable: `program(RankContext) -> picklable report`, run by every rank."""
    ranks: int = 1
    """Number of processes to start on this host."""
    one_a_host: bool = False
    """True for one process a host, with all its devices. The first of these that returns ends the job."""
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    device_type: str = "cpu"
    """`cpu` or `cuda`."""
    device_ids: tuple[str, ...] = ()
    """CUDA devices of the ranks, in order; empty for those visible to the agent."""
    at_once: int = 1
    """Trials that run on a host at once, and share its cores."""
    threads: int | None = None
    """Intra-operator threads of a rank; None for its share of the cores on a GPU, or torch's default on a CPU."""
    memory_limit_mib: float | None = None
    """Memory limit of a rank, MiB; None for none."""
    used_mib: float = 0.0
    """Memory that other processes use on the fullest of its CUDA devices before it starts, MiB."""
    timeout_s: float | None = None
    """Deadline from the job's arrival at the agent, without compilation, s; None for none."""
    compile_timeout_s: float = 0.0
    """Time limit of all compilations together, s."""
    log: str | None = None
    """File for the output of the ranks; None to discard it."""
    log_continues: bool = False
    """True to append to the output of an earlier job of the trial."""

    @property
    def teardown_s(self) -> float:
        """Time for its processes to end after they are killed, s."""
        return CUDA_TEARDOWN_S if self.on_gpus else TEARDOWN_S

    @property
    def on_gpus(self) -> bool:
        """True if its processes use GPUs; a rank that only starts others, as for a command, is itself on the CPU."""
        return self.device_type == "cuda" or bool(self.device_ids)

    @property
    def collective_timeout_s(self) -> float | None:
        """How long a rank may wait for others in a collective, s; None if trials have no deadline.

        Longer than any trial lasts, including compilation on other ranks. A hang is therefore detected by the
        deadline, which leaves the stacks of all ranks, and not by the rank that happens to wait.
        """
        if self.timeout_s is None:
            return None
        return self.timeout_s + self.compile_timeout_s + COLLECTIVE_MARGIN_S


@dataclass(frozen=True, slots=True)
class Begun:
    """The first note to the client of a job."""

    supervisor: int
    """Id of the process that runs it."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """A note that compilation begins or ends, whose time does not count towards the deadline."""

    yes: bool
    """True if any rank of the job compiles from now on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """How one rank ended."""

    rank: int
    """Global rank."""
    status: Status
    """`ok`, or the kind of failure."""
    reason: str = ""
    report: Any = None
    """Result of the program if `ok`."""
    peak_memory_mib: float | None = None
    """Peak memory of the rank, MiB; None if it died before it could report it."""
    needed_memory_mib: float | None = None
    """For an `oom`: memory in use plus the failed request, MiB."""
    secondary: bool = False
    """True if it failed because it lost a peer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended on one host."""

    status: Status
    """The worst status of the ranks."""
    reason: str = ""
    ranks: tuple[RankOutcome, ...] = ()
    """Outcomes of the ranks that ended on their own, in order of rank."""
    secondary: bool = False
    """True if it ended because the ranks of another host had."""

    @classmethod
    def of(cls, ranks: Sequence[RankOutcome], several: bool | None = None) -> "Outcome":
        """Combines the outcomes of ranks. The reason is that of the cause, not of failures that follow from it.

        Args:
            ranks: in order.
            several: True if the trial has several ranks, over all hosts; by default if there are several in `ranks`.
        """
        failed = [outcome for outcome in ranks if outcome.status is not Status.OK]
        if not failed:
            return cls(status=Status.OK, ranks=tuple(ranks))
        # A lost peer is a consequence of another rank's failure. Of several causes an out-of-memory comes first.
        cause = min(failed, key=lambda outcome: (outcome.secondary, outcome.status is not Status.OOM, outcome.rank))
        prefix = f"rank {cause.rank}: " if several or (several is None and len(ranks) > 1) else ""
        return cls(status=cause.status, reason=prefix + cause.reason, ranks=tuple(ranks), secondary=cause.secondary)
