"""`redline doctor`: versions, devices, memory, and missing dependencies."""

import importlib.util
import json
import platform
import shutil
import sys
from importlib import metadata
from typing import Any

import click

EXAMPLES = """\b
Examples:
  redline doctor
  redline doctor --json
"""

_NEEDED = (
    "torch",
    "transformers",
    "optuna",
    "ray",
    "pandas",
    "numpy",
    "scipy",
    "click",
    "rich",
    "psutil",
    "PyYAML",
)
_EXTRAS = {
    "dashboard": (("fastapi", "uvicorn"), "`redline dashboard`"),
    "service": (("fastapi", "uvicorn", "httpx", "sqlalchemy", "alembic"), "`redline serve` and its clients"),
    "lora": (("peft",), "`--lora`"),
    "data": (("datasets", "pyarrow"), "`redline train --data`"),
    "loggers": (("tensorboard", "mlflow", "wandb"), "`--log-to` for these"),
}
"""Modules of an extra of setup.cfg, and the features that need them."""
_EXTRAS_OF_GPUS = {
    "kernels": (("liger_kernel",), "the modules of the knob `kernels`"),
    "fp8": (("torchao",), "`precision=fp8`"),
}
_HEBO = "pip install --no-deps HEBO==0.3.6 && pip install 'redline[hebo]'"


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Check versions, devices, memory and missing dependencies of this machine, with the features that they disable."""
    facts = examine()
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo("versions")
    for name, version in facts["versions"].items():
        click.echo(f"  {name:<14} {version}")
    device = facts["device"]
    click.echo("devices")
    click.echo(f"  {device['count']} x {device['name']} ({device['type']}), {device['memory_mib']:,} MiB each")
    click.echo(f"  free host memory: {facts['free_host_memory_mib']:,} MiB")
    if (shared := facts["shared_memory_mib"]) is not None:
        click.echo(
            f"  /dev/shm, which ranks and data loaders share: {shared['total']:,} MiB, {shared['free']:,} MiB free"
        )
    if facts["missing"]:
        click.echo("missing")
        for entry in facts["missing"]:
            click.echo(f"  {entry['what']}: {entry['disables']}. {entry['do']}")
    else:
        click.echo("nothing is missing")


def examine() -> dict[str, Any]:
    """Returns the versions, devices and memory of the machine and its missing dependencies, as a JSON-ready mapping."""
    from .. import __version__
    from ..base.device import available_memory_mib, detect
    from ..base.host_memory import MIB, memory_groups, shared_memory

    device = detect()
    shared = shared_memory()
    versions = {"redline": __version__, "python": platform.python_version()}
    missing = []
    for name in _NEEDED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            disables = "`--runner ray`; `--runner local` works" if name == "ray" else "redline"
            missing.append({"what": name, "disables": f"disables {disables}", "do": f"Install it: pip install {name}"})
    if importlib.util.find_spec("hebo") is None:
        missing.append({"what": "HEBO", "disables": "disables `--sampler hebo`", "do": f"Install it: {_HEBO}"})
    else:
        versions["HEBO"] = metadata.version("HEBO")
    for extra, (modules, needed_for) in (_EXTRAS | (_EXTRAS_OF_GPUS if device.type == "cuda" else {})).items():
        if absent := [module for module in modules if importlib.util.find_spec(module) is None]:
            do = f"Install it: pip install 'redline[{extra}]'"
            missing.append({"what": ", ".join(absent), "disables": f"disables {needed_for}", "do": do})
    if device.type == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        missing.append(
            {"what": "a C++ compiler", "disables": "disables the knob `fusion` on a CPU", "do": "Install g++"}
        )
    if device.type == "cuda" and "+cpu" in versions.get("torch", ""):
        missing.append(
            {
                "what": "torch with CUDA",
                "disables": f"the installed build ({versions['torch']}) cannot use the {device.name}",
                "do": "Install a CUDA build of torch",
            }
        )
    if any(group.kills_all for group in memory_groups()):
        missing.append(
            {
                "what": "single kills (memory.oom.group is 1)",
                "disables": "a trial that fills the host's memory ends this whole container",
                "do": "Set singleProcessOOMKill of the kubelet",
            }
        )
    if sys.platform != "linux":
        missing.append({"what": "Linux", "disables": "dry runs need its process control", "do": "Use Linux"})
    return {
        "versions": versions,
        "device": device.to_dict(),
        "free_host_memory_mib": available_memory_mib(),
        "shared_memory_mib": None if shared is None else {"free": shared[0] // MIB, "total": shared[1] // MIB},
        "missing": missing,
    }
