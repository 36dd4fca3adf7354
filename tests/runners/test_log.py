"""A trial's log on a full disk: the log ends there, and the trial continues."""

import os
from pathlib import Path

import pytest
from redline.runners.host.log import LogFile


@pytest.mark.parametrize("head", [0, 4, 100], ids=["at its end", "in the middle", "at once"])
def test_a_full_disk_ends_the_log_and_nothing_else(head):
    with LogFile("/dev/full", head=head, tail=8) as log:
        log.write(b"beginning, middle and end")
        log.write(b"and more", rank=1)
    assert "/dev/full" not in [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
