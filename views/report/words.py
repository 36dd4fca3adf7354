"""The request, the space and the environment of a run as readable text."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...results.listing import knob_names
from ...results.measurement import Trial

_ASKED = {
    "model": "Model",
    "devices": "Devices",
    "seq_len": "Sequence length",
    "global_batch": "Global batch",
    "memory_limit_mib": "Memory limit",
    "sampler": "Sampler",
    "runner": "Runner",
    "seed": "Seed",
    "trial_timeout_s": "Deadline of a trial",
    "first_trial": "Begins with",
}


def request_rows(request: Mapping[str, Any] | None) -> list[list[str]]:
    """Returns the request in run.yaml as pairs of a name and a text."""
    section = (request or {}).get("asked", {})
    rows = []
    if section.get("workload", {}).get("class"):
        rows.append(["Class", section["workload"]["class"]])
    if section.get("simulated"):
        rows.append(["Simulated", "nothing was run: these are predictions"])
    if section.get("emulated"):
        rows.append(["Emulated", "some ranks ran alone on one device: communication is priced, not measured"])
    for key, name in _ASKED.items():
        value = section.get(key)
        if value is None:
            continue
        if key == "devices":
            value = devices(request)
        elif key == "memory_limit_mib":
            value = _mib(value)
        elif key == "trial_timeout_s":
            value = f"{value:g} s"
        rows.append([name, _text(value)])
    if began(request):
        rows.append(["Started", began(request)])
    rows += [["Resumed", _moment(resumption.get("at", ""))] for resumption in (request or {}).get("resumed", ())]
    return rows


def devices(request: Mapping[str, Any] | None) -> str:
    """Returns the devices of a trial, such as `8 × H100`, with the number present if more; empty without the data."""
    value = (request or {}).get("asked", {}).get("devices")
    if value is None:
        return ""
    name, count = value.get("name") or value.get("type") or "devices", value.get("count")
    used = value.get("used") or count
    if used is None:
        return str(name)
    return f"{used} × {name}" + (f" (of {count})" if count is not None and count > used else "")


def began(request: Mapping[str, Any] | None) -> str:
    """Returns the start of the run according to run.yaml; empty without it."""
    return _moment((request or {}).get("created") or "")


def space(request: Mapping[str, Any] | None, trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns the knobs and constraints: those of run.yaml, or those of the trials.

    Each of `knobs` has `name`, `values` (None for a derived one), `default`, `help`, `when`, `derived`; each of
    `constraints` has `text` and `reason`. `declared` is true if the space comes from run.yaml.
    """
    document = (request or {}).get("asked", {}).get("space")
    seen = {name: [trial.config.get(name) for trial in trials] for name in knob_names(trials)}
    if "knobs" not in (document or {}):
        return {"declared": False, "constraints": [], "knobs": [_seen(name, cells) for name, cells in seen.items()]}
    knobs = [_knob(entry) for entry in document["knobs"] if "name" in entry]
    for entry in document.get("derived", ()):
        rule = _rule(entry.get("value"))
        knobs.append({"name": entry.get("name"), "values": None, "derived": rule, "help": entry.get("help", "")})
    declared = {knob["name"] for knob in knobs}
    knobs += [_seen(name, cells) for name, cells in seen.items() if name not in declared]
    constraints = [
        {"text": _rule(entry.get("require")), "reason": entry.get("reason", "")}
        for entry in document.get("constraints", ())
    ]
    return {"declared": True, "knobs": knobs, "constraints": constraints}


def environment(request: Mapping[str, Any] | None, best: Mapping[str, Any] | None) -> list[list[Any]]:
    """Returns groups of facts about the environment, each a title and pairs of a name and a text."""
    source = (best or {}).get("environment") or (request or {}).get("environment") or {}
    groups = []
    for key, title in (("devices", "Devices"), ("host", "Machine"), ("versions", "Versions")):
        facts = source.get(key) or ((request or {}).get("asked", {}).get("devices") if key == "devices" else None)
        if isinstance(facts, Mapping):
            pairs = [
                [str(name).replace("_mib", "").replace("_", " "), _fact(name, value)]
                for name, value in facts.items()
                if value is not None
            ]
            groups.append([title, pairs])
    return groups


def _fact(name: Any, value: Any) -> str:
    return _mib(value) if str(name).endswith("_mib") else _text(value)


def _mib(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:,.0f} MiB" if number else f"{value} MiB"


def _knob(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = entry.get("values")
    if values is None and entry.get("type") == "flag":
        values = [False, True]
    range_text = None
    if values is None and "low" in entry:
        range_text = f"{entry['low']} to {entry.get('high')}" + (f", step {entry['step']}" if "step" in entry else "")
    default = entry.get("default", values[0] if values else entry.get("low"))
    return {
        "name": entry["name"],
        "values": values,
        "range": range_text,
        "default": default,
        "help": entry.get("help", ""),
        "when": _rule(entry["when"]) if "when" in entry else "",
    }


def _seen(name: str, cells: list[Any]) -> dict[str, Any]:
    values = sorted({cell for cell in cells if cell is not None}, key=lambda cell: (isinstance(cell, str), cell))
    if len(values) > 40:
        return {"name": name, "values": None, "range": f"{len(values)} values, {values[0]} to {values[-1]}", "help": ""}
    return {"name": name, "values": values, "help": ""}


def _moment(value: Any) -> str:
    return _text(value).replace("T", " ").replace("+0000", " UTC")


def _rule(value: Any) -> str:
    return _text(value["callable"]) if isinstance(value, Mapping) and "callable" in value else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(element) for element in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(element)}" for key, element in value.items())
    return str(value)
