"""Calls to another process over one connection: the protocol of every helper process.

A caller numbers its calls and the peer repeats the number in its reply, so that many calls can be open at a time. A
reply is a value or an error with its class and traceback. Before it replies a peer may send notes about a call, and a
caller may cancel a call, which the peer still replies to. A lost peer, or one that is silent for too long, fails all
open calls.

`multiprocessing.connection` frames, pickles and authenticates messages, and is used for that, but a `Connection` does
not assign replies to requests. `multiprocessing.managers` does, but opens a connection for each thread that calls,
accepts only pickles, and has neither deadlines nor cancellation. `concurrent.futures.ProcessPoolExecutor` starts its
processes itself, cannot end one that hangs, and does not state why one died.
"""

import contextlib
import itertools
import os
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ...base import errors
from ...base.errors import RedlineError, RunnerError

CALL, CANCEL, NOTE, DONE, FAILED, ALIVE = "call", "cancel", "note", "done", "failed", "alive"
"""Kinds of messages. Each message is a tuple: its kind, the number of its call, and further items."""


class RemoteError(RunnerError):
    """An error of the peer that is not one of redline's. The text has its class, message and traceback."""


class RemoteTraceback(Exception):
    """The traceback of an error of the peer, as the error's cause."""


class Channel:
    """One end of a connection that carries messages. Any thread may send, one at a time may receive.

    Args:
        connection: with a socket below it, such as one end of a `Pipe()`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def poll(self, within_s: float | None = 0.0) -> bool:
        """Returns True if there is a message or the peer has closed the connection."""
        return self._connection.poll(within_s)

    def send(self, *message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: the connection is closed, or the peer does not read.
        """
        with self._sending:
            self._connection.send(message)

    def receive(self) -> tuple[Any, ...]:
        """Waits for a message and returns it.

        Raises:
            EOFError: the connection is closed.
        """
        try:
            return tuple(self._connection.recv())
        except OSError as error:
            raise EOFError(str(error)) from error

    def hang_up(self) -> None:
        """Ends the connection for both ends and wakes up threads that wait on it."""
        hang_up(self._connection)

    def close(self) -> None:
        self._connection.close()


