"""What travels between a runner, a host agent and the ranks of a trial."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ..results import Status

STOP = "stop"
"""What a client sends to end a job whose outcome it still wants."""
TEARDOWN_S = 10.0
"""How long killed processes may take to end on a CPU, s."""
CUDA_TEARDOWN_S = 60.0
"""The same on GPUs: the driver unmaps their memory and the buffers of NCCL first, s."""
COLLECTIVE_MARGIN_S = 60.0
"""What collectives wait beyond a trial's deadline: hosts do not begin at the same moment, s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the ranks of a trial meet."""

    host: str = "127.0.0.1"
    """Address of the host of rank 0."""
    port: int = 0
    """Port on it; 0 lets the agent pick a free one (single-host trials only)."""
    world_size: int = 1
    """Ranks over all hosts."""
    first_rank: int = 0
    """Rank of the first process on this host."""
    interface: str = ""
    """Network interface by which this host is reached; empty lets gloo ask the resolver for the host's name,
    which often answers with the loopback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One trial's work on one host."""

    program: bytes
    """A cloudpickled callable: `program(RankContext) -> picklable report`, run by every rank."""
    ranks: int = 1
    """Processes to start on this host."""
    one_a_host: bool = False
    """Whether every host has one process, whatever its devices. The first of these that returns ends the job."""
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    """How they find each other."""
    device_type: str = "cpu"
    """`cpu` or `cuda`."""
    device_ids: tuple[str, ...] = ()
    """CUDA devices for the ranks, in order; empty leaves the agent's own visible devices."""
    threads: int | None = None
    """Intra-operator threads of a rank; None leaves torch's default."""
    memory_limit_mib: float | None = None
    """Memory a rank may take, MiB; None for no limit."""
    used_mib: float = 0.0
    """What other processes hold of the fullest of its CUDA devices before it starts, MiB."""
    timeout_s: float | None = None
    """Deadline counted from the job's arrival at the agent, s; None for none. Compilation does not count."""
    compile_timeout_s: float = 0.0
    """What all compilations together may take beside it, s."""
    log: str | None = None
    """File for what the ranks print; None discards it."""
    log_continues: bool = False
    """Whether it goes behind what an earlier job of the trial wrote there."""
    beside: tuple[bytes, ...] = ()
    """Further programs, which are in memory with the first and take turns with it (see `turns`)."""
    turn_s: float = 0.5
    """How long a turn is, s."""
    turns: int = 12
    """How many turns each program has, unless they take too long."""
    turns_s: float = 0.0
    """How long all turns together may take, s."""
    patience_s: float = 0.0
    """How much longer they may take while others keep cores busy, s: those turns count for nothing until then."""

    @property
    def teardown_s(self) -> float:
        """How long its processes may take to end once they are killed, s."""
        return CUDA_TEARDOWN_S if self.device_type == "cuda" else TEARDOWN_S

    @property
    def collective_timeout_s(self) -> float | None:
        """How long a rank may wait for others in a collective, s; None where trials have no deadline.

        Longer than any trial lasts, compilation on other ranks included, so that what hangs is found by the
        deadline, which leaves the stacks of all ranks, and not by the one that happens to wait.
        """
        if self.timeout_s is None:
            return None
        return self.timeout_s + self.compile_timeout_s + COLLECTIVE_MARGIN_S


class AgentTask(ABC):
    """Something other than a trial that a host agent does in a fork of itself: nobody watches over it, and it ends with the
    agent. It travels as a pickle, so its module must be importable there."""

    @abstractmethod
    def run(self, client: Connection) -> None:
        """Does it.

        Args:
            client: the connection with who asked. That closes when they end, which is for the task to heed.
        """


@dataclass(frozen=True, slots=True)
class Begun:
    """The first that a client hears of its job, or of its task."""

    supervisor: int
    """Process that answers for it."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """Told whenever it changes, as compilation does not count towards the deadline."""

    yes: bool
    """Whether any rank of the job compiles from now on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """How one rank ended."""

    rank: int
    """Global rank."""
    status: Status
    """`ok`, or what ended it."""
    reason: str = ""
    """Why, when not `ok`."""
    report: Any = None
    """What the program returned, when `ok`."""
    peak_memory_mib: float | None = None
    """Peak memory of the rank, where it lived to tell, MiB."""
    needed_memory_mib: float | None = None
    """For an `oom`: what the rank held plus what it asked for, MiB."""
    secondary: bool = False
    """Failed because it lost a peer, not by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended on one host."""

    status: Status
    """The worst that happened."""
    reason: str = ""
    """Why, in one line."""
    ranks: tuple[RankOutcome, ...] = ()
    """Those that ended by themselves, in order of rank."""
    secondary: bool = False
    """Ended because another host's ranks had, not by itself."""

    @classmethod
    def of(cls, ranks: Sequence[RankOutcome], several: bool | None = None) -> "Outcome":
        """What the ranks that have an outcome come to: the cause of a failure rather than its echoes.

        Args:
            ranks: in their order.
            several: whether the trial has others too; by default whether these are several.
        """
        failed = [each for each in ranks if each.status is not Status.OK]
        if not failed:
            return cls(status=Status.OK, ranks=tuple(ranks))
        # A lost peer is an echo; a signal or an allocation failure is a cause.
        cause = min(failed, key=lambda each: (each.secondary, each.status is not Status.OOM, each.rank))
        where = f"rank {cause.rank}: " if several or (several is None and len(ranks) > 1) else ""
        return cls(status=cause.status, reason=where + cause.reason, ranks=tuple(ranks), secondary=cause.secondary)
