"""Calls in forked processes."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest
from redline.base import forked
from redline.base.forked import ForkedCall, beside
from redline.cli.tune import end_in_order


def test_a_call_runs_in_another_process_and_gives_its_result():
    calls = [ForkedCall(lambda each=each: (each, os.getpid())) for each in range(3)]
    found = [call.result() for call in calls]
    assert [each for each, _ in found] == [0, 1, 2]
    assert len({pid for _, pid in found} | {os.getpid()}) == 4


def test_a_result_that_exceeds_the_pipe_arrives_whole():
    assert ForkedCall(lambda: b"x" * 3_000_000).result() == b"x" * 3_000_000


def test_an_exception_is_raised_here(capfd):
    def fail():
        raise ValueError(f"in {'another process' if os.getpid() != parent else 'this process'}")

    parent = os.getpid()
    with pytest.raises(ValueError, match="in this process"):
        ForkedCall(fail).result()
    assert capfd.readouterr().err == ""


def test_a_killed_process_is_replaced_by_a_call_here():
    parent = os.getpid()

    def killed_elsewhere():
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    assert ForkedCall(killed_elsewhere).result() == parent


def test_a_process_ends_with_the_object_that_stands_for_it(tmp_path):
    def write_pid():
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    call = ForkedCall(write_pid)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)
    del call
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_signal_handlers_of_the_parent_do_not_run_there():
    """Commands have handlers that raise KeyboardInterrupt."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {each: signal.getsignal(each) for each in numbers}
    try:
        end_in_order()
        found = ForkedCall(lambda: [signal.getsignal(each) for each in numbers]).result()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert found == [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN]


def test_beside_another_thread_or_on_one_core_the_call_is_made_here(monkeypatch):
    monkeypatch.setattr(forked, "usable_cores", lambda: 2)
    monkeypatch.setattr(forked.threading, "active_count", lambda: 1)
    assert beside(os.getpid)() != os.getpid()
    monkeypatch.setattr(forked, "usable_cores", lambda: 1)
    assert beside(os.getpid)() == os.getpid()
    monkeypatch.undo()
    monkeypatch.setattr(forked, "usable_cores", lambda: 2)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert beside(os.getpid)() == os.getpid()
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "pass", "sys.exit('an error')"])
@pytest.mark.parametrize("work", ["time.sleep(60)", "b'x' * 3_000_000"], ids=["works", "sends"])
def test_no_process_outlives_the_one_that_started_it(end, work):
    """Neither one that works nor one whose result nobody takes."""
    program = f"""
import os, signal, sys, time
from redline.base.forked import ForkedCall
begun, begin = os.pipe()
call = ForkedCall(lambda: [print(os.getpid(), flush=True), os.write(begin, b"1"), {work}])
os.read(begun, 1)
time.sleep(0.3)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    with suppress(psutil.NoSuchProcess):
        process, deadline = psutil.Process(int(done.stdout)), time.monotonic() + 20
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
