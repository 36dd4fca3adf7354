"""W&B: the configuration of a sweep, with the command that it states.

How distributions are meant: https://docs.wandb.ai/models/sweeps/sweep-config-keys. How macros are filled in:
`create_sweep_command_args` in wandb/sdk/launch/sweeps/utils.py and `_command_run` in wandb/wandb_agent.py.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...base.errors import SpaceError
from .draft import Draft, identifiers, plain
from .format import Format
from .ranges import integers, normal, reals, rounded, stepped, tried
from .sweep_command import Parameter, command_of

_BESIDE = {
    **dict.fromkeys(("parameters", "program", "command"), ""),
    **dict.fromkeys(
        ("name", "description", "project", "entity", "apiVersion"), "it is W&B's own; --log-to wandb logs the trials"
    ),
    "early_terminate": "a candidate that is clearly slower is ended by redline's own rule",
    "run_cap": "--trials N bounds the search",
    "method": "",
    "metric": "",
}
_LARGEST = math.log(1e300)
_SAMPLERS = {"grid": "--sampler grid tries all", "random": "--sampler random draws at random"}


def parameters_of(document: Any) -> list[Parameter]:
    """The parameters of a sweep, with the values that are tried."""
    found = dict(_flat(document["parameters"]))
    names = identifiers(".".join(path) for path in found)
    out = []
    for path, spec in found.items():
        try:
            values, remark = _values(spec)
            values = plain(values)
        except (SpaceError, _Unusable) as error:
            values, remark = [], str(error)
        out.append(Parameter(path, names[".".join(path)], tuple(values), remark))
    return out


class _Unusable(ValueError):
    """A parameter that no knob can be; says why."""


def _recognises(document: Any) -> bool:
    found = document.get("parameters") if isinstance(document, Mapping) else None
    return isinstance(found, Mapping) and bool(found) and all(isinstance(each, Mapping) for each in found.values())


def _read(document: Any, draft: Draft) -> None:
    for each in parameters_of(document):
        shown = ".".join(each.path)
        if not each.values:
            draft.leave(shown, each.remark)
        elif draft.knob(shown, each.values, name=each.knob) and each.remark:
            draft.say(f"{shown}: {each.remark}")
    draft.leave_all(document, _BESIDE)
    if (method := str(document.get("method"))) in _SAMPLERS:
        draft.leave("method", f"it is {method}, and redline's own sampler proposes; {_SAMPLERS[method]}")
    metric = document.get("metric")
    if not isinstance(metric, Mapping):
        return
    draft.leave_all((key for key in metric if key not in ("name", "goal")), {"target": "the search goes on"}, "metric.")
    name = str(metric.get("name", ""))
    if name.isidentifier():
        draft.say(
            f"{name} is read of lines of JSON that are printed, or of redline.report; wandb.log alone is not seen"
        )
    else:
        draft.leave(f"metric.name {name}", "it is no identifier; --metric says how a number is read")


def _flat(parameters: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, spec in parameters.items():
        inner = spec.get("parameters") if isinstance(spec, Mapping) else None
        if isinstance(inner, Mapping):
            yield from _flat(inner, (*path, str(name)))
        else:
            yield (*path, str(name)), spec


def _values(spec: Any) -> tuple[list[Any], str]:
    """Values to try, and a word on them.

    Raises:
        _Unusable: there are none.
    """
    if not isinstance(spec, Mapping):
        raise _Unusable(f"a parameter is a mapping, but got {spec!r}")
    if "value" in spec:
        return [spec["value"]], ""
    if "values" in spec:
        if not isinstance(spec["values"], list) or not spec["values"]:
            raise _Unusable("its values must be a list")
        return spec["values"], "all values count alike here" if "probabilities" in spec else ""
    kind = str(spec.get("distribution") or _kind_of_bounds(spec))
    if kind not in _DISTRIBUTIONS:
        raise _Unusable(f"the distribution {kind} has no values to choose from here; --set gives some")
    numbers = _Numbers(spec)
    values = _DISTRIBUTIONS[kind](numbers)
    bounds = ", ".join(f"{key}={spec[key]}" for key in ("min", "max", "mu", "sigma", "q") if key in spec)
    step = {"int_uniform": 1, "q_uniform": numbers.step()}.get(kind)
    return values, tried(values, f"{kind} {bounds}", step)


def _kind_of_bounds(spec: Mapping[str, Any]) -> str:
    whole = all(type(spec.get(each)) is int for each in ("min", "max"))
    return "int_uniform" if whole else "uniform"


class _Numbers:
    """The numbers of a parameter by name, refused where they are none."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec

    def __call__(self, name: str, default: float | None = None) -> Any:
        given = self._spec.get(name, default)
        try:
            (number,) = plain([given])
        except SpaceError as error:
            raise _Unusable(f"{name}: {error}") from None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _Unusable(f"{name} must be a number, but is {given!r}")
        return number

    def between(self, least: float = -math.inf) -> tuple[Any, Any]:
        """`min` and `max`, of at least so much and in order."""
        low, high = self("min"), self("max")
        if not least < low <= high:
            raise _Unusable(
                f"min <= max must hold{', both above 0' if least == 0 else ''}, but got min={low}, max={high}"
            )
        return low, high

    def step(self) -> Any:
        """`q`."""
        step = self("q", 1)
        if step <= 0:
            raise _Unusable(f"q must be more than 0, but is {step}")
        return step


