"""Processes of another Unix user, on a host whose Python that user may not be able to reach."""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = "nobody"
# Puts Python where its folder is closed to others into an open folder of the same name, for one process and what it starts.
_OPENED = """set -e
beside=$(mktemp -d)
mount --bind "$1" "$beside"
mount -t tmpfs -o mode=755 none "$2"
mkdir -p "$1"
mount --move "$beside" "$1"
shift 2
exec "$@"
"""


def only_root():
    """Skips a test where nobody may change users."""
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of other users")
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(NOBODY)
    pytest.skip(f"this host has no user {NOBODY}")
    return None


def closed():
    """The folder, perhaps, that keeps others from this Python."""
    base = Path(os.path.realpath(sys.base_prefix))
    return next((each for each in reversed(base.parents) if not each.stat().st_mode & 1), None)


def open_python():
    """What a command begins with so that every user can run this Python; skips the test where that cannot be arranged."""
    if closed() is None:
        return []
    start = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        _OPENED,
        "sh",
        os.path.realpath(sys.base_prefix),
    ]
    start.append(str(closed()))
    if shutil.which("unshare") is None or subprocess.run([*start, "true"], capture_output=True).returncode:
        pytest.skip("this Python is where other users cannot reach it, and nothing can be mounted here")
    return start
