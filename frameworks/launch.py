"""Starts a training on its hosts: a script for each of them, or a scheduler's file."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .export_input import PORT, ExportInput
from .target import Form, hashed

_MOUNT = "/redline"
_IMAGE = "IMAGE"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchJob:
    """A training to start."""

    setup: ExportInput
    """Its configuration, sizes and hosts."""
    line: str
    """Command line of every host (`Target.start`)."""
    name: str
    """Name of the target's file."""
    text: str
    """Contents of the target's file."""

    @property
    def called(self) -> str:
        """Name of the job in lower-case letters, digits and hyphens."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.setup.model.lower()).strip("-")[:40].strip("-")
        return slug if slug[:1].isalpha() else "-".join(filter(None, ("train", slug)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A way to start a training on its hosts."""

    name: str
    """Name for `--launch`."""
    about: str
    """Short description."""
    form: Form
    """Form of its file."""
    body: Callable[[LaunchJob, str], str]
    """`body(job, comment)` returns the text."""
    use: Callable[[LaunchJob, str], str]
    """`use(job, file)` returns the instructions for a file of that name (quoted for a shell)."""
    folder: str = ""
    """Folder of the target's file as seen by the command: its own, or where the launch puts it."""
    needs: str = ""
    """Required software, with its version."""


def _torchrun(job: LaunchJob, comment: str) -> str:
    needed = "".join(f': "${{{name}:?set it to {value}}}"\n' for name, value in _each_hosts(job).items())
    return f'#!/usr/bin/env bash\n{hashed(comment)}set -euo pipefail\n{needed}{job.line} "$@"\n'


def _use_torchrun(job: LaunchJob, file: str) -> str:
    variables = "".join(f"{name}=... " for name in _each_hosts(job))
    return f"{variables}bash {file}" + (f", on each of {job.setup.hosts}" if job.setup.hosts.count > 1 else "")


def _each_hosts(job: LaunchJob) -> dict[str, str]:
    """Environment variables of each host."""
    needed = {"MASTER_ADDR": "the name of the first host"} if job.setup.hosts.count > 1 else {}
    return needed | ({"NODE_RANK": "the number of this host, from 0"} if "$NODE_RANK" in job.line else {})


def _slurm(job: LaunchJob, comment: str) -> str:
    hosts = job.setup.hosts
    directives = [f"job-name={job.called}", f"nodes={hosts.count}", "ntasks-per-node=1"]
    if job.setup.device_type == "cuda":
        directives.append(f"gpus-per-node={hosts.each}")
    # Trials had their hosts to themselves; a task alone would get a single core.
    directives.append("exclusive")
    addresses = ""
    if hosts.count > 1:
        addresses = (
            'read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")\n'
            f'export MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-{PORT}}}"\n'
        )
    task = f'set -euo pipefail; export NODE_RANK="$SLURM_NODEID"; {job.line} "$@"'
    return (
        "#!/usr/bin/env bash\n"
        + "".join(f"#SBATCH --{directive}\n" for directive in directives)
        + hashed(comment)
        + f"set -euo pipefail\n{addresses}"
        + f'srun --cpu-bind=none bash -c {shlex.quote(task)} {job.called} "$@"\n'
    )


def _kubernetes(job: LaunchJob, comment: str) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes multi-line texts as block scalars."""

    def represent(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, represent)
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": job.called},
            "data": {job.name: job.text},
        },
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.called},
            "spec": {"nprocPerNode": str(job.setup.hosts.each), "pytorchReplicaSpecs": _replicas(job)},
        },
    ]
    return hashed(comment) + yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _replicas(job: LaunchJob) -> dict[str, Any]:
    hosts = job.setup.hosts

    def of(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": _pod(job)}}

    return {"Master": of(1)} | ({"Worker": of(hosts.count - 1)} if hosts.count > 1 else {})


def _pod(job: LaunchJob) -> dict[str, Any]:
    # The operator numbers the hosts in RANK, and finds its container by name.
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": _IMAGE,
        "command": ["bash", "-c", f'set -euo pipefail; export NODE_RANK="$RANK"; {job.line}'],
        "volumeMounts": [
            {"name": "redline", "mountPath": _MOUNT},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if job.setup.device_type == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": job.setup.hosts.each}}
    volumes = [
        {"name": "redline", "configMap": {"name": job.called}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {"containers": [container], "volumes": volumes}


LAUNCHES: Mapping[str, Launch] = {
    launch.name: launch
    for launch in (
        Launch(
            name="torchrun",
            about="a shell script that each host runs",
            form="shell",
            body=_torchrun,
            use=_use_torchrun,
        ),
        Launch(
            name="slurm",
            about="a batch script, whose hosts run it by srun",
            form="shell",
            body=_slurm,
            use=lambda job, file: f"sbatch {file}",
            needs="Slurm 19.05 or later",
        ),
        Launch(
            name="kubernetes",
            about="a PyTorchJob of Kubeflow, with the target's file in a ConfigMap",
            form="yaml",
            body=_kubernetes,
            use=lambda job, file: (
                f"kubectl apply -f {file}, with {_IMAGE} replaced by an image that has the script and what it needs"
            ),
            folder=f"{_MOUNT}/",
            needs="Kubeflow's training operator 1 (kubeflow.org/v1)",
        ),
    )
}
"""All launches by name."""