def _whole(numbers: _Numbers) -> list[Any]:
    low, high = numbers.between()
    return [*integers(math.ceil(low), math.floor(high))]


def _stepped(low: Any, high: Any, step: Any, *, log: bool = False) -> list[Any]:
    values = stepped(low, high, step, log=log)
    whole = all(type(each) is int for each in (low, high, step))
    return [int(each) for each in values] if whole else [*values]


def _logarithms(numbers: _Numbers) -> list[float]:
    low, high = numbers.between()
    if high > _LARGEST or low < -_LARGEST:
        raise _Unusable(
            f"min and max are logarithms, and e to {low} or {high} is beyond numbers; log_uniform_values takes values"
        )
    return reals(float(f"{math.exp(low):.3g}"), float(f"{math.exp(high):.3g}"), log=True)


def _normal(numbers: _Numbers) -> list[float]:
    return normal(numbers("mu", 0.0), numbers("sigma", 1.0))


def _log_normal(numbers: _Numbers) -> list[float]:
    if any(abs(each) > _LARGEST for each in _normal(numbers)):
        raise _Unusable("mu and sigma are of logarithms, and the values are beyond numbers")
    return [float(f"{math.exp(each):.3g}") for each in _normal(numbers)]


_DISTRIBUTIONS: Mapping[str, Callable[[_Numbers], list[Any]]] = {
    "int_uniform": _whole,
    "uniform": lambda numbers: [*reals(*numbers.between())],
    "q_uniform": lambda numbers: _stepped(*numbers.between(), numbers.step()),
    "log_uniform_values": lambda numbers: [*reals(*numbers.between(0), log=True)],
    "inv_log_uniform_values": lambda numbers: [*reals(*numbers.between(0), log=True)],
    "q_log_uniform_values": lambda numbers: _stepped(*numbers.between(0), numbers.step(), log=True),
    "log_uniform": _logarithms,
    "q_log_uniform": lambda numbers: rounded(_logarithms(numbers), numbers.step()),
    "normal": _normal,
    "q_normal": lambda numbers: rounded(_normal(numbers), numbers.step()),
    "log_normal": _log_normal,
    "q_log_normal": lambda numbers: rounded(_log_normal(numbers), numbers.step()),
}


def _command(document: Any) -> Mapping[str, Any]:
    return command_of(document, parameters_of(document))


FORMAT = Format(
    name="a W&B sweep",
    holds="parameters",
    recognises=_recognises,
    read=_read,
    command=_command,
)
