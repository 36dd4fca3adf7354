"""Without Ray installed, `--runner local` tunes over several ranks, and the default names the missing package."""

import os
import subprocess
import sys

import pytest

TRAIN = """
import redline as rl
import torch
from torch import nn


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator)


workload = rl.Workload(
    name="mlp", model=lambda: nn.Linear(32, 10), batch=batch, global_batch=16,
    loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
)
"""


@pytest.fixture
def tune(tmp_path):
    # Hides Ray in every process, also in the host agent.
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    (tmp_path / "train.py").write_text(TRAIN)
    paths = [str(tmp_path / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])]

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "redline.cli", "tune", "--workload", "train.py:workload", *arguments],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True,
            timeout=570, check=False,
        )  # fmt: skip

    return run


@pytest.mark.slow
def test_local_needs_no_ray(tune):
    done = tune("--runner", "local", "--devices", "2", "--trials", "1", "--measure-time", "0.1s", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "   0  ok" in done.stdout
    assert ["dp", "2"] in [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_without_ray_the_default_runner_says_what_to_do(tune):
    done = tune("--trials", "1", "--out", "run")
    assert done.returncode == 2
    assert "the ray runner needs ray: `pip install ray`, or choose `--runner local`" in done.stderr
    assert "Traceback" not in done.stderr
