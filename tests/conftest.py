"""Ranks for the tests that need several, and interrupts for those that send them."""

import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import traceback

import cloudpickle
import pytest
import torch


# A shell starts what it runs in the background with interrupts ignored, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Ranks:
    """Processes with one process group over all of them, for many checks in a row.

    `run(function, *args)` calls `function(*args)` on every rank and returns their results in order. Gloo on
    CPUs; NCCL where there is a GPU for every rank.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers = []

    def start(self) -> None:
        # Forked, they have torch and transformers imported. CUDA would not survive a fork, but the tests'
        # own process only counts devices.
        gpus = torch.cuda.device_count() >= self.size
        context = multiprocessing.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, theirs, f"{self.folder.name}/store", gpus)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, function, *args, timeout=60):
        if not self.workers:
            self.start()
        job = cloudpickle.dumps((function, args))
        for _, pipe in self.workers:
            pipe.send_bytes(job)
        waiting, results = {pipe: rank for rank, (_, pipe) in enumerate(self.workers)}, [None] * self.size
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout)
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                done, value = cloudpickle.loads(pipe.recv_bytes())
                if not done:
                    # The others may wait for it in a collective: none of them is of use any more.
                    self.stop()
                    raise AssertionError(f"rank {rank}:\n{value}")
                results[rank] = value
        return results

    def stop(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        if self.workers:
            self.folder.cleanup()
        self.workers = []


def _serve(rank, size, pipe, store, gpus):
    import torch.distributed as dist

    torch.set_num_threads(1)
    if gpus:
        torch.cuda.init()
        torch.cuda.set_device(rank)
    store = dist.FileStore(store, size)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        function, args = cloudpickle.loads(job)
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))


def _ranks(size):
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    pool = Ranks(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four():
    """Four ranks."""
    yield from _ranks(4)
