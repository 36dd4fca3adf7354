"""Exports the configuration itself: YAML, JSON, and shell variables."""

import re
import shlex
from dataclasses import replace
from typing import Any

from ..base.errors import UsageError
from ..base.writing import as_data
from ..knobs.text import value_text
from .export_input import ExportInput
from .target import Target, as_json, as_yaml, hashed, sourced


def _content(setup: ExportInput) -> dict[str, Any]:
    trial = setup.trial
    content: dict[str, Any] = {
        "model": setup.model or None,
        "lora": setup.lora or None,
        "trial": trial.number,
        "simulated": setup.simulated or None,
        "emulated": setup.emulated or None,
        "devices": setup.devices,
        "seq_len": setup.seq_len,
        "global_batch": setup.global_batch,
        "configuration": as_data(setup.take_all()),
    }
    if trial.measurement is not None:
        content["predicted" if setup.simulated else "measurement"] = trial.measured.figures()
    return {name: value for name, value in content.items() if value is not None}


def _env(setup: ExportInput, comment: str) -> str:
    values = {
        "model": setup.model or None,
        "lora": setup.lora or None,
        "devices": setup.devices,
        "seq_len": setup.seq_len,
        "global_batch": setup.global_batch,
        "dp": None if setup.command else setup.dp,
        "grad_accum": setup.grad_accum,
        **setup.take_all(),
    }
    lines = []
    names: dict[str, str] = {}
    for name, value in values.items():
        if value is None:
            continue
        variable = "REDLINE_" + re.sub(r"\W", "_", name, flags=re.ASCII).upper()
        if names.setdefault(variable, name) != name:
            raise UsageError(f"the knobs '{names[variable]}' and '{name}' would both be {variable}")
        lines.append(f"{variable}={shlex.quote(value_text(value))}\n")
    return hashed(comment) + "".join(lines)


YAML = Target(
    name="yaml",
    about="the configuration and its measurement",
    stem="redline",
    use=lambda file: f"yaml.safe_load(open({file!r}))['configuration']",
    forms={"yaml": as_yaml(_content)},
    sequences=("sp", "cp"),
    runs=True,
    uneven=True,
)
JSON = replace(
    YAML,
    name="json",
    use=lambda file: f"json.load(open({file!r}))['configuration']",
    forms={"json": as_json(_content)},
    silent=frozenset({"json"}),
)
ENV = replace(
    YAML,
    name="env",
    about="shell variables",
    use=lambda file: f"set -a; . {sourced(shlex.quote(file))}; set +a",
    forms={"env": _env},
)
