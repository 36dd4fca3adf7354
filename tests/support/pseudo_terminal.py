"""Runs commands in a terminal of a given size, with keys pressed while they run."""

import codecs
import fcntl
import json
import os
import pty
import select
import signal
import struct
import termios
import time
from pathlib import Path

import pyte


class Terminal:
    """A command in a pseudo-terminal, and the contents of its screen at each moment.

    Args:
        command: the program and its arguments.
        cwd: where it runs.
        columns, rows: the terminal's size.
        env: variables that differ from this process's; None removes one.
    """

    def __init__(self, command, *, cwd=None, columns=80, rows=40, env=None):
        self.columns, self.rows = columns, rows
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.begin = time.monotonic()
        self.output = []
        """Output, as (seconds since the start, text)."""
        self.frames = []
        """Contents of the screen, as (seconds since the start, lines), one entry per change."""
        self.code = None
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": None, "LINES": None, **(env or {})}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                if cwd is not None:
                    os.chdir(cwd)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
                os.execvpe(
                    command[0],
                    [str(each) for each in command],
                    {name: value for name, value in environment.items() if value is not None},
                )
            finally:
                os._exit(127)
        self._size(columns, rows)

    def _size(self, columns, rows):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns, rows):
        """Resizes the terminal, as dragging its corner does."""
        self.columns, self.rows = columns, rows
        self.screen.resize(rows, columns)
        self._size(columns, rows)

    def send(self, keys):
        """Presses keys, such as "\\x03" for Ctrl-C."""
        os.write(self.fd, keys.encode())

    def wait_for(self, text, timeout=200):
        """Waits until `text` has been shown."""
        end = time.monotonic() + timeout
        while text not in self.text:
            if time.monotonic() > end or not self._read(0.2):
                raise AssertionError(f"{text!r} was not shown:\n{self.text}")

    def wait(self, timeout=250):
        """Waits until the command ends and returns its exit code."""
        end = time.monotonic() + timeout
        while self._read(0.2):
            if time.monotonic() > end:
                self.close()
                raise AssertionError(f"still running after {timeout} s:\n{self.text}")
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
            os.close(self.fd)
        return self.code

    def close(self):
        """Ends the command if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
            os.close(self.fd)

    def _read(self, seconds):
        """Reads output for at most `seconds`; returns False once the command can write no more."""
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux reports a closed other side like this
            data = b""
        if not data:
            return False
        text, now = self._decoder.decode(data), time.monotonic() - self.begin
        self.output.append((now, text))
        self._stream.feed(text)
        lines = [line.rstrip() for line in self.screen.display]
        if not self.frames or self.frames[-1][1] != lines:
            self.frames.append((now, lines))
        return True

    @property
    def lines(self):
        """All lines, including those that have scrolled away."""
        gone = [
            "".join(line[column].data for column in range(max(line, default=-1) + 1)).rstrip()
            for line in self.screen.history.top
        ]
        shown = [line.rstrip() for line in self.screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return gone + shown

    @property
    def text(self):
        """All lines as one text."""
        return "\n".join(self.lines)

    @property
    def raw(self):
        """The whole output, with its control sequences."""
        return "".join(text for _, text in self.output)

    def record(self, path):
        """Writes the recording: `path` as an asciicast (version 2), which players replay, and beside it `.txt`, the
        frames as text."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"version": 2, "width": self.columns, "height": self.rows}
        events = [json.dumps([round(at, 3), "o", text]) for at, text in self.output]
        path.write_text("\n".join([json.dumps(head), *events]) + "\n")
        bar = "-" * self.columns
        frames = [f"{bar}\n{at:8.1f} s\n" + "\n".join(lines).rstrip() + "\n" for at, lines in self.frames]
        path.with_suffix(".txt").write_text("".join(frames))
