"""Starts processes of another Unix user, on a host whose Python that user may not be able to reach."""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = "nobody"
# Mounts Python, whose folder other users cannot enter, at the same path within an open folder, for one process and its
# children.
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
    """Returns the entry of the user `nobody`; skips the test unless this process may change users."""
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of other users")
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(NOBODY)
    pytest.skip(f"this host has no user {NOBODY}")
    return None


def closed():
    """The outermost folder that keeps other users from this Python, or None."""
    base = Path(os.path.realpath(sys.base_prefix))
    return next((each for each in reversed(base.parents) if not each.stat().st_mode & 1), None)


def open_python():
    """Returns a command prefix with which every user can run this Python; skips the test if it cannot."""
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
