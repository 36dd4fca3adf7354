"""A Unix user as whom processes are started that shall reach nothing of this one's."""

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
"""How long it may take to start Python, s."""
_OF_A_USER = re.compile(r"(REDLINE_|XDG_|SSH_|SUDO_).*|HOME|MAIL|TMPDIR|TEMP|TMP|HISTFILE|OLDPWD")
_SECRET = re.compile(r".*(TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|AUTH).*|PG.*|DATABASE_URL", re.I)


@dataclass(frozen=True, kw_only=True)
class UnixUser:
    """A user of this host."""

    name: str
    """As the host's list of users has it."""
    uid: int
    """Number."""
    gid: int
    """Number of the first group."""
    groups: tuple[int, ...]
    """Numbers of all groups: a GPU's files may be a group's."""

    def popen(self, folder: Path, **more: str) -> dict[str, Any]:
        """What `subprocess.Popen` is told for a process of this user's: who it is, and an environment without what is
        this process's own.

        Args:
            folder: its home.
            more: of the environment, where this one's does not say.
        """
        kept = {**more, **os.environ}
        environment = {name: kept[name] for name in kept if not (_OF_A_USER.fullmatch(name) or _SECRET.fullmatch(name))}
        path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        environment |= {"HOME": str(folder), "USER": self.name, "LOGNAME": self.name, "PYTHONPATH": path}
        return {
            "user": self.uid,
            "group": self.gid,
            "extra_groups": list(self.groups),
            "umask": 0o077,
            "env": environment,
        }

    def give(self, folder: Path) -> None:
        """Makes a folder theirs alone."""
        os.chown(folder, self.uid, self.gid)
        os.chmod(folder, 0o700)


def unix_user(name: str) -> UnixUser:
    """The user of that name, as whom this process can start others.

    Raises:
        UsageError: there is none, it is who this process is or an administrator, or this process may not.
    """
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(unknown("user of this host", name, [each.pw_name for each in pwd.getpwall()])) from None
    if found.pw_uid == 0:
        raise UsageError(f"the user '{name}' may do everything on this host; name one that may do little")
    if found.pw_uid == os.geteuid():
        raise UsageError(
            f"the user '{name}' is the one that this process runs as, so that nothing would be kept from code; name "
            "another"
        )
    groups = tuple(sorted(set(os.getgrouplist(name, found.pw_gid)) - {0}))
    user = UnixUser(name=name, uid=found.pw_uid, gid=found.pw_gid, groups=groups)
    if user.gid == 0:
        raise UsageError(f"the user '{name}' is of the group '{grp.getgrgid(0).gr_name}'; name one that is not")
    _check(user)
    return user


def _check(user: UnixUser) -> None:
    """Starts Python as that user, which shows both that this process may and that the user can."""
    try:
        done = subprocess.run(
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
            me = pwd.getpwuid(os.geteuid()).pw_name
            raise UsageError(
                f"'{me}' may not start processes of the user '{user.name}': start this as root, or with the capabilities "
                "SETUID, SETGID, CHOWN, KILL and DAC_READ_SEARCH"
            ) from error
        raise UsageError(
            f"the user '{user.name}' cannot run {os.path.realpath(sys.executable)}: install Python and redline where "
            "that user may read them"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"Python does not start as the user '{user.name}' within {CHECK_S:g} s") from error
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise UsageError(f"the user '{user.name}' cannot run redline: {words}")
