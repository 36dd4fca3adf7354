"""The worker of a server's own: a process that joins this host's devices to the pool, started anew when it dies."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""How long it is waited before it is started again, s: at first, and after many deaths."""
LIVED_S = 30.0
"""One that lived so long before it died counts as one that works."""
END_S = 12.0
"""How long it may take to give back what it has."""
FROM_STDIN = "-"
"""In the place of a token: it is the first line of standard input, and the worker ends when that closes."""
_log = logging.getLogger("redline.embedded")


class EmbeddedWorker:
    """A worker process of this host.

    Args:
        server: the server's address.
        token: with which it joins.
        devices: how many; None for all.
        ray_address: of a Ray cluster whose devices they are.
        certificate: that the server shows.
        code_user: Unix user as whom code runs.
    """

    def __init__(
        self,
        server: str,
        token: str,
        *,
        devices: int | None = None,
        ray_address: str | None = None,
        certificate: Path | None = None,
        code_user: str | None = None,
    ) -> None:
        command = [sys.executable, "-m", "redline.cli", "worker", "--server", server, "--token", FROM_STDIN]
        if devices is not None:
            command += ["--devices", str(devices)]
        if ray_address is not None:
            command += ["--runner", "ray", "--ray-address", ray_address]
        if certificate is not None:
            command += ["--pinned", str(certificate)]
        if code_user is not None:
            command += ["--code-user", code_user]
        self._command, self._token = command, token
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedded worker", daemon=True)

    def start(self) -> None:
        """Has it run from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ends it; what it has goes back."""
        self._closing.set()
        self._thread.join()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            self._begin()
            assert self._process is not None
            while self._process.poll() is None:
                if self._closing.wait(0.2):
                    return
            pause = FIRST_PAUSE_S if time.monotonic() - began > LIVED_S else min(LONGEST_PAUSE_S, 2 * pause)
            _log.warning("the server's own worker ended with %s; it is started again", self._process.returncode)
            self._closing.wait(pause)

    def _begin(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{self._token}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # it died at once, which is seen in a moment
            return
