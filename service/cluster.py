"""The Ray cluster whose devices the service uses: the kinds of its devices, and a Ray of this machine's own."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from ..base.errors import RedlineError, RunnerError
from ..runners.place.ray_runner import RayDriver
from .records import ProcessId
from .scheduling import Kind

LOOK_S = 5.0
"""Interval between reads of the devices, s: nodes may join and leave."""
AGAIN_S = 2.0
"""Interval between attempts to join, s."""
ALONE_S = 900.0
"""How long this machine's Ray goes on without a server, s: long enough to start the server again."""
CLOSE_S = 10.0
"""Time for the thread to end, s."""
START_S = 60.0
"""Time for this machine's Ray to start, s."""
STARTING = "the Ray cluster is being joined"
"""`Cluster.failure` at first."""
FILE = "ray.json"
"""File in the server's folder that names this machine's Ray. The server touches it."""
_log = logging.getLogger("redline.cluster")


def process_of(pid: int) -> ProcessId | None:
    """Returns the running process of that number; None if there is none."""
    try:
        return ProcessId(pid=pid, started=psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def lives(process: ProcessId) -> bool:
    """True if a process runs. Reaps it if it is a child of this one that has ended."""
    try:
        running = psutil.Process(process.pid)
        if running.create_time() != process.started:
            return False
        if running.status() == psutil.STATUS_ZOMBIE:
            running.wait(0)
            return False
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return False
    return True


class Cluster:
    """The devices of a Ray cluster, read by a thread. A lost cluster is joined again.

    Args:
        data: the server's folder.
        address: of a cluster; None to start Ray on this machine.
        devices: number of devices that this machine's Ray has; None for all.
    """

    def __init__(self, data: Path, address: str | None, devices: int | None = None) -> None:
        self._given_address = address
        self._own = None if address is not None else LocalRay(data, devices)
        self._kinds: tuple[Kind, ...] = ()
        self._address = ""
        self.failure: str | None = STARTING
        """Why the devices are not known at the moment; None if they are."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster")

    def start(self) -> None:
        self._thread.start()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of devices; none while the cluster is not reached."""
        return () if self.failure else self._kinds

    @property
    def address(self) -> str:
        """The cluster's address, as the processes of searches join it."""
        return self._address

    def close(self) -> None:
        """Leaves the cluster, and ends this machine's Ray."""
        self._closing.set()
        self._thread.join(CLOSE_S)  # it may be joining a cluster that does not answer
        if self._own is not None:
            self._own.end()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._address = self._given_address or self._started()
                self._watch()
            except RedlineError as error:
                if self.failure in (None, STARTING):
                    _log.error("the Ray cluster is not reached: %s", error)
                self.failure = str(error).partition("\n")[0]
            except Exception as error:  # the next attempt may succeed, and without this thread no search starts
                _log.exception("the devices are not known")
                self.failure = f"{type(error).__name__}: {error}"
            self._closing.wait(AGAIN_S)

    def _started(self) -> str:
        assert self._own is not None
        return self._own.address(self._closing)

    def _watch(self) -> None:
        """Reads the devices until the cluster is lost.

        Raises:
            RunnerError: it is lost, or cannot be joined.
        """
        driver = RayDriver(self._address)
        try:
            while not self._closing.is_set():
                self._kinds = tuple(
                    Kind(kind.device.name, kind.device.type, kind.total, kind.device.memory_mib)
                    for kind in driver.kinds()
                )
                self.failure = None
                if self._own is not None:
                    self._own.touch()
                self._closing.wait(LOOK_S)
        finally:
            driver.close(0)


class LocalRay:
    """A Ray on this machine, in a process that outlives a server that is killed, so that searches continue meanwhile.

    The next server finds it by the file `FILE`. Without a server it ends after `ALONE_S`.

    Args:
        data: the server's folder.
        devices: GPUs, or cores on a machine without; None for all.
    """

    def __init__(self, data: Path, devices: int | None) -> None:
        self._file, self._log, self._devices = data / FILE, data / "ray.log", devices

    def address(self, closing: threading.Event) -> str:
        """Returns the address of the running Ray, which is started if it does not run.

        Raises:
            RunnerError: it does not start.
        """
        if (address := self._running()) is not None:
            return address
        self._file.unlink(missing_ok=True)
        with open(self._log, "ab") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "redline.service.local_ray", str(self._file), str(self._devices or 0)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while keeper.poll() is None and time.monotonic() < deadline and not closing.wait(0.1):
            if (address := self._running()) is not None:
                return address
        keeper.kill()
        keeper.wait()
        raise RunnerError(f"Ray did not start on this machine: {self._log} has its output")

    def _running(self) -> str | None:
        record = self._record()
        return None if record is None or not lives(record[1]) else record[0]

    def _record(self) -> tuple[str, ProcessId] | None:
        """Returns the address and the process that the file names; None without a file."""
        try:
            record = json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        return record["address"], ProcessId(**record["process"])

    def touch(self) -> None:
        """Shows that a server uses it."""
        os.utime(self._file)

    def end(self) -> None:
        """Ends it and everything that runs on it."""
        record = self._record()
        if record is not None and lives(record[1]):
            keeper = psutil.Process(record[1].pid)
            keeper.terminate()
            try:
                keeper.wait(10)
            except psutil.TimeoutExpired:
                keeper.kill()
        self._file.unlink(missing_ok=True)


def write_record(file: Path, address: str) -> None:
    """Writes the file that names this process's Ray."""
    process = process_of(os.getpid())
    assert process is not None
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(json.dumps({"address": address, "process": asdict(process)}))
    os.replace(beside, file)
