"""Samplers, which choose the next configuration. They are found by name and imported on demand."""

from importlib import import_module
from inspect import signature
from typing import Any

from ...base.errors import UsageError, unknown
from ...space import Space
from .sampler import Sampler, StepwiseSampler

_SAMPLERS = {
    "bayes": ("bayes", "BayesSampler"),
    "random": ("plain", "RandomSampler"),
    "grid": ("plain", "GridSampler"),
    "tpe": ("optuna_samplers", "TPESampler"),
    "gp": ("optuna_samplers", "GPSampler"),
    "hebo": ("hebo", "HEBOSampler"),
}

__all__ = ["Sampler", "StepwiseSampler", "make_sampler", "sampler_names"]


def sampler_names() -> tuple[str, ...]:
    """Names that `make_sampler` accepts."""
    return tuple(_SAMPLERS)


def make_sampler(name: str, space: Space, seed: int = 0, **options: Any) -> Sampler:
    """Returns the named sampler over `space`; `options` are the arguments of its class.

    Raises:
        UsageError: the name or an option is unknown, or a value is out of range.
        MissingDependency: the sampler needs a package that is not installed.
    """
    if name not in _SAMPLERS:
        raise UsageError(unknown("sampler", name, _SAMPLERS))
    module, attribute = _SAMPLERS[name]
    cls = getattr(import_module(f".{module}", __name__), attribute)
    option_names = set(signature(cls).parameters) - {"space", "seed"}
    for option in options:
        if option not in option_names:
            raise UsageError(unknown(f"option of the sampler '{name}'", option, option_names))
    return cls(space, seed=seed, **options)
