"""Shared fixtures: groups of ranks, seeds of numeric tests, thread counts and interrupts."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Client, Listener, wait

# torchao and Liger-Kernel (see the Makefile): they must be importable before transformers looks for them.
sys.path.append(os.path.join(sys.prefix, "beside"))

# Set before numpy is imported, also for child processes: threads spin while they wait, which slows parallel tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import cloudpickle
import pytest
import torch
from kept_agent import _one_agent, kept_agent  # noqa: F401
from redline.runners.host.process import die_with_parent

# Inductor would reuse earlier compilations with other vector instructions than they were compiled for.
# A separate cache avoids that.
if "ATEN_CPU_CAPABILITY" in os.environ:
    kept = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kept)

# A shell starts background jobs with SIGINT ignored, and every child process would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    group = parser.getgroup("numeric tests")
    group.addoption("--seeds", default="1", help="how many seeds each numeric test has, or which: 15:30")
    group.addoption("--threads", type=int, default=1, help="threads that numeric tests compute with")


def pytest_generate_tests(metafunc):
    first, _, last = metafunc.config.getoption("seeds").rpartition(":")
    seeds = range(int(first or 0), int(last))
    if "seed" in metafunc.fixturenames and list(seeds) != [0]:
        metafunc.parametrize("seed", seeds, ids=[f"seed{number}" for number in seeds])


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu` only files with GPU tests are imported: others need Ray or Optuna, which a GPU machine may lack."""
    if config.option.markexpr != "gpu" or collection_path.name == "conftest.py":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any("mark.gpu" in each.read_text(encoding="utf-8") for each in files) else True


def pytest_collection_modifyitems(items):
    for item in items:
        if "seed" in item.fixturenames:
            item.add_marker("numeric")


@pytest.fixture
def seed():
    """Seed of a numeric test's weights and data."""
    return 0


@pytest.fixture(scope="session")
def threads(pytestconfig):
    """Threads of the tests' computations: for tiny models more threads are slower."""
    return pytestconfig.getoption("threads")


@pytest.fixture(scope="session", autouse=True)
def _few_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _forks():
    """Sends the arguments of `_serve` to a process that forks as many ranks. It was itself forked before the first test: a
    process that has computed with several threads, or run a backward pass where torch has CUDA, cannot fork one that does."""
    requests, theirs = Pipe()
    process = multiprocessing.get_context("fork").Process(target=_fork_ranks, args=(theirs, os.getpid()))
    process.start()
    theirs.close()
    yield requests
    process.kill()
    process.join()


def _fork_ranks(requests, parent):
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for ranks
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    me = os.getpid()
    while True:
        size, *args = requests.recv()
        # Ranks inherit what is imported.
        import transformers.models.bert.modeling_bert
        import transformers.models.gpt2.modeling_gpt2
        import transformers.models.llama.modeling_llama  # noqa: F401

        for rank in range(size):
            if os.fork() == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                die_with_parent(me)
                try:
                    _serve(rank, size, *args)
                finally:
                    os._exit(0)


MOST_CHECKS = 40
"""Checks of a group of ranks before other processes replace it: each leaves process groups behind, and each of gloo's has a
thread that polls a hundred times a second."""


class Ranks:
    """Processes in one process group, for many checks in a row.

    `run(function, *args)` calls `function(*args)` on every rank and returns their results in order. The backend is
    Gloo on CPUs, and NCCL with a GPU for every rank. Its timeout ends a hang, however busy the machine.
    """

    def __init__(self, size: int, threads: int, forks) -> None:
        self.size = size
        self.threads = threads
        self.forks = forks
        self.workers = []
        """Process id and connection of each rank."""
        self.checks = 0

    def start(self) -> None:
        if self.workers:
            return
        # CUDA would not survive a fork, but the tests' process only counts devices.
        gpus = torch.cuda.device_count() >= self.size
        self.folder = tempfile.TemporaryDirectory()
        with Listener(f"{self.folder.name}/ranks", "AF_UNIX", backlog=self.size) as listener:
            self.forks.send((self.size, listener.address, f"{self.folder.name}/store", gpus, self.threads))
            for pipe in [listener.accept() for _ in range(self.size)]:
                self.workers.append((*pipe.recv(), pipe))
        self.workers = [(pid, pipe) for _, pid, pipe in sorted(self.workers, key=lambda worker: worker[0])]

    def run(self, function, *args, timeout=300):
        if self.checks == MOST_CHECKS and self.threads == 1:
            self.stop()
        self.start()
        self.checks += 1
        job = cloudpickle.dumps((function, args))
        for _, pipe in self.workers:
            pipe.send_bytes(job)
        waiting, results = {pipe: rank for rank, (_, pipe) in enumerate(self.workers)}, [None] * self.size
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                done, value = cloudpickle.loads(pipe.recv_bytes())
                if not done:
                    # The other ranks may wait for it in a collective, so none can be reused.
                    self.stop()
                    raise AssertionError(f"rank {rank}:\n{value}")
                results[rank] = value
        return results

    def stop(self) -> None:
        for pid, pipe in self.workers:
            pipe.close()
            with suppress(ProcessLookupError):
                while True:
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(0.01)
        if self.workers:
            self.folder.cleanup()
        self.workers = []
        self.checks = 0


def _serve(rank, size, address, store, gpus, threads):
    import torch.distributed as dist

    pipe = Client(address, "AF_UNIX")
    pipe.send((rank, os.getpid()))
    torch.set_num_threads(threads)
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


def _ranks(size, threads, forks):
    pool = Ranks(size, threads, forks)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two(threads, _forks):
    yield from _ranks(2, threads, _forks)


@pytest.fixture(scope="session")
def four(threads, _forks):
    yield from _ranks(4, threads, _forks)


@pytest.fixture(scope="session")
def eight(threads, _forks):
    yield from _ranks(8, threads, _forks)


@pytest.fixture
def fresh(threads, _forks):
    """A process that has computed nothing."""
    yield from _ranks(1, threads, _forks)
