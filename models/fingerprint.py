"""Digests that are equal in every process."""

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from types import CodeType
from typing import Any


def digest(value: Any) -> str:
    """Ten hex digits of the SHA-256 of the data's canonical JSON."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def of_callable(function: Any) -> Any:
    """Describes a callable by JSON-ready data: its source text (or its bytecode), defaults and closed-over values.

    Values that are not JSON-ready count only by their type.
    """
    if function is None:
        return None
    if isinstance(function, functools.partial):
        return [of_callable(function.func), _as_data(function.args), _as_data(function.keywords)]
    if inspect.ismethod(function):
        return [of_callable(function.__func__), _as_data(vars(function.__self__))]
    if inspect.isfunction(function):
        cells = [_as_data(_content(cell)) for cell in function.__closure__ or ()]
        return [_text(function), _as_data(function.__defaults__), _as_data(function.__kwdefaults__), cells]
    if inspect.isclass(function):
        return [function.__qualname__, _text(function)]
    return [_text(type(function)), _as_data(getattr(function, "__dict__", {}))]


def _text(object_: Any) -> str:
    try:
        return inspect.getsource(object_)
    except (OSError, TypeError):  # typed in a console, or made by exec
        code = getattr(object_, "__code__", None)
        return _code(code) if code is not None else f"{object_.__module__}.{object_.__qualname__}"


def _code(code: CodeType) -> str:
    constants = [_code(constant) if isinstance(constant, CodeType) else repr(constant) for constant in code.co_consts]
    return "/".join([code.co_name, code.co_code.hex(), *constants, *code.co_names, *code.co_varnames])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never assigned
        return None


def _as_data(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_as_data(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if inspect.isfunction(value) or inspect.isclass(value):
        return _text(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
