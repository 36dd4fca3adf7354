"""The request, the space and the environment of a run as readable text."""

from collections.abc import Mapping
from typing import Any

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
    given = (request or {}).get("asked", {})
    out = []
    if isinstance(workload := given.get("workload"), Mapping) and workload.get("class"):
        out.append(["Class", _text(workload["class"])])
    if given.get("simulated"):
        out.append(["Simulated", "nothing was run: these are predictions"])
    if given.get("emulated"):
        out.append(["Emulated", "some ranks ran alone on one device: communication is priced, not measured"])
    for key, name in _ASKED.items():
        value = given.get(key)
        if value is None:
            continue
        if key == "devices":
            value = devices(request)
        elif key == "memory_limit_mib":
            value = _mib(value)
        elif key == "trial_timeout_s":
            value = f"{value:g} s" if isinstance(value, (int, float)) else value
        out.append([name, _text(value)])
    if began(request):
        out.append(["Started", began(request)])
    for each in (request or {}).get("resumed") or []:
        if isinstance(each, Mapping):
            out.append(["Resumed", _moment(each.get("at", ""))])
    return out


def devices(request: Mapping[str, Any] | None) -> str:
    """Returns the devices of a trial, such as `8 × H100`, with the number present if more; empty without the data."""
    value = (request or {}).get("asked", {}).get("devices")
    if not isinstance(value, Mapping):
        return _text(value) if value is not None else ""
    name = _text(value.get("name") or value.get("type") or "devices")
    count = value.get("count")
    used = value.get("used") or count
    if used is None:
        return name
    more = isinstance(count, int) and isinstance(used, int) and count > used
    return f"{used} × {name}" + (f" (of {count})" if more else "")


def began(request: Mapping[str, Any] | None) -> str:
    """Returns the start of the run according to run.yaml; empty without it."""
    return _moment((request or {}).get("created") or "")


def space(request: Mapping[str, Any] | None, columns: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Returns the knobs and constraints: those of run.yaml, or those seen in the columns of the table.

    Each of `knobs` has `name`, `values` (None for a derived one), `default`, `help`, `when`, `derived`; each of
    `constraints` has `text` and `reason`. `declared` is true if the space comes from run.yaml.
    """
    document = (request or {}).get("asked", {}).get("space")
    seen = {name[len("knob.") :]: cells for name, cells in columns.items() if name.startswith("knob.")}
    if not isinstance(document, Mapping) or not isinstance(document.get("knobs"), list):
        return {"declared": False, "constraints": [], "knobs": [_seen(name, cells) for name, cells in seen.items()]}
    knobs = [_knob(each) for each in document["knobs"] if isinstance(each, Mapping) and "name" in each]
    for each in _mappings(document.get("derived")):
        knobs.append(
            {
                "name": str(each.get("name")),
                "values": None,
                "derived": _rule(each.get("value")),
                "help": str(each.get("help", "")),
            }
        )
    known = {each["name"] for each in knobs}
    knobs += [_seen(name, cells) for name, cells in seen.items() if name not in known]
    constraints = [
        {"text": _rule(each.get("require")), "reason": str(each.get("reason", ""))}
        for each in _mappings(document.get("constraints"))
    ]
    return {"declared": True, "knobs": knobs, "constraints": constraints}


def environment(request: Mapping[str, Any] | None, best: Mapping[str, Any] | None) -> list[list[Any]]:
    """Returns groups of facts about the environment, each a title and pairs of a name and a text."""
    found = (best or {}).get("environment") or (request or {}).get("environment") or {}
    if not isinstance(found, Mapping):
        return []
    out = []
    for key, title in (("devices", "Devices"), ("host", "Machine"), ("versions", "Versions")):
        facts = found.get(key) or ((request or {}).get("asked", {}).get("devices") if key == "devices" else None)
        if isinstance(facts, Mapping):
            pairs = [
                [str(name).replace("_mib", "").replace("_", " "), _fact(name, value)]
                for name, value in facts.items()
                if value is not None
            ]
            out.append([title, pairs])
    return out


def _fact(name: Any, value: Any) -> str:
    return _mib(value) if str(name).endswith("_mib") else _text(value)


def _mib(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:,.0f} MiB" if number else f"{value} MiB"


def _knob(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = entry.get("values")
    if not isinstance(values, list):
        values = [False, True] if entry.get("type") == "flag" else None
    text = None
    if values is None and "low" in entry:
        text = f"{entry['low']} to {entry.get('high')}" + (f", step {entry['step']}" if "step" in entry else "")
    default = entry.get("default", values[0] if values else entry.get("low"))
    return {
        "name": str(entry["name"]),
        "values": values,
        "range": text,
        "default": default,
        "help": str(entry.get("help", "")),
        "when": _rule(entry["when"]) if "when" in entry else "",
    }


def _seen(name: str, cells: list[Any]) -> dict[str, Any]:
    values = sorted({each for each in cells if each is not None}, key=lambda each: (isinstance(each, str), each))
    if len(values) > 40:
        return {"name": name, "values": None, "range": f"{len(values)} values, {values[0]} to {values[-1]}", "help": ""}
    return {"name": name, "values": values, "help": ""}


def _moment(value: Any) -> str:
    return _text(value).replace("T", " ").replace("+0000", " UTC")


def _rule(value: Any) -> str:
    return _text(value["callable"]) if isinstance(value, Mapping) and "callable" in value else _text(value)


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(each) for each in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return str(value)
