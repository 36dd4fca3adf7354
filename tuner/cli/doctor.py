"""`redline doctor`: versions, devices, memory, what is missing and what that disables."""

import importlib.util
import json
import platform
import shutil
import sys
from importlib import metadata
from typing import Any

import click

_NEEDED = ("torch", "transformers", "optuna", "ray", "pandas", "numpy", "scipy", "click", "rich", "psutil", "PyYAML")
_HEBO = "pip install --no-deps HEBO==0.3.6 && pip install 'redline[hebo]'"


@click.command(
    epilog="\b\nExamples:\n  redline doctor\n  redline doctor --json\n",
    short_help="Check versions, devices and memory, and what is missing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Check what redline finds on this machine: versions, devices, memory, what is missing and what that disables."""
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
    click.echo(f"  host memory that is free: {facts['free_host_memory_mib']:,} MiB")
    if facts["missing"]:
        click.echo("missing")
        for each in facts["missing"]:
            click.echo(f"  {each['what']}: {each['disables']}. {each['do']}")
    else:
        click.echo("nothing is missing")


def examine() -> dict[str, Any]:
    """What is there and what is not, as a mapping."""
    from ... import __version__
    from ...models.device import available_memory_mib, detect

    device = detect()
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
    if device.type == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        missing.append(
            {
                "what": "a C++ compiler",
                "disables": "disables the knob `fusion` on a CPU",
                "do": "Install g++",
            }
        )
    if device.type == "cuda" and "+cpu" in versions.get("torch", ""):
        missing.append(
            {
                "what": "torch with CUDA",
                "disables": f"the installed build ({versions['torch']}) cannot use the {device.name}",
                "do": "Install a CUDA build of torch",
            }
        )
    if sys.platform != "linux":
        missing.append({"what": "Linux", "disables": "dry runs need its process control", "do": "Use Linux"})
    return {
        "versions": versions,
        "device": device.to_dict(),
        "free_host_memory_mib": available_memory_mib(),
        "missing": missing,
    }
