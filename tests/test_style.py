"""What tools can tell of the code: its types hold, and it is written by the rules of pyproject.toml."""

import subprocess
import sys

import pytest
from house import ROOT


@pytest.fixture
def checked(tmp_path):
    """Runs mypy on a package below a folder in which the repository, however it is called, is `redline`."""
    (tmp_path / "redline").symlink_to(ROOT, target_is_directory=True)

    def check(*what, **more):
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), *what]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540, **more)
        return done.returncode, done.stdout + done.stderr

    return check


def test_the_types_hold(checked):
    status, said = checked("-p", "redline")
    assert status == 0, said


def test_a_user_s_mistakes_are_found(checked, tmp_path):
    """What users write is checked against signatures, down to the primitives."""
    (tmp_path / "theirs.py").write_text(
        "import redline as rl\n"
        "from torch import nn\n"
        "sch = rl.create_schedule(nn.Linear(2, 2))\n"
        "sch.shard(0, 'weight')\n"
        "sch.chekpoint()\n"
        "sch['0'].checkpoint().hook('fwd_pre', print)\n"
        "rl.tune('gpt2', trials='many')\n"
        "rl.tune('gpt2', trials=3).best.throughput.upper()\n"
    )
    _, said = checked("theirs.py")
    assert {line.split(":")[1] for line in said.splitlines() if ": error:" in line} == {"4", "5", "7", "8"}, said


def test_the_code_is_written_by_the_rules():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", str(ROOT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", str(ROOT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
