"""Resources that the machine permits this process to use."""

import os
import subprocess
import sys

import pytest
from redline.base import device


def test_cores_are_those_of_the_process_not_of_the_machine():
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); "
        "from redline.base.device import detect, usable_cores; print(usable_cores(), detect().name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.startswith("1 ")
    assert "(1 cores)" in done.stdout


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.5, 1), (1000.0, None), (None, None)])
def test_a_control_group_s_quota_counts(monkeypatch, quota, expected):
    monkeypatch.setattr(device, "cpu_quota", lambda: quota)
    assert device.usable_cores() == (expected or len(os.sched_getaffinity(0)))
