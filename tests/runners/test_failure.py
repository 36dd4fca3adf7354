"""Exceptions and exit codes get the right status, whichever allocator or library raises them."""

import signal

import numpy as np
import pytest
import torch
from redline import OutOfMemory
from redline.results import Status
from redline.runners.trial import failure, rank
from redline.runners.trial.job import Job
from redline.runners.trial.memory import MemoryMeter

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1073741824 bytes. Error code 12 (Cannot allocate memory)"
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
NOTE = "\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemory("by hand"),
        torch._dynamo.exc.InternalTorchDynamoError("MemoryError: \n\nfrom user code:\n   File x.py"),
        torch._dynamo.exc.BackendCompilerFailed(lambda: None, MemoryError(), None),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity)"),
        RuntimeError(
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: out of memory" + NOTE),
        RuntimeError("HIP error: out of memory" + NOTE),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError(
            "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 70 GiB"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError(NCCL + "Cuda failure 2 'out of memory'"),
        RuntimeError(NCCL + "Cuda failure 'out of memory'"),
        RuntimeError(NCCL + "Failed to CUDA calloc async 608 bytes"),
        RuntimeError(CPU_ALLOCATOR),
        RuntimeError(CPU_ALLOCATOR.replace("can't allocate memory:", "not enough memory:")),
        RuntimeError("unable to mmap 4096 bytes from file </torch_12_34_0>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: f"{type(error).__name__}-{str(error)[-40:]}",
)
def test_every_way_to_run_out_of_memory_is_oom(error):
    assert failure.is_oom(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered" + NOTE),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError(NCCL + "Cuda failure 999 'unknown error'"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        RuntimeError("set PYTORCH_CUDA_ALLOC_CONF where CUDA out of memory is seen"),
        RuntimeError("this model was exported to avoid `CUDA error: out of memory` on small devices"),
        RuntimeError("std::bad_alloc is what version 1 of this file raised"),
        RuntimeError("not enough memory lanes: can't allocate memory by that name"),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"),
        RuntimeError("unable to mmap 4096 bytes from file </torch_1_2_0>: Permission denied (13)"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
                     "are out of shared memory. Please try to raise your shared memory limit."),
        OSError(11, "Resource temporarily unavailable"),
        OSError(28, "No space left on device"),
        ValueError("out of memory is not what this is about"),
        ValueError(CPU_ALLOCATOR),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError("memory"),
    ],
    ids=lambda error: str(error)[-40:],
)  # fmt: skip
def test_messages_that_only_mention_memory_are_crashes(error):
    assert not failure.is_oom(error)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 60), lambda: np.ones(1 << 50)],
)
def test_errors_of_the_real_allocators_are_oom(make):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        make()
    assert failure.is_oom(caught.value)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("you tried to allocate 1073741824 bytes. Error code 12", 1024),
        ("Tried to allocate 20.00 MiB. GPU 0", 20),
        ("Tried to allocate 1.50 GiB. GPU 0", 1536),
        ("Tried to allocate 512.00 KiB. GPU 0", 0.5),
        ("MPS backend out of memory (MPS allocated: 5.56 GB). Tried to allocate 768.00 MB on private pool.", 768),
        ("Out of memory error on GPU 0. Cannot allocate 1.5GB memory on GPU 0, available memory is only 15.1MB.", 1536),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.", 6),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 12582912 bytes.", 12),
    ],
)
def test_the_amount_asked_for_is_read_in_mib(text, mib):
    assert failure.requested_mib(RuntimeError(text)) == pytest.approx(mib)


THREAD = "libgomp: Thread creation failed: Resource temporarily unavailable"
WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0 Rank 0] "
    f"Process group watchdog thread terminated with exception: CUDA error: out of memory{NOTE}"
)


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        (-signal.SIGSEGV, "", Status.CRASH),
        (-signal.SIGABRT, "  what():  std::bad_alloc", Status.OOM),
        (-signal.SIGABRT, f"terminate called\n  what():  {CPU_ALLOCATOR}", Status.OOM),
        (-signal.SIGABRT, "  what():  CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", Status.OOM),
        (-signal.SIGABRT, WATCHDOG, Status.OOM),
        (-signal.SIGABRT, "  what():  std::out_of_range", Status.CRASH),
        (-signal.SIGABRT, "Assertion failed", Status.CRASH),
        (1, "libgomp: Out of memory allocating 4096 bytes", Status.OOM),
        (1, "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", Status.OOM),
        (1, "OpenBLAS : Program is Terminated. Because you tried to allocate too many memory regions.", Status.CRASH),
        (3, "", Status.CRASH),
    ],
)
def test_an_exit_without_a_report_is_judged_by_signal_and_last_words(code, words, status):
    assert failure.from_exit(code, words)[0] is status


