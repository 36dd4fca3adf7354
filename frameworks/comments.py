"""What an export says of itself, in lines without comment signs."""

import shlex
import textwrap

from .. import __version__
from ..results.columns import fold, number, speed
from .setup import Setup
from .target import Target

_WIDTH = 100


def head(target: Target, setup: Setup) -> list[str]:
    """Where the configuration comes from, what has to be known before it is used, and what it runs on."""
    trial, measured = setup.trial, setup.trial.measurement
    what = f"{setup.model or 'a model'}, trial {setup.trial.number}{', predicted' if setup.simulated else ''}"
    if trial.ok:
        what += f": {speed(trial.throughput, trial.measured.unit)}"
    if measured is not None and measured.peak_memory_mib is not None:
        what += f", peak memory {number(measured.peak_memory_mib, 5)} MiB"
    lines = [f"Written by redline {__version__} for {target.name}: {fold(what)}"]
    lines += (line for mark in setup.marks() for line in wrapped(mark))
    if target.checked is not None:
        lines.append(f"Checked against {' '.join(target.checked)}")
    degrees = {name: getattr(setup, name) for name in ("tp", "sp", "cp", "pp", "dp")}
    lacks = {name: name not in target.sequences and degrees[name] > 1 for name in ("sp", "cp")}
    lacks["pp"] = not target.pipelines and setup.pp > 1
    words = {"sp": "sequences cut over ranks", "cp": "ring attention", "pp": "pipeline"}
    runs = " x ".join(
        f"{name} {size}"
        for name, size in degrees.items()
        if not lacks.get(name) and (name not in ("sp", "cp") or size > 1)
    )
    if setup.processes < setup.devices:
        why = " and no ".join(words[name] for name, lacking in lacks.items() if lacking)
        lines.append(f"On {setup.processes} of {setup.devices} devices, since {target.name} has no {why}: {runs}")
    elif setup.devices > 1:
        lines.append(f"On {setup.devices} devices: {runs}")
    return lines


def used(target: Target, setup: Setup, file: str) -> tuple[str, ...]:
    """How a file of that name is used, and what starts a training with it."""
    lines = [f"Use: {fold(target.use(file))}"] if target.use is not None else []
    if target.start is not None:
        line = fold(target.start(setup, shlex.quote(file)))
        if setup.hosts.count == 1:
            lines.append(f"Start: {line}")
        else:
            lines += [f"Start on each of {_hosts(setup, line)}:", f"  {line}"]
        if setup.per_host is None and setup.processes > 1:
            lines.append("  for one host, as how many devices a host has is not known")
    return tuple(lines)


def _hosts(setup: Setup, line: str) -> str:
    own = ", NODE_RANK its own number from 0" if "$NODE_RANK" in line else ""
    return f"{setup.hosts}, MASTER_ADDR being the first one's name{own}"


def wrapped(sentence: str) -> list[str]:
    """A sentence as an item of a list."""
    return textwrap.wrap(f"- {fold(sentence)}", _WIDTH, subsequent_indent="  ")
