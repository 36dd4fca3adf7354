"""The Ray runner: real Ray, trials in placement groups, no extra output, no process left."""

import subprocess
import sys
import textwrap

import pytest
from tiers import tiered

SCRIPT = """
import sys
import torch
from torch import nn
import redline as rl
from redline.base.device import detect
from redline.runners import RayRunner, TrialRequest, TrialTerms

space = rl.Space()
micro = space.choice("micro_batch", [4, 8, 16], default=8)
space.derive("grad_accum", 16 // micro)

def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator)

def loss(output, batch):
    if len(batch[1]) == 16:
        raise MemoryError
    return nn.functional.cross_entropy(output, batch[1])

workload = rl.Workload(
    name="mlp", model=lambda: nn.Linear(32, 10), batch=batch, loss=loss, space=space, global_batch=16
)
"""


def run(code, timeout=570):
    script = SCRIPT + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module", params=tiered([1], [2]), ids="{} at once".format)
def tuned(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("ray") / "run"
    return run(
        f"""
        result = rl.tune(workload, trials=3, sampler="random", out={str(out)!r}, concurrency={request.param})
        print("STATUS", sorted((t.config["micro_batch"], str(t.measurement.status)) for t in result.all_trials))
        print("LOG", (result.folder / "logs" / "0.log").exists())
        import ray
        print("RAY", ray.is_initialized())
        """
    )


def test_trials_run_through_ray_with_typed_outcomes(tuned):
    assert tuned.returncode == 0, tuned.stderr
    assert "STATUS [(4, 'ok'), (8, 'ok'), (16, 'oom')]" in tuned.stdout


def test_ray_is_quiet_and_shut_down_when_it_was_started_for_the_run(tuned):
    assert tuned.stderr.strip() == ""
    assert [line.split()[0] for line in tuned.stdout.splitlines()] == ["STATUS", "LOG", "RAY"]
    assert "RAY False" in tuned.stdout


def test_logs_are_in_the_runs_folder(tuned):
    assert "LOG True" in tuned.stdout


@pytest.mark.exhaustive
def test_a_ray_that_this_process_has_joined_is_used_and_runs_on():
    done = run(
        """
        import ray
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        mine = ray.get_runtime_context().gcs_address
        jobs = len(ray._private.state.jobs())
        result = rl.tune(workload, trials=1, sampler="random")
        print("TRIED", result.all_trials[0].measurement.status)
        print("JOINED", len(ray._private.state.jobs()) - jobs, ray.is_initialized())
        """
    )
    assert "TRIED ok" in done.stdout, done.stderr
    assert "JOINED 1 True" in done.stdout, done.stdout
