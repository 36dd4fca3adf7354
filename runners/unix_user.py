"""A Unix user for processes that must not have access to files of this process's user."""

import grp
import os
import pwd
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import UsageError, unknown

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that redline is imported from."""
CHECK_S = 120.0
"""Time to start Python, s."""
_USERS_VARIABLE = re.compile(r"(REDLINE_|XDG_|SSH_|SUDO_).*|HOME|MAIL|TMPDIR|TEMP|TMP|HISTFILE|OLDPWD")
"""Environment variables with places and settings of this process's user."""
_SECRET = re.compile(r".*(TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH).*|PG.*|DATABASE_URL", re.I)
"""Environment variables whose names suggest a secret, and those of PostgreSQL's client."""


@dataclass(frozen=True, kw_only=True)
class UnixUser:
    """A user of this host."""

    name: str
    uid: int
    gid: int
    """Number of the primary group."""
    groups: tuple[int, ...]
    """Numbers of all groups. Access to GPUs may depend on one."""

    def popen(self, folder: Path, **defaults: str) -> dict[str, Any]:
        """Returns the arguments of `subprocess.Popen` for a process of this user, with an environment without this
        process's private variables.

        Args:
            folder: its home.
            defaults: default values of environment variables.
        """
        inherited = {**defaults, **os.environ}
        environment = {
            name: inherited[name]
            for name in inherited
            if not (_USERS_VARIABLE.fullmatch(name) or _SECRET.fullmatch(name))
        }
        path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        environment |= {"HOME": str(folder), "USER": self.name, "LOGNAME": self.name, "PYTHONPATH": path}
        return {
            "user": self.uid,
            "group": self.gid,
            "extra_groups": list(self.groups),
            "umask": 0o077,  # its files are not for other users
            "env": environment,
        }

    def give(self, folder: Path) -> None:
        """Makes this user the only one with access to a folder."""
        os.chown(folder, self.uid, self.gid)
        os.chmod(folder, 0o700)


def unix_user(name: str) -> UnixUser:
    """Returns the user of that name after checking that this process can start processes as that user.

    Raises:
        UsageError: the user does not exist, is this process's user or an administrator, or this process lacks the permission.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(unknown("user of this host", name, [user.pw_name for user in pwd.getpwall()])) from None
    if entry.pw_uid == 0:
        raise UsageError(f"the user '{name}' is an administrator of this host; name one without privileges")
    if entry.pw_uid == os.geteuid():
        raise UsageError(
            f"the user '{name}' is the one that this process runs as, so that code could access its files; name another"
        )
    groups = tuple(sorted(set(os.getgrouplist(name, entry.pw_gid)) - {0}))
    user = UnixUser(name=name, uid=entry.pw_uid, gid=entry.pw_gid, groups=groups)
    if user.gid == 0:
        raise UsageError(f"the user '{name}' is of the group '{grp.getgrgid(0).gr_name}'; name one that is not")
    _check(user)
    return user


def _check(user: UnixUser) -> None:
    """Starts Python as that user, which checks this process's permission and the user's access to Python and redline."""
    try:
        process = subprocess.run(
            [
                sys.executable,
                "-c",
                "import importlib.util as found, redline; assert found.find_spec('torch'), 'no torch'",
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            **user.popen(Path("/")),
        )
    except PermissionError as error:
        if os.geteuid() != 0:
            own_name = pwd.getpwuid(os.geteuid()).pw_name
            raise UsageError(
                f"'{own_name}' may not start processes of the user '{user.name}': start this as root, or with the capabilities "
                "SETUID, SETGID, CHOWN, KILL and DAC_READ_SEARCH"
            ) from error
        raise UsageError(
            f"the user '{user.name}' cannot run {os.path.realpath(sys.executable)}: install Python and redline where "
            "that user may read them"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"Python does not start as the user '{user.name}' within {CHECK_S:g} s") from error
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
        raise UsageError(f"the user '{user.name}' cannot run redline: {last_line}")
