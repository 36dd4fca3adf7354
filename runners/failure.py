"""What a failure means: exceptions and exit codes to statuses.

Where torch raises a type of its own the type decides. The CPU allocator, cuBLAS and NCCL raise plain
RuntimeErrors, so for these the text decides; every text redline relies on stands in this file.
"""

import re
import signal
from collections.abc import Iterator

from ..results import Status

MIB = 1024 * 1024

# c10/core/impl/alloc_cpu.cpp, CUDABlas.cpp, ProcessGroupNCCL.cpp, glibc and CPython, in this order.
_OOM_TEXT = re.compile(
    r"DefaultCPUAllocator: (can't|not enough) "
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory"
    r"|NCCL.*(out of memory|Failed to CUDA malloc|Cuda failure 2 )"
    r"|std::bad_alloc|Cannot allocate memory|can't start new thread|can't allocate memory"
)
# What libstdc++, libgomp and OpenBLAS print before they end the process.
_FATAL_OOM = re.compile(
    r"what\(\): *std::bad_alloc|libgomp: (Thread creation failed|Out of memory)[^\n]*"
    r"|OpenBLAS[^\n]*(allocat|Resource temporarily unavailable)[^\n]*"
)
_REQUESTED = re.compile(r"tried to allocate (?P<amount>[\d.]+) ?(?P<unit>bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB}
# gloo and NCCL when the other side of a connection is gone.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused"
    r"|Socket closed|remote process exited|failed to recv|ncclRemoteError|store.*(wait timeout|failed)"
    r"|NCCL communicator was aborted|Application timeout caused pair closure",
    re.IGNORECASE,
)

_WRAPPED = re.compile(r"\[Stage \d+\] failed to run (forward|backward)")


def is_oom(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that memory ran out."""
    return any(_says_oom(each) for each in _chain(error))


def _says_oom(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    name = type(error).__name__
    if name in ("OutOfMemoryError", "OutOfMemory"):  # torch's, without importing torch here
        return True
    return isinstance(error, (RuntimeError, OSError)) and bool(_OOM_TEXT.search(str(error)))


def requested_mib(error: BaseException) -> float | None:
    """How much memory the failed allocation asked for, where the message says so, MiB."""
    for each in _chain(error):
        match = _REQUESTED.search(str(each))
        if match:
            return float(match["amount"]) * _UNITS[match["unit"].lower()] / MIB
    return None


def is_peer_lost(error: BaseException) -> bool:
    """Whether an exception comes from a collective whose other side went away."""
    return any(
        isinstance(each, (RuntimeError, OSError)) and bool(_PEER_LOST.search(str(each))) for each in _chain(error)
    )


def one_line(error: BaseException, limit: int = 300) -> str:
    """`Type: message` of an exception on one line."""
    # torch.distributed.pipelining wraps what a stage raises in the shapes of its arguments.
    if error.__cause__ is not None and _WRAPPED.search(str(error)):
        return one_line(error.__cause__, limit)
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"


def from_exit(returncode: int, last_words: str = "") -> tuple[Status, str]:
    """Status and reason of a rank that ended without a report; negative codes are signals.

    `last_words` is the end of what it printed: an allocation that fails outside of Python aborts the
    process with nothing but a line on standard error.
    """
    if returncode == -signal.SIGKILL:
        return Status.OOM, "killed by SIGKILL, as the kernel's out-of-memory killer does"
    if returncode >= 0:
        how = f"the process exited with code {returncode} before it reported"
    else:
        how = f"killed by {signal.Signals(-returncode).name}"
    fatal = _FATAL_OOM.search(last_words)
    if fatal:
        return Status.OOM, f"{how}: {fatal[0]}"
    return Status.CRASH, how


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
