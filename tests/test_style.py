"""The code passes the type checker, and the linter and formatter with the rules of pyproject.toml."""

import subprocess
import sys

import pytest
from house import ROOT

THEIRS = """import redline as rl
from torch import nn
sch = rl.create_schedule(nn.Linear(2, 2))
sch.shard(0, 'weight')
sch.chekpoint()
sch['0'].checkpoint().hook('fwd_pre', print)
rl.tune('gpt2', trials='many')
rl.tune('gpt2', trials=3).best.throughput.upper()
"""
"""A user's program with mistakes."""


@pytest.mark.slow
def test_the_types_hold_and_a_user_s_mistakes_are_found(tmp_path):
    """Checks the repository, linked as `redline` since its folder may have another name, and a user's program.

    This is one test because mypy's cache is one database, which concurrent runs could find locked.
    """
    (tmp_path / "redline").symlink_to(ROOT, target_is_directory=True)
    (tmp_path / "theirs.py").write_text(THEIRS)
    command = [sys.executable, "-m", "mypy", "--show-traceback", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "redline", "-m", "theirs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540)
    assert done.returncode == 1, done.stdout + done.stderr  # 1 means that mistakes were found, 2 a fault of mypy
    mistakes = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line for line in mistakes if not line.startswith("theirs.py:")] == []
    assert {line.split(":")[1] for line in mistakes if line.startswith("theirs.py:")} == {"4", "5", "7", "8"}


def test_the_code_is_written_by_the_rules():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", str(ROOT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", str(ROOT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
