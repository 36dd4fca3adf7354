"""Every way to die, with real processes: the outcome is reported, the next trial runs, no process is left."""

import os
import re
import signal
import subprocess
import sys
import time

import cloudpickle
import psutil
import pytest
from processes import left_of
from redline.results import Status

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def healthy(context):
    import torch

    return float(torch.ones(10).sum())


@pytest.fixture(autouse=True)
def next_trial_runs_and_nothing_is_left(bench):
    yield
    assert bench.left_behind() == []
    outcome = bench.run(healthy)
    assert (outcome.status, outcome.ranks[0].report) == (Status.OK, 10.0)


def test_a_rank_is_a_fresh_process_with_its_own_memory(bench):
    def pid(context):
        return os.getpid()

    first, second = bench.run(pid), bench.run(pid)
    assert first.ranks[0].report != second.ranks[0].report


def test_cuda_style_oom_is_oom(bench):
    def program(context):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    outcome = bench.run(program, memory_limit_mib=4096)
    assert outcome.status is Status.OOM
    assert outcome.reason.startswith("requested 2,048 MiB with ")
    assert outcome.ranks[0].needed_memory_mib == 4096
    # Without a limit the memory's owner is unknown, and so is how much of it was in use.
    outcome = bench.run(program)
    assert outcome.reason.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert outcome.ranks[0].needed_memory_mib == 2048


def test_cpu_allocator_failure_under_the_limit_is_oom_with_the_need(bench, tmp_path):
    def program(context):
        import torch

        held = torch.ones(100, 1024, 1024, dtype=torch.uint8)
        return torch.ones(300, 1024, 1024, dtype=torch.uint8).max() + held.max()

    log = tmp_path / "trial.log"
    outcome = bench.run(program, memory_limit_mib=256, log=str(log))
    assert outcome.status is Status.OOM
    assert re.match(r"requested 300 MiB with 1\d\d of 256 MiB in use", outcome.reason)
    assert "DefaultCPUAllocator" in log.read_text()
    assert outcome.ranks[0].needed_memory_mib == pytest.approx(400, rel=0.1)


def _memory_error(context):
    return len(bytearray(1 << 40))


def _numpy_fails(context):
    import numpy

    return numpy.ones(1 << 28).sum()


def _another_exception(context):
    try:
        raise MemoryError
    except MemoryError as error:
        raise RuntimeError("could not build the model") from error


def _bad_alloc(context):
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    os.abort()


def _exit_at_once(context):
    os._exit(7)


def _sys_exit(context):
    sys.exit("no such thing")


@pytest.mark.parametrize(
    ("program", "limit_mib", "status", "words"),
    [
        (_memory_error, 256, Status.OOM, "MemoryError"),
        (_numpy_fails, 256, Status.OOM, "2,048 MiB"),
        (_another_exception, None, Status.OOM, "could not build the model"),
        (_bad_alloc, None, Status.OOM, "SIGABRT"),
        (_exit_at_once, None, Status.CRASH, "code 7"),
        (_sys_exit, None, Status.CRASH, "no such thing"),
    ],
)
def test_a_failure_has_its_kind_and_its_words(bench, program, limit_mib, status, words):
    outcome = bench.run(program, memory_limit_mib=limit_mib)
    assert outcome.status is status and words in outcome.reason


def test_segfault_is_a_crash_that_names_the_signal(bench, tmp_path):
    def program(context):
        import ctypes

        ctypes.string_at(0)

    outcome = bench.run(program, log=str(tmp_path / "0.log"))
    assert outcome.status is Status.CRASH
    assert "SIGSEGV" in outcome.reason
    assert "Segmentation fault" in (tmp_path / "0.log").read_text()


def _collective(context, fail):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=context.init_method, rank=context.rank, world_size=context.world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    if context.rank == 1:
        fail()
    dist.barrier()
    return float(total)


def test_exception_in_one_rank_while_the_other_waits_ends_both(bench, tmp_path):
    def program(context):
        if context.rank == 1:
            raise ValueError("rank one fails")
        time.sleep(600)  # without a collective, which would notice

    outcome = bench.run(program, ranks=2, log=str(tmp_path / "0.log"))
    assert bench.left_behind() == []
    assert outcome.status is Status.CRASH
    assert outcome.reason.startswith("rank 1: ValueError: rank one fails")
    assert "[rank 1] ValueError: rank one fails" in (tmp_path / "0.log").read_text()


