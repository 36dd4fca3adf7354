"""The command that a sweep of W&B states, as a template."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.errors import UsageError, unknown

_DEFAULT = ("${env}", "${interpreter}", "${program}", "${args}")
_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
_MACRO = re.compile(r"\$\{(.*)\}")
_BRACES = re.compile(r"\$\{[^}]*\}|[{}]")
_MACROS = (
    *("env", "interpreter", "program", "args", "args_no_equals", "args_no_hyphens", "args_no_boolean_flags"),
    *("args_json", "args_append_hydra", "args_override_hydra"),
)
_GOALS = {"minimize": "min", "maximize": "max"}


@dataclass(frozen=True)
class Parameter:
    """One of a sweep, nested ones by their path."""

    path: tuple[str, ...]
    knob: str
    values: tuple[Any, ...]
    """The first is the default; none where it is not carried over."""
    remark: str
    """How they were taken, or why they could not be."""


def command_of(document: Mapping[str, Any], parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The fields of a `redline.Command`.

    Raises:
        UsageError: it states no program, or a macro that no template can stand for.
    """
    chunks = document.get("command") or _DEFAULT
    if not isinstance(chunks, list | tuple):
        raise UsageError(f"the sweep's command must be a list, but is {chunks!r}")
    told = [each for each in parameters if each.values]
    words: list[str] = []
    for chunk in chunks:
        text = _VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), str(chunk))
        macro = _MACRO.fullmatch(text)
        words += [_literal(text)] if macro is None else _filled(macro[1], document, told)
    out: dict[str, Any] = {"command": words}
    metric = document.get("metric")
    if isinstance(metric, Mapping) and str(metric.get("name", "")).isidentifier():
        goal = str(metric.get("goal", "minimize"))
        if goal not in _GOALS:
            raise UsageError(f"the sweep's metric: {unknown('goal', goal, _GOALS)}")
        out |= {"metric": (str(metric["name"]),), "direction": _GOALS[goal]}
    return out


def _filled(macro: str, document: Mapping[str, Any], parameters: Sequence[Parameter]) -> list[str]:
    """What stands for a macro."""
    if macro == "env":
        return ["/usr/bin/env"]
    if macro == "interpreter":
        return ["python"]
    if macro == "program":
        if not isinstance(document.get("program"), str):
            raise UsageError("the sweep states no program; give a command with --command")
        return [_literal(document["program"])]
    if macro in ("args_json_file", "args_dict"):
        raise UsageError(
            f"the sweep's ${{{macro}}} is a file that W&B's agent writes; give a command with --command, and the file "
            "with --render"
        )
    if macro not in _MACROS:
        raise UsageError(f"the sweep's command: {unknown('macro', macro, _MACROS)}")
    tree = _tree(parameters)
    if macro == "args_json":
        return [_json(tree)]
    if macro == "args_no_boolean_flags":
        return [word for name, value in tree.items() for word in _without_false(name, value)]
    if macro == "args_no_equals":
        return [word for name, value in tree.items() for word in (f"--{_literal(name)}", _python(value))]
    sign = {"args": "--", "args_no_hyphens": "", "args_append_hydra": "+", "args_override_hydra": "++"}[macro]
    return [f"{sign}{_literal(name)}={_python(value)}" for name, value in tree.items()]


def _literal(text: str) -> str:
    """A text as templates have it."""
    return _BRACES.sub(lambda match: match[0] if match[0].startswith("$") else match[0] * 2, text)


def _tree(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Parameters by name, nested ones in mappings."""
    out: dict[str, Any] = {}
    for each in parameters:
        *parents, last = each.path
        at = out
        for name in parents:
            at = at.setdefault(name, {})
        at[last] = each
    return out


def _python(value: Any, inside: bool = False) -> str:
    """A value as Python writes it, which is how W&B passes it."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{_literal(repr(name))}: {_python(each, True)}" for name, each in value.items())
        return f"{{{{{pairs}}}}}"
    return f"{{{value.knob}!{'r' if inside else 's'}}}"


def _without_false(name: str, value: Any) -> list[str]:
    flags = not isinstance(value, dict) and all(isinstance(each, bool) for each in value.values)
    if not flags:
        return [f"--{_literal(name)}={_python(value)}"]
    if len(value.values) > 1:
        raise UsageError(
            f"the sweep's ${{args_no_boolean_flags}} leaves --{name} out where it is false, which no template can; give a "
            f"command with --command, with {{{value.knob}}} for its value"
        )
    return [f"--{_literal(name)}"] if value.values[0] else []


def _json(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{_literal(json.dumps(name))}: {_json(each)}" for name, each in value.items())
        return f"{{{{{pairs}}}}}"
    texts = [each for each in value.values if isinstance(each, str)]
    if any(json.dumps(each) != f'"{each}"' for each in texts) or None in value.values:
        raise UsageError(
            f"the sweep's ${{args_json}} cannot say {value.values} of {'.'.join(value.path)}; give a --command"
        )
    return f'"{{{value.knob}}}"' if texts else f"{{{value.knob}}}"
