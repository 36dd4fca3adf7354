"""`deploy/ray.sbatch`: a Slurm job that searches on a Ray of its own hosts."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from house import ROOT

SCRIPT = ROOT / "deploy" / "ray.sbatch"


def run(*command, timeout=60, **options):
    """Returns the exit code and the output of a command."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    return done.returncode, done.stdout + done.stderr


def write_program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_the_script_has_nothing_that_a_linter_knows_to_be_wrong():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.is_file(), "shellcheck is not installed: pip install 'redline[test]'"
    assert run(str(shellcheck), str(SCRIPT)) == (0, "")


def test_a_slurm_job_runs_its_command_on_a_ray_cluster_of_all_hosts(tmp_path):
    """With a Slurm that starts one task, and a Ray that starts the command."""
    write_program(tmp_path / "scontrol", 'printf "%s\\n" n1 n2')
    write_program(tmp_path / "srun", 'shift 2; exec "$@"')
    write_program(tmp_path / "ray", 'echo "$@"; while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    write_program(tmp_path / "search", 'echo "$RAY_ADDRESS" "$1"; exit 3')
    allocation = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "8"}
    around = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **allocation}
    code, output = run("bash", str(SCRIPT), "search", "two words", env=around)
    assert code == 3
    assert output.splitlines() == [
        "symmetric-run --address n1:6379 --min-nodes 2 -- env RAY_ADDRESS=n1:6379 search two words", "n1:6379 two words"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="a host of its own needs unshare and root"
)
def test_a_slurm_job_searches_on_the_ray_that_it_starts(tmp_path):
    """With a Slurm that starts one task, on a host of its own: `ray symmetric-run` stops every Ray that it finds."""
    write_program(tmp_path / "scontrol", "echo 127.0.0.1")
    write_program(tmp_path / "srun", 'shift 2; exec "$@"')
    allocation = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "1"}
    programs = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="rl") as temporary:  # a short name, as Ray creates sockets in it
        around = {**os.environ, "PATH": programs, "TMPDIR": temporary, "RAY_TMPDIR": temporary, **allocation}
        code, output = run(
            *("unshare", "--pid", "--net", "--fork", "--mount-proc"),
            *("sh", "-c", 'ip link set lo up && exec "$@"', "sh", "bash", str(SCRIPT)),
            *("redline", "tune", "--command", f"{sys.executable} -c 'print(\"speed {{x}}\")'", "--runner", "ray"),
            *("--metric", r"speed (?P<score>\d+)", "--set", "x=1,2", "--trials", "2", "--out", str(tmp_path / "run")),
            env=around,
            timeout=280,
        )
    assert code == 0, output
    assert yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())["best"]["configuration"] == {"x": 2}