def test_a_killed_rank_decides_though_the_other_reports_a_lost_peer(bench):
    def fail():
        os.kill(os.getpid(), signal.SIGKILL)

    outcome = bench.run(lambda context: _collective(context, fail), ranks=2)
    assert outcome.status is Status.CRASH
    assert outcome.reason.startswith("rank 1: killed by signal 9 (SIGKILL)")


def test_a_hang_in_a_collective_is_a_timeout_with_its_phase_and_the_stack_of_every_rank(bench, tmp_path):
    def fail():
        def never_joins():
            time.sleep(600)

        never_joins()

    def waits(context):
        context.phase("waiting")
        return _collective(context, fail)

    def both_are_there(log):
        waits = any("[rank 0]" in line and "barrier" in line for line in log.splitlines())
        return waits and "[rank 1]" in log and "never_joins" in log

    outcome, deadline, log = bench.hang(waits, both_are_there, ranks=2, log=str(tmp_path / "0.log"))
    assert outcome.status is Status.TIMEOUT
    assert outcome.reason == f"no result within {deadline} s (during waiting on rank 0, 1)"
    assert both_are_there(log)


def test_a_hang_that_ignores_every_signal_it_can_is_a_timeout(bench):
    def program(context):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)

    assert bench.run(program, timeout_s=1).status is Status.TIMEOUT


def test_a_hundred_megabytes_of_output_neither_block_nor_fill_the_disk(bench, tmp_path):
    def program(context):
        line = "x" * 99 + "\n"
        for _ in range(1000):
            sys.stdout.write(line * 1000)
        print("the end")
        return "done"

    log = tmp_path / "0.log"
    outcome = bench.run(program, log=str(log))
    assert (outcome.status, outcome.ranks[0].report) == (Status.OK, "done")
    assert log.stat().st_size < 10 * 1024 * 1024
    text = log.read_text()
    assert text.startswith("xxx")
    assert "bytes left out" in text
    assert text.endswith("the end\n")


def test_grandchildren_are_killed_wherever_they_hide(bench, tmp_path):
    pids = tmp_path / "pids"
    sleep = ["sleep", str(600 + os.getpid())]  # a duration that no other process uses

    def program(context):
        for _ in range(2):
            subprocess.Popen(sleep, start_new_session=True)
        # A daemon started by a double fork: orphaned, in a separate session.
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                pids.write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        while not pids.exists() or not pids.read_text():
            time.sleep(0.01)
        return "left them"

    outcome = bench.run(program)
    assert outcome.status is Status.OK
    assert left_of([pids.read_text()]) == []
    assert [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == sleep] == []


@pytest.mark.slow
def test_a_client_that_is_killed_takes_its_trials_with_it(tmp_path):
    pidfile = tmp_path / "pid"
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import cloudpickle, os, time\n"
            "from redline.runners.host.client import HostAgent\n"
            "from redline.runners.trial.job import Job\n"
            "def program(context):\n"
            f"    open({str(pidfile)!r}, 'w').write(str(os.getpid()))\n"
            "    time.sleep(600)\n"
            "HostAgent().run(Job(program=cloudpickle.dumps(program)))\n",
        ]
    )
    end = time.monotonic() + 300
    while not (pidfile.exists() and pidfile.read_text()):
        assert time.monotonic() < end, "the trial did not start"
        time.sleep(0.05)
    rank = psutil.Process(int(pidfile.read_text()))
    family = [rank, *rank.parents()[:2]]  # the rank, its supervisor, the agent
    driver.kill()
    driver.wait()
    assert left_of(family, timeout=60) == []


def test_the_agent_never_initialises_cuda(bench):
    def program(context):
        import torch

        # Without a driver, a CUDA build of torch takes every fork for a bad one.
        return torch.cuda.is_initialized() or (torch.cuda.device_count() > 0 and torch.cuda._is_in_bad_fork())

    assert bench.run(program).ranks[0].report is False
