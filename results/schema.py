"""The contents of the documents in a run's folder, part by part. Invalid parts are reported and left out."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ..base.errors import StudyError
from ..base.reading import LARGEST_DOCUMENT, Malformed, parse_yaml, read_inside

MOST_LISTED = 20
"""Number of errors of one document that are listed."""
MOST_FACTS = 64
"""Largest number of values of a list in the description of a device or machine."""

Shape = Mapping[Any, Any] | list[Any] | Callable[[Any], bool]
"""A predicate whose docstring describes valid values, a list of one shape, or a mapping from keys to shapes. Other
keys have the shape of `...`, and are kept unchanged if there is none.
"""


def text(value: Any) -> bool:
    """a text"""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """true or false"""
    return isinstance(value, bool)


def number(value: Any) -> TypeGuard[float]:
    """a number that measures something"""
    # An int may be too large for a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def count(value: Any) -> bool:
    """a whole number from 0 on"""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def positive(value: Any) -> bool:
    """a whole number from 1 on"""
    return count(value) and value > 0


def blocks(value: Any) -> bool:
    """a whole number from 1 to 1,048,576"""
    return positive(value) and value <= 1 << 20


def sign(value: Any) -> bool:
    """-1, 0 or 1"""
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= 1


def scalar(value: Any) -> bool:
    """a text, a number, true, false or null"""
    return value is None or isinstance(value, (str, bool)) or number(value)


def option(value: Any) -> bool:
    """the value of an option"""
    if isinstance(value, Mapping):
        return all(map(option, value.values()))
    return all(map(option, value)) if isinstance(value, list) else scalar(value)


def fact(value: Any) -> bool:
    """a text, a number, true, false or null, or some of these in a list"""
    return scalar(value) or (isinstance(value, list) and len(value) <= MOST_FACTS and all(map(scalar, value)))


def rule(value: Any) -> bool:
    """an expression as text"""
    return isinstance(value, str) or (isinstance(value, Mapping) and text(value.get("callable")))


_DEVICES = {
    "count": count,
    "used": count,
    "per_host": count,
    "memory_mib": number,
    "type": text,
    "name": text,
    ...: fact,
}
_ENVIRONMENT = {
    "versions": {...: text},
    "host": {"cores": count, ...: fact},
    "devices": _DEVICES,
}
_KNOB = {
    "name": text, "type": text, "values": [scalar], "default": scalar, "low": number, "high": number, "step": number,
    "powers_of_two": flag, "when": rule, "help": text, "others": [scalar], "monotone_memory": sign,
}  # fmt: skip
_ASKED = {
    "model": text,
    "name": text,
    "workload": {"optimizer": {"class": text, ...: option}, ...: text},
    "shape": {
        "family": text,
        "layers": blocks,
        "hidden": positive,
        "heads": positive,
        "kv_heads": positive,
        "head_dim": positive,
        "intermediate": positive,
        "vocabulary": positive,
        "positions": count,
        "tied": flag,
        "activation": text,
        "norm_eps": number,
        "dropout": number,
        "attention_dropout": number,
        "attention_bias": flag,
        "mlp_bias": flag,
        "window": count,
        "experts": count,
        "expert_intermediate": positive,
        "experts_per_token": count,
        "shared_experts": count,
        "dense_layers": count,
        "q_lora_rank": count,
        "kv_lora_rank": count,
        "rope_head_dim": count,
        "v_head_dim": positive,
        "parallel_residual": flag,
        "rope": {"rope_theta": number, "partial_rotary_factor": number, "factor": number, "rope_type": text},
    },
    "space": {
        "knobs": [_KNOB],
        "derived": [{"name": text, "value": rule, "help": text}],
        "constraints": [{"require": rule, "reason": text}],
    },
    "devices": _DEVICES,
    "seq_len": count,
    "global_batch": count,
    "memory_limit_mib": number,
    "rank_memory_mib": number,
    "sampler": text,
    "seed": count,
    "runner": text,
    "trial_timeout_s": number,
    "first_trial": text,
    "simulated": flag,
    "emulated": flag,
    "lossy": {...: [scalar]},
    "request": {...: option},
}
REQUEST: Shape = {
    "format": count,
    "run": text,
    "study": text,
    "storage": text,
    "created": text,
    "asked": _ASKED,
    "environment": _ENVIRONMENT,
    "resumed": [{"at": text, "versions": {...: text}, "changes": [text]}],
}
"""run.yaml."""


_WINNER = {
    "trial": count,
    "role": text,
    "devices": count,
    "configuration": {...: scalar},
    "sampler": text,
    "throughput": number,
    "unit": text,
    "prediction": {"throughput": number, "unit": text, "memory_mib": number, ...: scalar},
}
BEST: Shape = {
    "simulated": flag,
    "emulated": flag,
    "best": _WINNER,
    "best_exact": _WINNER,
    "default": _WINNER,
    "alternatives": [_WINNER],
    "trains": _ASKED,
    "why": text,
    "stopped": text,
    "gain": number,
    "gain_interval": [number],
    "seconds_again": number,
    "trials": {...: count},
    "environment": _ENVIRONMENT,
    "reproduce": text,
}
"""best.yaml, and a plan of `redline estimate`, whose alternatives have roles and devices."""


def read_mapping(folder: Path, name: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file of a folder.

    Raises:
        FileNotFoundError: the file does not exist.
        StudyError: it cannot be read, or contains something else.
    """
    try:
        document = parse_yaml(read_inside(folder.resolve(), name, at_most=LARGEST_DOCUMENT))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StudyError(f"'{folder / name}' cannot be read: {error.strerror or error}") from error
    except Malformed as error:
        raise StudyError(f"'{folder / name}' is damaged: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(document, dict):
        raise StudyError(f"'{folder / name}' is damaged: it must be a mapping")
    return document


def read_document(folder: Path, name: str, problems: list[str]) -> dict[str, Any] | None:
    """Returns the mapping in a YAML file of a folder; None if it does not exist. Damage is added to `problems`."""
    try:
        return read_mapping(folder, name)
    except FileNotFoundError:
        return None
    except StudyError as error:
        problems.append(str(error).replace(f"'{folder / name}'", name) + "; left out")
        return None


def clean(document: Any, shape: Shape, name: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the valid parts of a document, and the invalid ones in words. A null is valid; it is left out if a
    mapping or list is expected.
    """
    faults: list[str] = []
    cleaned = _clean(document, shape, "", faults)
    remainder = [f"and {len(faults) - MOST_LISTED} more parts"] if len(faults) > MOST_LISTED else []
    return cleaned, [f"{name}: {fault}; left out" for fault in [*faults[:MOST_LISTED], *remainder]]


_BAD = object()


def _clean(value: Any, shape: Shape, location: str, faults: list[str]) -> Any:
    if value is None:
        return _BAD if isinstance(shape, (Mapping, list)) else None
    if isinstance(shape, Mapping):
        if isinstance(value, Mapping):
            entries = {
                key: _clean(element, inner, f"{location}.{key}".lstrip("."), faults)
                if (inner := shape.get(key, shape.get(...))) is not None
                else element
                for key, element in value.items()
            }
            return {key: element for key, element in entries.items() if element is not _BAD}
        expected = "a mapping"
    elif isinstance(shape, list):
        if isinstance(value, list):
            elements = [_clean(item, shape[0], f"{location}[{index}]", faults) for index, item in enumerate(value)]
            return [item for item in elements if item is not _BAD]
        expected = "a list"
    elif shape(value):
        return value
    else:
        expected = shape.__doc__ or "a valid value"
    faults.append(f"{location} is {shortened(value)}, not {expected}")
    return _BAD


def shortened(value: Any) -> str:
    """Returns a value for a message about it, shortened."""
    if isinstance(value, (Mapping, list, tuple)):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(value):,}"
    shown_value = "a huge number" if isinstance(value, int) and abs(value) >= 10**30 else repr(value)
    return shown_value if len(shown_value) <= 60 else f"{shown_value[:59]}…"
