"""Calls between two processes: replies, errors with class and traceback, notes, cancellation, lost peers."""

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from multiprocessing import Pipe

import pytest
from redline.base.errors import NotFound, RunnerError, UsageError
from redline.runners.host.protocol import (
    CANCEL,
    Caller,
    Channel,
    RemoteError,
    RemoteTraceback,
    keep_alive,
    receive_call,
    serve,
)


class OwnUsageError(UsageError):
    """A class that the caller does not know."""


class Peer:
    """The other process's handler of each method."""

    def answer(self, call):
        return getattr(self, call.method)(call, *call.arguments)

    def echo(self, call, value):
        return value

    def later(self, call, seconds, value):
        time.sleep(seconds)
        return value

    def fails(self, call, error):
        raise error

    def ends(self, call):
        raise SystemExit("not today")

    def notes(self, call, count):
        for number in range(count):
            call.note(number)
        return "noted"

    def unpicklable(self, call):
        return threading.Lock()

    def dies(self, call):
        os.kill(os.getpid(), signal.SIGKILL)


def _run(connection):
    serve(Channel(connection), Peer().answer)


@pytest.fixture
def peer():
    """Makes a caller of a new process."""
    made = []

    def make(**options):
        here, there = Pipe()
        process = multiprocessing.get_context("fork").Process(target=_run, args=(there,))
        process.start()
        there.close()
        caller = Caller(here, lambda error: f"lost: {type(error).__name__}", **options)
        made.append((process, caller))
        return caller

    yield make
    for process, caller in made:
        caller.close()
        process.join(10)
        assert not process.is_alive(), "the process ends with the connection"


def test_replies_match_their_calls_in_any_order(peer):
    caller = peer()
    slow = caller.begin("later", 0.3, "slow")
    assert caller.call("echo", {"a": [1, "b"]}) == {"a": [1, "b"]}
    assert not slow.over and slow.result() == "slow" and slow.replied


def test_an_error_has_its_class_and_its_traceback(peer):
    caller = peer()
    with pytest.raises(NotFound, match="^no such search$") as caught:
        caller.call("fails", NotFound("no such search"))
    assert isinstance(caught.value.__cause__, RemoteTraceback) and "raise error" in str(caught.value.__cause__)
    with pytest.raises(UsageError, match="^mine$") as caught:
        caller.call("fails", OwnUsageError("mine"))
    assert type(caught.value) is UsageError
    with pytest.raises(RemoteError, match=r"(?s)^KeyError: 'x'\nTraceback .*raise error.*KeyError: 'x'"):
        caller.call("fails", KeyError("x"))
    with pytest.raises(RemoteError, match="^SystemExit: not today"):
        caller.call("ends")
    with pytest.raises(RemoteError, match="cannot pickle"):
        caller.call("unpicklable")
    with pytest.raises(TypeError, match="cannot pickle"):
        caller.call("echo", threading.Lock())
    assert caller.call("echo", 1) == 1 and not caller._open


def test_notes_come_in_order_before_the_reply(peer):
    call = peer().begin("notes", 3)
    assert [call.note(30), call.note(30), call.note(30), call.note(30)] == [0, 1, 2, None]
    assert call.note() is None and call.result() == "noted"


def test_a_call_that_is_cancelled_still_has_a_reply():
    here, there = Pipe()
    caller, channel = Caller(here, str), Channel(there)
    call = caller.begin("until_cancelled")
    received = receive_call(channel)
    with pytest.raises(TimeoutError, match=r"no reply within 0\.2 s"):
        call.result(0.2)
    with pytest.raises(TimeoutError):
        call.note(0)
    call.cancel()
    assert channel.receive() == (CANCEL, call.number)
    received.done(True)
    assert call.result(30) is True
    caller.close()


def test_a_peer_that_dies_fails_all_that_is_open_and_all_that_comes_later(peer):
    caller = peer()
    open_ones = [caller.begin("later", 60, 0), caller.begin("dies")]
    for each in open_ones:
        with pytest.raises(RunnerError, match="^lost: EOFError$"):
            each.result(30)
        assert each.over and not each.replied and each.note() is None
    assert caller.lost
    with pytest.raises(RunnerError, match="^lost: EOFError$"):
        caller.call("echo", 1)


def test_a_peer_that_is_silent_is_lost():
    here, there = Pipe()
    caller = Caller(here, str, start_s=30, silence_s=0.3)
    call = caller.begin("echo", 1)
    with pytest.raises(TimeoutError):
        call.result(0.5)  # before the first message the longer time applies
    keep_alive(Channel(there))
    begin = time.monotonic()
    with pytest.raises(RunnerError, match=r"has not answered for 0\.3 s"):
        call.result(30)
    assert time.monotonic() - begin < 10
    caller.close()


def test_a_peer_that_does_not_read_is_lost_by_the_failed_send():
    ours, theirs = Pipe()
    with theirs, socket.socket(fileno=os.dup(ours.fileno())) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))

        def cause(error):
            time.sleep(0.2)  # the thread that reads must not report another cause meanwhile
            return f"lost by {type(error).__name__}"

        caller = Caller(ours, cause)
        with pytest.raises(RunnerError, match="lost by BlockingIOError"):
            caller.call("keep", bytes(1 << 22))
        caller.close()
