"""Exceptions and exit codes become the right status, whatever allocator or library they come from."""

import signal

import pytest
import torch

from redline import OutOfMemory
from redline.results import Status
from redline.runners import failure


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemory("by hand"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp: ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: f"{type(error).__name__}-{str(error)[:24]}",
)
def test_every_way_to_run_out_of_memory_is_oom(error):
    assert failure.is_oom(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory is not what this is about"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError("memory"),
    ],
    ids=lambda error: str(error)[:24],
)
def test_other_errors_are_not(error):
    assert not failure.is_oom(error)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("you tried to allocate 1073741824 bytes. Error code 12", 1024),
        ("Tried to allocate 20.00 MiB. GPU 0", 20),
        ("Tried to allocate 1.50 GiB. GPU 0", 1536),
    ],
)
def test_the_amount_asked_for_is_read_in_mib(text, mib):
    assert failure.requested_mib(RuntimeError(text)) == pytest.approx(mib)


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        (-signal.SIGKILL, "", Status.OOM),
        (-signal.SIGSEGV, "", Status.CRASH),
        (-signal.SIGABRT, "  what():  std::bad_alloc", Status.OOM),
        (-signal.SIGABRT, "Assertion failed", Status.CRASH),
        (1, "libgomp: Thread creation failed: Resource temporarily unavailable", Status.OOM),
        (3, "", Status.CRASH),
    ],
)
def test_an_exit_without_a_report_is_judged_by_signal_and_last_words(code, words, status):
    assert failure.from_exit(code, words)[0] is status


def test_a_lost_peer_is_told_from_a_cause():
    assert failure.is_peer_lost(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]"))
    assert not failure.is_peer_lost(RuntimeError("shape '[2]' is invalid"))


def test_a_long_message_becomes_one_short_line():
    line = failure.one_line(RuntimeError("first\nsecond " + "x" * 1000))
    assert line.startswith("RuntimeError: first second")
    assert len(line) == 300


def test_the_reason_of_a_pipeline_stage_is_what_it_raised():
    wrapped = RuntimeError("\n            [Stage 1] failed to run forward:\n  args: ('Tensor',)")
    wrapped.__cause__ = ValueError("heads differ")
    assert failure.one_line(wrapped) == "ValueError: heads differ"
    lost = RuntimeError("[Stage 0] failed to run backward: ...")
    lost.__cause__ = RuntimeError("Connection closed by peer [127.0.0.1]:1")
    assert failure.is_peer_lost(lost)
