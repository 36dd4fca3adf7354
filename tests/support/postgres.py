"""A temporary Postgres cluster that runs as an unprivileged user."""

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path


def program(name):
    """Path of a program of the latest Postgres installed, or None."""
    found = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), key=lambda path: float(path.split("/")[4]))
    return found[-1] if found else shutil.which(name)


def missing():
    """Returns a message that names what Postgres needs and is not installed, or ""."""
    absent = [each for each in ("initdb", "pg_ctl") if program(each) is None]
    try:
        import psycopg  # noqa: F401
    except ImportError:
        absent.append("psycopg")
    if os.getuid() == 0 and _user() is None:
        absent.append("a user to run as that is not root")
    return f"Postgres is not installed: no {', '.join(absent)}" if absent else ""


def _user():
    """Returns the user that Postgres runs as if this process is root, which Postgres refuses."""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


class Cluster:
    """A server that can be stopped as by a crash and started again. It is for tests and has no durability."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="redline-postgres-"))
        self._as = {}
        if os.getuid() == 0:
            user = _user()
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._run("initdb", "-A", "trust", "-U", "redline", "-E", "UTF8", "--no-sync", "--locale=C")
        self.start()
        self._made = 0

    def _run(self, name, *arguments):
        done = subprocess.run(
            [program(name), "-D", self.folder / "data", *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=open(self.folder / "output", "ab"),
            stderr=subprocess.STDOUT,
            timeout=120,
            **self._as,
        )
        assert done.returncode == 0, (self.folder / "output").read_text()

    def start(self):
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -c max_connections=200"
        self._run("pg_ctl", "-w", "-o", options, "-l", str(self.folder / "log"), "start")

    def stop(self, how="immediate"):
        self._run("pg_ctl", "-w", "-m", how, "stop")

    def url(self, database="postgres"):
        return f"postgresql://redline@127.0.0.1:{self.port}/{database}"

    def new_database(self):
        """Creates an empty database and returns its URL."""
        import psycopg

        self._made += 1
        name = f"made_{os.getpid()}_{self._made}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def empty(self, url, tables):
        """Empties the tables and restarts their ids."""
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY")

    def end(self):
        with contextlib.suppress(AssertionError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
