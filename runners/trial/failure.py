"""Classifies failures: exceptions, exit codes and printed lines to statuses.

An exception type of torch's own decides the status. The CPU allocator, cuBLAS and NCCL raise plain RuntimeErrors, so
for these the text decides; this file contains every text that redline relies on. A failure that may have causes other
than memory (SIGKILL, a thread that does not start) is `oom` only with further evidence.
"""

import contextlib
import errno
import re
import signal
from collections.abc import Iterator

from ...base.host_memory import MIB
from ...results import Status

NO_METRIC = "without a usable metric"
"""Text in the reason of a timeout of a command that reported no metric."""

# Whole sentences of allocators rather than single words, since other messages may mention memory.
_OOM_SENTENCES = (
    # c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory): you tried to allocate \d+ bytes",
    r"unable to (mmap \d+ bytes from|allocate shared memory\(shm\) for) file <[^>]*>: "
    r"Cannot allocate memory \(12\)",
    # c10/cuda/CUDACachingAllocator.cpp, c10/cuda/CUDAException.cpp, c10/cuda/driver_api.h
    # also torch_npu, torch_musa and torch_mlu
    r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU) out of memory\. Tried to allocate ",
    r"\b(CUDA|HIP)( driver)? error: out of memory(?=$|[\n.])",
    # c10/cuda/CUDAMallocAsyncAllocator.cpp, where a share of the device is the limit
    r"\bAllocation on device \d+ would exceed allowed memory\. \(out of memory\)",
    # c10/cuda/CUDACachingAllocator.cpp asks NVML only to describe an out-of-memory error, and fails where NVML does
    # (https://github.com/pytorch/pytorch/issues/112377).
    r"\bNVML_SUCCESS == [^\n]*INTERNAL ASSERT FAILED at \"[^\"\n]*CUDACachingAllocator\.cpp",
    # aten/src/ATen/mps/MPSAllocator.mm
    r"\bMPS backend out of memory \(MPS allocated: ",
    # paddle/fluid/memory/allocation/cuda_allocator.cc
    r"\bOut of memory error on [A-Z]+ \d+\. Cannot allocate [\d.]+ ?[KMG]?B memory",
    # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT and their ROCm counterparts, in the words of ATen and its wrappers
    r"\b(CUDA|HIP|cuDNN|MIOpen|cusolver|cusparse|cuFFT) error: \w+_ALLOC(ATION)?_FAILED\b",
    # torch/csrc/distributed/c10d/NCCLUtils.hpp with NCCL's own message (src/include/checks.h, alloc.h)
    r"NCCL error(?s:.)*((Cuda|HIP) failure (\d+ )?'out of memory'|Failed to CUDA (host )?[cm]?alloc)",
    # triton/third_party/nvidia/backend/driver.c
    r"Triton Error \[(CUDA|HIP)\]: out of memory",
)
# torch.compile raises an error of its own, without its cause, with the name and the text of the first (torch/_dynamo/exc.py).
_COMPILING = r"|\A(?:backend='[^']*' raised:\s*)?MemoryError:"
_OOM_TEXT = re.compile(
    "|".join(f"(?:{sentence})" for sentence in _OOM_SENTENCES) + r"|\A\s*std::bad_alloc\s*\Z" + _COMPILING
)
# Printed by libstdc++, libgomp and OpenBLAS before they end the process.
_FATAL_OOM = re.compile(
    rf"what\(\): *(std::bad_alloc|[^\n]*(?:{'|'.join(_OOM_SENTENCES[:4])}))"
    r"|libgomp: Out of memory[^\n]*|OpenBLAS error: Memory allocation still failed[^\n]*"
)
# Lines that a program prints, besides the sentences above.
_PRINTED_OOM = re.compile(
    # The last line of a traceback of Python, NumPy, torch and Ray: the exception alone, or with its message.
    r"^(?:\[?rank ?\d+\]?:? ?|\[\d+,\d+\]<std\w+>:? ?)?"
    r"(?:MemoryError|(?:numpy\.[\w.]*)?_ArrayMemoryError|[\w.]+\.OutOfMemoryError)(?::|\s*$)"
    r"|^OSError: \[Errno 12\]|dataloader's workers are out of shared memory"
    # The kernel's log (mm/oom_kill.c), of the machine and of a cgroup.
    r"|\b(?:Out of memory|Memory cgroup out of memory): Kill(?:ed)? process \d+"
    # XLA (JAX, TensorFlow), of the host, of GPUs and of TPUs. Quotas and messages of gRPC have the same status.
    r"|\bRESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate|Attempting to (?:allocate|reserve)\b"
    r"|[^\n]*\bRan out of memory in memory space)"
    # tensorflow/core/framework/op_kernel.cc
    r"|\bOOM when allocating tensor with shape|\bResourceExhaustedError\b[^\n]*\bfailed to allocate memory\b"
    # Slurm: slurmstepd of versions with and without cgroups, and srun. A limit exceeded "at some point" is not a failure.
    r"|\bDetected \d+ oom[-_]kill event|\berror: Exceeded (?:job|step) memory limit(?! at some point)"
    r"|\berror: (?:Job|Step) \S+ exceeded memory limit\b|\bsrun: error: \S+: tasks? [\d,-]+: Out Of Memory"
)
# A thread cannot start if there is no memory for its stack, or if the process has reached its limit of threads.
_NO_THREAD = re.compile(
    r"can't start new thread|libgomp: Thread creation failed[^\n]*"
    r"|OpenBLAS blas_thread_init: pthread_create failed[^\n]*"
)
# oneDNN without memory for the code it generates; the message is the same if the machine forbids such code.
_NO_PRIMITIVE = re.compile(r"\A\s*could not create a primitive\s*\Z")
# A library that creates its handle on a full device; the message is the same if the driver is incompatible.
_NO_HANDLE = re.compile(r"\b(?:CUDA|HIP|cuDNN|MIOpen|cusolver|cusparse) error: \w+_STATUS_NOT_INITIALIZED\b")
# cuDNN's plans all failed, for lack of memory for their workspaces, among other reasons (aten/src/ATen/native/cudnn).
_NO_ENGINE_WORDS = (
    r"(?:(?:GET|FIND) was unable to find an engine to execute this computation"
    r"|Unable to find a valid cuDNN algorithm to run convolution)"
)
_NO_ENGINE = re.compile(rf"\A\s*{_NO_ENGINE_WORDS}")
_PRINTED_NO_ENGINE = re.compile(rf"(?:^|\bRuntimeError: ){_NO_ENGINE_WORDS}")
# NCCL's src/misc/shmutils.cc: ranks on the same host share memory through files.
_NO_SHARED_MEMORY = re.compile(r"shared memory segment /dev/shm/\S+[^\n]*No space left on device")
# Inductor names a library by a digest, in a folder named by the digest's second and third letter.
_DAMAGED_LIBRARY = re.compile(
    r"/\w\w/\w{40,}(?:\.\w+)?\.so: (?:file too short|invalid ELF header|cannot read file data|ELF load command)"
)
_REQUESTED = re.compile(
    r"(?:(?:tried|unable|trying|cannot|failed) to allocate(?: request for)?|cannot allocate|out of memory allocating) "
    r"(?P<amount>[\d.]+) ?(?P<unit>bytes|[KMG]i?B)\b",
    re.IGNORECASE,
)
# torch's MPS, older versions of torch and Paddle write MB for 2**20 bytes.
_UNITS = {"bytes": 1, "k": 1024, "m": MIB, "g": 1024 * MIB}
# gloo and NCCL when the other side of a connection has ended.
PEER_LOST = (
    r"Connection (?:closed|reset) by peer|Broken pipe|Connection refused"
    r"|Socket closed|remote process exited|failed to recv|ncclRemoteError|store[^\n]{0,200}(?:wait timeout|failed)"
    r"|NCCL communicator was aborted|Application timeout caused pair closure"
)
_PEER_LOST = re.compile(PEER_LOST, re.IGNORECASE)


