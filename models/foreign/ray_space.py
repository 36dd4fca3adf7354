"""Ray Tune: a `param_space`, as `tune.Tuner` takes it; its objects are known by their types, without importing Ray.

How they are drawn: ray/tune/search/sample.py and variant_generator.py.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .draft import Draft, identifiers
from .format import Format
from .ranges import integers, normal, reals, rounded, stepped, tried

_MODULE = "ray.tune.search.sample"


def _kind(value: Any) -> str:
    """What a value is to Ray: the name of its domain's class, `grid`, or nothing for a constant."""
    if type(value).__module__ == _MODULE:
        return type(value).__name__
    if isinstance(value, Mapping) and len(value) == 1:
        return {"grid_search": "grid", "eval": "Function"}.get(next(iter(value)), "")
    return ""


def _recognises(document: Any) -> bool:
    return isinstance(document, Mapping) and any(_kind(value) for _, value in _flat(document))


def _flat(space: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in space.items():
        if isinstance(value, Mapping) and not _kind(value):
            yield from _flat(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _read(document: Any, draft: Draft) -> None:
    found = {".".join(path): value for path, value in _flat(document)}
    names = identifiers(found)
    for shown, value in found.items():
        kind = _kind(value)
        if kind == "Function":
            draft.leave(shown, "sample_from draws by a function, which has no values to choose from; --set gives some")
        elif kind == "grid" or kind == "Categorical":
            draft.knob(shown, list(value["grid_search"] if kind == "grid" else value.categories), name=names[shown])
        elif not kind:
            draft.knob(shown, [value], name=names[shown])
        else:
            _range(shown, names[shown], kind, value, draft)


def _range(shown: str, name: str, kind: str, domain: Any, draft: Draft) -> None:
    sampler = domain.get_sampler()
    step = getattr(sampler, "q", None)
    inner = sampler.get_sampler() if step is not None else sampler
    log = "LogUniform" in type(inner).__name__
    bounds = f"from {domain.lower} to {domain.upper}"
    if "Normal" in type(inner).__name__:
        values: list[Any] = normal(inner.mean, inner.sd)
        values = rounded(values, step) if step is not None else values
        said = tried(values, f"a normal distribution around {inner.mean}, of {inner.sd}")
    elif kind == "Integer":
        # Both bounds are meant where it is quantized by more than 1.
        last = domain.upper if step not in (None, 1) else domain.upper - 1
        step = step or 1
        values = [*integers(math.ceil(domain.lower / step) * step, last, step=step, log=log)]
        said = tried(values, f"integers {bounds}", step)
    elif kind == "Float" and math.isfinite(domain.lower) and math.isfinite(domain.upper):
        ends = domain.lower, domain.upper
        values = [*(reals(*ends, log=log) if step is None else stepped(*ends, step, log=log))]
        said = tried(values, f"{'loguniform' if log else 'uniform'} {bounds}", step)
    else:
        draft.leave(shown, f"{domain!r} has no values to choose from; --set gives some")
        return
    if draft.knob(shown, values, name=name) and said:
        draft.say(f"{shown}: {said}")


FORMAT = Format(
    name="a Ray Tune space",
    holds="tune.choice, tune.grid_search and their like",
    recognises=_recognises,
    read=_read,
)