@pytest.mark.parametrize(
    "line",
    [
        "MemoryError",
        "[rank3]: MemoryError: Unable to allocate 3 GiB",
        "[1,0]<stderr>:MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.",
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory. Please try to raise your shared memory limit.",
        "Error while creating shared memory segment /dev/shm/nccl-9VQnXl (size 33030528), error: No space left on device (28)",
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report',
        "RuntimeError: NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
        '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":995, please report a bug to PyTorch.',
        "RuntimeError: GET was unable to find an engine to execute this computation",
        "RuntimeError: MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB, max allowed: "
        "18.13 GiB). Tried to allocate 5.81 GiB on private pool.",
        "RuntimeError: NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB already",
        "Out of memory error on GPU 0. Cannot allocate 98.000244MB memory on GPU 0, 6.000000GB memory has been allocated",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.",
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 1.00GiB (1073741824B) on device",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.91G of 15.48G",
        "ResourceExhaustedError: OOM when allocating tensor with shape[16,12,512,512] and type float on /job:localhost",
        "  (0) Resource exhausted: OOM when allocating tensor with shape[16,112,112,147] and type float on /job:localhost",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some of your processes may have been",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.batch. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Exceeded job memory limit",
        "slurmstepd: error: Job 1734 exceeded memory limit (1052 > 1024), being killed",
        "srun: error: o0616: task 0: Out Of Memory",
        "[123.4] Memory cgroup out of memory: Killed process 4242 (python) total-vm:9437184kB, anon-rss:8388608kB",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ],
)
def test_a_printed_line_of_any_program_may_say_that_memory_ran_out(line):
    assert failure.line_says_oom(line)


@pytest.mark.parametrize(
    "line",
    [
        "OSError: [Errno 28] No space left on device",
        "RESOURCE_EXHAUSTED: quota",
        "RESOURCE_EXHAUSTED: Received message larger than max (5242880 vs. 4194304)",
        "raises MemoryError if full",
        "retrying on MemoryError is enabled",
        "MemoryError is caught and the batch halved",
        "MemoryError,",
        "class MemoryErrorHandler:",
        "    except MemoryError:",
        "torch.OutOfMemoryError is handled by --auto_find_batch_size",
        "W tensorflow: Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.20GiB with freed_by_count=0. The caller "
        "indicates that this is not a failure",
        "slurmstepd: error: Exceeded step memory limit at some point.",
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDAMiscFunctions.cpp":12, please report',
        "docs: if cuDNN was unable to find an engine to execute this computation, upgrade it",
    ],
)
def test_other_lines_say_nothing_about_memory(line):
    assert not failure.line_says_oom(line)


@pytest.mark.parametrize(("code", "words"), [(-signal.SIGKILL, ""), (1, THREAD)])
def test_ambiguous_errors_are_oom_only_with_evidence(code, words):
    status, reason = failure.from_exit(code, words)
    assert status is Status.CRASH
    assert reason.endswith("without evidence that memory was short")
    status, reason = failure.from_exit(code, words, "2 of 512 MiB were left")
    assert status is Status.OOM
    assert reason.endswith(": 2 of 512 MiB were left")


def test_a_lost_peer_is_told_from_a_cause():
    assert failure.is_peer_lost(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]"))
    assert not failure.is_peer_lost(RuntimeError("shape '[2]' is invalid"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    ],
)
def test_a_library_without_its_handle_or_workspace_may_have_run_out_of_memory(error):
    assert failure.may_be_oom(error) and not failure.is_oom(error)


def test_a_cause_that_the_program_has_dealt_with_does_not_count():
    def failing(suppress):
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("no such option") from (None if suppress else error)

    for suppress in (True, False):
        with pytest.raises(ValueError) as caught:
            failing(suppress)
        assert failure.is_oom(caught.value) is not suppress


SHM = "Error while creating shared memory segment /dev/shm/nccl-9VQnXl (size 33030528), error: No space left on device (28)"


def test_nccl_without_shared_memory_is_told_from_a_full_disk():
    assert failure.lacks_shared_memory(RuntimeError(NCCL + SHM))
    assert not failure.lacks_shared_memory(OSError(28, "No space left on device"))
    assert not failure.lacks_shared_memory(RuntimeError(SHM.replace("No space left on device", "Permission denied")))


class _Meter(MemoryMeter):
    """A meter of a device that is as full as `short` states."""

    def __init__(self, short):
        self._short = short

    def limit(self, limit_mib):
        raise NotImplementedError

    def peak_mib(self):
        return 900.0

    def held_mib(self):
        return 800.0

    def shortage(self):
        return self._short


@pytest.mark.parametrize(
    ("text", "short", "status", "needed", "reason"),
    [
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "3 of 900 MiB of cuda:0 are free", Status.OOM, 800.0,
         "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED, as 3 of 900 MiB of cuda:0 are free"),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "", Status.CRASH, None,
         "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        ("CUDA error: device-side assert triggered", "3 of 900 MiB of cuda:0 are free", Status.CRASH, None,
         "RuntimeError: CUDA error: device-side assert triggered"),
        (SHM, "", Status.OOM, None,
         f"RuntimeError: {SHM} (1 of 64 MiB of /dev/shm are free; give a container more with --shm-size)"),
    ],
)  # fmt: skip
def test_the_state_of_the_device_decides(monkeypatch, text, short, status, needed, reason):
    monkeypatch.setattr(rank, "shared_memory", lambda: (1 << 20, 64 << 20))
    found = rank._failed(0, Job(program=b"", device_type="cuda"), _Meter(short), None, RuntimeError(text))
    assert (found.status, found.needed_memory_mib, found.reason) == (status, needed, reason)
    assert not found.secondary