def text_of(error: BaseException) -> str:
    """Returns the message of an exception, or the reason why it cannot be formatted."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its message cannot be printed: {type(failure).__name__})"


def is_oom(error: BaseException) -> bool:
    """True if an exception, or one that it was raised from, reports that memory ran out."""
    return any(_says_oom(cause) for cause in _chain(error))


def _says_oom(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    # torch's, without importing it here.
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and bool(_OOM_TEXT.search(text_of(error)))


def says_peer_lost(output: str) -> bool:
    """True if printed text reports that the other side of a connection has ended."""
    return bool(_PEER_LOST.search(output))


def line_says_oom(line: str) -> bool:
    """True if a line printed by a program reports that memory ran out.

    A convolution without an engine counts: it is most often for lack of a workspace, and no evidence is left when the
    program has ended.
    """
    patterns = (_OOM_TEXT, _FATAL_OOM, _PRINTED_OOM, _NO_SHARED_MEMORY, _PRINTED_NO_ENGINE)
    return any(pattern.search(line) for pattern in patterns)


def requested_in(line: str) -> float | None:
    """Returns the size of the failed allocation that a line names, MiB; None if it names none."""
    match = _REQUESTED.search(line)
    if match is None:
        return None
    unit = match["unit"].lower()
    return float(match["amount"]) * (_UNITS[unit] if unit == "bytes" else _UNITS[unit[0]]) / MIB


def may_be_oom(error: BaseException) -> bool:
    """True if an exception, or one that it was raised from, may be caused by a lack of memory, among other causes.

    These are: a thread that could not be started (or the limit of threads); a primitive that oneDNN could not create
    (or generated code is forbidden); a handle of cuBLAS, cuDNN and the like (or an incompatible driver); a convolution for which
    cuDNN has no engine (or none for its number format).
    """
    return any(
        isinstance(cause, RuntimeError)
        and any(pattern.search(text_of(cause)) for pattern in (_NO_THREAD, _NO_PRIMITIVE, _NO_HANDLE, _NO_ENGINE))
        for cause in _chain(error)
    )


def is_damaged_library(reason: str) -> bool:
    """True if the reason is a damaged compiled library in a cache, which is not the candidate's fault."""
    return _DAMAGED_LIBRARY.search(reason) is not None


