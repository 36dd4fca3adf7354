"""A killed rank is an OOM only with evidence of a memory shortage; real processes, real kills."""

import contextlib
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from redline.base.host_memory import MIB, memory_groups
from redline.results import Status
from redline.runners.host.protocol import DONE, NOTE, Channel, Received
from redline.runners.host.supervisor import Supervisor
from redline.runners.trial.job import Begun, Job
from redline.runners.trial.memory import Shortage

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def supervised(program, make=lambda: None, enter=lambda: None, **job):
    """The outcome of a trial whose supervisor is a separate process, forked from this one: run it in a `fresh` one.

    The supervisor calls `enter` first and watches memory with the result of `make`.
    """

    def serve(theirs):
        enter()
        made = Job(program=cloudpickle.dumps(program), threads=1, timeout_s=60, **job)
        call = Received(Channel(theirs), 1, "job", (made,))
        call.done(Supervisor(made, call, shortage=make()).run())

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        messages = Channel(ours)
        assert messages.poll(60), "no outcome"
        assert messages.receive() == (NOTE, 1, Begun(process.pid))
        kind, number, outcome = messages.receive()
        assert (kind, number) == (DONE, 1)
        return outcome
    finally:
        process.join(10)


def shortage_of(proc, limit_mib=None):
    return Shortage(limit_mib, proc=proc)


class Host:
    """A process's folder in /proc and its control group of version 1 or 2, both made of files."""

    def __init__(self, folder, version, fresh):
        self.fresh = fresh
        self.proc, self.group = folder / "proc", folder / "group"
        self.proc.mkdir()
        self.group.mkdir()
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        (self.proc / "mountinfo").write_text(f"36 25 0:30 / {self.group} rw - {kind} cgroup {options}\n")
        (self.proc / "cgroup").write_text("0::/\n" if version == 2 else "4:memory:/\n")
        self.counter = self.group / ("memory.events" if version == 2 else "memory.oom_control")
        self.counter.write_text("oom 7\noom_kill 3\n")
        self.version = version

    def limit(self, limit_mib, used_mib):
        limit, used = ("memory.max", "memory.current")
        if self.version == 1:
            limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        (self.group / limit).write_text(str(limit_mib * MIB))
        (self.group / used).write_text(str(used_mib * MIB))

    def run(self, program, **job):
        make = partial(shortage_of, self.proc, job.get("memory_limit_mib"))
        (outcome,) = self.fresh.run(partial(supervised, program, make, **job))
        return outcome


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def host(tmp_path, request, fresh):
    return Host(tmp_path, request.param, fresh)


def test_a_kill_that_nothing_explains_is_a_crash(bench):
    outcome = bench.run(die)
    assert outcome.status is Status.CRASH
    assert outcome.reason == ("killed by signal 9 (SIGKILL), without evidence that memory was short (during start)")


@contextlib.contextmanager
def small_group(limit_mib):
    """A real control group with this limit below this process's own. Skips if it cannot be created."""
    groups = memory_groups()
    if not groups:
        pytest.skip("no control group with the memory controller")
    folder = groups[0].folder / f"redline-test-{os.getpid()}"
    limits = ["memory.max"] if groups[0].version == 2 else ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        for name in limits:
            if (folder / name).exists() or name == limits[0]:
                (folder / name).write_text(str(limit_mib * MIB))
        yield folder
    except FileNotFoundError:
        pytest.skip("the memory controller is not delegated")
    finally:
        folder.rmdir()


def enter(group):
    (group / "cgroup.procs").write_text(str(os.getpid()))


def test_the_kernels_own_killer_is_recognised_and_takes_the_rank(fresh):
    def program(context):
        held = []
        while True:
            held.append(bytes(range(256)) * 65536)  # 16 MiB, written

    with small_group(192) as folder:
        (outcome,) = fresh.run(supervised, program, lambda: None, partial(enter, folder))
    assert outcome.status is Status.OOM
    assert outcome.reason.startswith("killed by signal 9 (SIGKILL): ")
    assert "oom_kill of its control group rose from 0 to 1" in outcome.reason


def test_a_kill_without_a_kernel_oom_kill_is_a_crash(fresh):
    with small_group(1024) as folder:
        (outcome,) = fresh.run(supervised, die, lambda: None, partial(enter, folder))
    assert outcome.status is Status.CRASH


def test_a_kill_that_the_control_group_counts_is_oom(host):
    counter = host.counter

    def program(context):
        counter.write_text("oom 8\noom_kill 4\n")
        die()

    outcome = host.run(program)
    assert outcome.status is Status.OOM
    assert outcome.reason == (
        "killed by signal 9 (SIGKILL): oom_kill of its control group rose from 3 to 4 (during start)"
    )


def test_earlier_kills_in_the_group_are_no_evidence(host):
    assert host.run(die).status is Status.CRASH


def fills(mib):
    def program(context):
        held = bytearray(mib * MIB)
        held[::4096] = b"x" * len(held[::4096])
        die()

    return program


def test_a_kill_near_the_limit_is_oom_and_far_from_it_a_crash(bench):
    outcome = bench.run(fills(245), memory_limit_mib=256)
    assert outcome.status is Status.OOM
    assert "of its limit of 256 MiB" in outcome.reason
    assert bench.run(fills(50), memory_limit_mib=256).status is Status.CRASH


def test_a_kill_where_hardly_anything_was_left_is_oom(host):
    host.limit(1000, 950)
    outcome = host.run(die)
    assert outcome.status is Status.OOM
    assert "MiB of host memory were left" in outcome.reason
    host.limit(1000, 500)
    assert host.run(die).status is Status.CRASH


@pytest.mark.parametrize(("mib", "short"), [(130, True), (20, False)])
def test_memory_taken_since_the_last_sample_counts(host, mib, short):
    host.limit(200, 60)
    ready, go = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: go.recv() and fills(mib)(None))
    process.start()
    shortage = shortage_of(host.proc)
    shortage.look([process.pid])
    ready.send(True)
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    evidence = shortage.evidence(process.pid, used.ru_maxrss / 1024)
    assert "of 200 MiB of host memory were left" in evidence if short else evidence is None


def test_a_thread_that_finds_no_room_for_its_stack_is_oom(bench):
    def program(context):
        held = [mmap.mmap(-1, 62 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
        for _ in range(100):  # the first may reuse stacks of earlier threads
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return held

    outcome = bench.run(program, memory_limit_mib=64)
    assert outcome.status is Status.OOM
    assert "can't start new thread" in outcome.reason and "stack" in outcome.reason


@pytest.mark.parametrize("words", ["can't start new thread", "could not create a primitive"])
def test_the_same_failure_with_free_memory_is_a_crash(bench, words):
    def program(context):
        raise RuntimeError(words)

    assert bench.run(program, memory_limit_mib=512).status is Status.CRASH
    assert bench.run(program).status is Status.CRASH


def test_the_kernel_is_to_take_ranks_before_anything_else(bench):
    def program(context):
        return Path("/proc/self/oom_score_adj").read_text().strip()

    assert bench.run(program).ranks[0].report == "1000"