def hang_up(connection: Connection) -> None:
    """Ends a connection for both ends and wakes up threads that wait on it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


class Call:
    """A call that was sent to the peer. Made by `Caller.begin`."""

    def __init__(self, caller: "Caller", number: int) -> None:
        self.caller, self.number = caller, number
        self.replied = False
        """True if the peer has replied, with a value or an error."""
        self.over = False
        """True if the peer has replied or was lost."""
        self._value: Any = None
        self._error: Exception | None = None
        self._notes: deque[Any] = deque()

    def result(self, within_s: float | None = None) -> Any:
        """Waits for the reply and returns its value, or raises its error.

        Raises:
            TimeoutError: the peer does not reply within that time.
            RunnerError: the peer was lost.
        """
        if not self.caller.wait(lambda: self.over, within_s):
            raise TimeoutError(f"no reply within {within_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value

    def note(self, within_s: float | None = None) -> Any:
        """Waits for the next note and returns it; None after the last one, when the call is over.

        Raises:
            TimeoutError: the peer sends none within that time.
        """
        if not self.caller.wait(lambda: bool(self._notes) or self.over, within_s):
            raise TimeoutError(f"no message within {within_s:g} s")
        return self._notes.popleft() if self._notes else None

    def cancel(self) -> None:
        """Makes the peer end the call early. It still replies."""
        self.caller.send(CANCEL, self.number)

    def add(self, note: Any) -> None:
        """Called by the caller for each note."""
        self._notes.append(note)

    def end(self, value: Any = None, error: Exception | None = None, *, replied: bool = True) -> None:
        """Called by the caller when the call is over."""
        self._value, self._error = value, error
        self.replied, self.over = replied, True


class Caller:
    """Calls functions of a peer. Thread-safe. A thread reads the replies.

    Args:
        connection: to the peer.
        on_lost: called when the peer is lost, with the exception: EOFError if it closed the connection,
            TimeoutError if it was silent, or the error of an unreadable message or of a send that was not read.
            Returns the text of the `RunnerError` with which open and later calls fail.
        start_s, silence_s: time without any message after which the peer counts as lost, s, before and after its first
            sign of life (see `keep_alive`); None for no limit.
    """

    def __init__(
        self,
        connection: Connection,
        on_lost: Callable[[Exception], str],
        *,
        start_s: float | None = None,
        silence_s: float | None = None,
    ) -> None:
        self._channel, self._on_lost = Channel(connection), on_lost
        self._changed, self._losing = threading.Condition(), threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._reason: str | None = None
        self._closed = False
        self._patience_s, self._silence_s = start_s, silence_s
        self._reader = threading.Thread(target=self._read, daemon=True, name="replies")
        self._reader.start()

    @property
    def lost(self) -> bool:
        """True if the peer is known to be lost, so that no further reply comes."""
        return self._reason is not None

    def begin(self, method: str, *arguments: Any) -> Call:
        """Sends a call and returns it at once. If the peer is lost, its result is the error."""
        with self._changed:
            call = Call(self, next(self._numbers))
            if self._reason is not None:
                call.end(error=RunnerError(self._reason), replied=False)
                return call
            self._open[call.number] = call
        # Outside of the lock: another thread must be able to read, or both peers could wait with full buffers.
        try:
            self.send(CALL, call.number, method, arguments)
        except BaseException:  # the arguments cannot be pickled
            self._open.pop(call.number, None)
            raise
        return call

    def call(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Sends a call and waits for its result (see `Call.result`)."""
        return self.begin(method, *arguments).result(within_s)

    def send(self, *message: Any) -> None:
        """Sends a message, unless the peer is lost."""
        try:
            self._channel.send(*message)
        except ConnectionError:  # the peer has ended, which the reader detects after the last messages
            return
        except OSError as error:  # a part of a message may have been sent
            self._lose(error)  # first, or the reader would report the end of the connection as the cause
            self._channel.hang_up()

    def wait(self, over: Callable[[], bool], within_s: float | None = None) -> bool:
        """Waits until `over()` is true or the peer is lost. Returns False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: over() or self.lost, within_s)

    def _read(self) -> None:
        """Handles messages until the peer is lost."""
        while not self.lost:
            try:
                if not self._channel.poll(self._patience_s):
                    raise TimeoutError(f"has not answered for {self._patience_s:g} s")
                self._handle(*self._channel.receive())
            except Exception as error:  # any that an unreadable message raises; open calls fail with it
                self._lose(error)

    def _handle(self, kind: str, number: int, *items: Any) -> None:
        if kind == ALIVE:
            self._patience_s = self._silence_s
            return
        with self._changed:
            if kind == NOTE:
                self._open[number].add(*items)
            elif kind == DONE:
                (value,) = items
                self._open.pop(number).end(value)
            elif kind == FAILED:
                error = self._error(*items)
                self._open.pop(number).end(error=error)
            else:
                raise ValueError(f"a message of the unknown kind {kind!r}")
            self._changed.notify_all()

    def _error(self, kind: str, message: str, trace: str, notes: tuple[str, ...]) -> Exception:
        """Returns the error that the peer raised."""
        error_type: Any = getattr(errors, kind, None)
        is_redline_error = isinstance(error_type, type) and issubclass(error_type, RedlineError)
        error: Exception = error_type(message) if is_redline_error else RemoteError(f"{kind}: {message}\n{trace}")
        error.__cause__ = RemoteTraceback(trace)
        for note in notes:
            error.add_note(note)
        return error

    def _lose(self, error: Exception) -> None:
        """Fails all open calls."""
        with self._losing:
            if self._reason is not None:
                return
            reason = self._on_lost(error) if self._open or not self._closed else "the connection is closed"
            with self._changed:
                self._reason = reason
                open_calls, self._open = list(self._open.values()), {}
                for call in open_calls:
                    call.end(error=RunnerError(reason), replied=False)
                self._changed.notify_all()

    def close(self) -> None:
        """Closes the connection. Open calls fail. May be called twice, but not by `on_lost`."""
        self._closed = True
        self._channel.hang_up()
        self._reader.join()
        self._channel.close()


@dataclass(frozen=True, slots=True)
class Received:
    """A call on the side of the peer that receives it."""

    channel: Channel
    number: int
    method: str
    arguments: tuple[Any, ...]

    def note(self, value: Any) -> None:
        """Sends a note to the caller; it is lost if the caller has closed the connection."""
        with contextlib.suppress(OSError):
            self.channel.send(NOTE, self.number, value)

    def done(self, value: Any = None) -> None:
        """Replies with a value."""
        try:
            self.channel.send(DONE, self.number, value)
        except OSError:  # the caller has closed the connection, which the receiver detects
            return
        except Exception as error:  # the value cannot be pickled
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Replies with an error."""
        kinds = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        kind = next(kinds, type(error).__name__)
        trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError):
            self.channel.send(FAILED, self.number, kind, str(error), trace, tuple(getattr(error, "__notes__", ())))

    def reply(self, function: "Callable[[Received], Any]") -> None:
        """Replies with the result of a function of this call, or with the exception that it raises."""
        try:
            value = function(self)
        except (Exception, SystemExit) as error:
            self.fail(error)
        else:
            self.done(value)


def receive_call(channel: Channel) -> Received:
    """Waits for the next call and returns it.

    Raises:
        EOFError: the caller has closed the connection.
    """
    _, number, method, arguments = channel.receive()
    return Received(channel, number, method, tuple(arguments))


def keep_alive(channel: Channel) -> None:
    """Sends a sign of life. After the first one, the caller expects a message within each `silence_s`."""
    with contextlib.suppress(OSError):
        channel.send(ALIVE, 0)


def serve(channel: Channel, answer: Callable[[Received], Any]) -> None:
    """Replies to calls with the values of `answer`, each in a thread of its own, until the caller closes the connection.
    Calls are not cancelled.
    """
    while True:
        try:
            call = receive_call(channel)
        except EOFError:
            return
        threading.Thread(target=call.reply, args=(answer,), daemon=True, name=call.method).start()