def lacks_shared_memory(error: BaseException) -> bool:
    """True if an exception, or one that it was raised from, reports that NCCL found no room in /dev/shm."""
    return any(isinstance(cause, RuntimeError) and _NO_SHARED_MEMORY.search(text_of(cause)) for cause in _chain(error))


def requested_mib(error: BaseException) -> float | None:
    """Returns the size of the failed allocation that the message names, MiB; None if it names none."""
    return next((amount for cause in _chain(error) if (amount := requested_in(text_of(cause))) is not None), None)


def is_peer_lost(error: BaseException) -> bool:
    """True if an exception comes from a collective of which another rank has ended."""
    return any(isinstance(cause, (RuntimeError, OSError)) and says_peer_lost(text_of(cause)) for cause in _chain(error))


def one_line(error: BaseException, limit: int = 300) -> str:
    """Returns `Type: message` of an exception on one line."""
    message = text_of(error).strip()
    return shortened(f"{type(error).__name__}: {message}" if message else type(error).__name__, limit)


def shortened(text: str, limit: int = 300) -> str:
    """Returns a text on one line, cut at `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def from_exit(returncode: int, last_words: str = "", shortage: str | None = None) -> tuple[Status, str]:
    """Returns status and reason of a rank that ended without a report. Negative codes are signals.

    Args:
        returncode: the exit code.
        last_words: the end of its output. A failed allocation outside of Python aborts the process with nothing but a
            line on standard error.
        shortage: evidence that memory was short at that time. Without it, a SIGKILL, which anyone may have sent, and a
            thread that could not start are a `crash`.
    """
    ending = ended(returncode) + (" before it reported" if returncode >= 0 else "")
    fatal = _FATAL_OOM.search(last_words)
    if fatal:
        return Status.OOM, f"{ending}: {fatal[0]}"
    no_thread = _NO_THREAD.search(last_words)
    if no_thread:
        ending = f"{ending}: {no_thread[0]}"
    if returncode != -signal.SIGKILL and not no_thread:
        return Status.CRASH, ending
    if shortage:
        return Status.OOM, f"{ending}: {shortage}"
    return Status.CRASH, f"{ending}, without evidence that memory was short"


def ended(returncode: int) -> str:
    """Describes how a process ended. Negative codes are signals."""
    if returncode >= 0:
        return f"the process exited with code {returncode}"
    name = ""
    with contextlib.suppress(ValueError):  # most real-time signals have no name
        name = f" ({signal.Signals(-returncode).name})"
    return f"killed by signal {-returncode}{name}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
