"""The first trial of a search, which the gain is measured against.

It is the default configuration, which corresponds to `transformers.Trainer`. If that is predicted not to fit, it is
the first configuration of `ladder` that is predicted to fit, as a person would find it by hand.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.errors import SpaceError, UsageError
from ..knobs.text import config_text
from ..models.spaces import TRAINER_MICRO_BATCH
from ..space import Config, Space
from ..space.knob import Knob

MICRO_BATCH = "micro_batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstTrial:
    """First trial of a search, and its fallback."""

    config: Config
    fallback: Config | None = None
    """Configuration with less memory to try if the first one fails; None if there is none."""
    note: str = ""
    """Reason why it is not the default configuration; empty if it is."""


def first_trial(space: Space, prior: Any = None, headroom: float = 0.0) -> FirstTrial:
    """Returns the default configuration, or its replacement if it is predicted not to fit.

    Args:
        space: what may vary.
        prior: prior of the search. Only an `Estimator` is used. With any other prior, and if it cannot predict, trial
            0 is the default configuration.
        headroom: share of memory to keep free.
    """
    from ..estimator import Estimator

    default = space.default()
    plain = FirstTrial(config=default, fallback=_smallest(space, default))
    if not isinstance(prior, Estimator):
        return plain
    room = (1.0 - headroom) * prior.memory_limit_mib
    try:
        (need,) = _needs(prior, [default])
        if need <= room:
            return plain
        below = [config for rung in ladder(space) for config in rung]
        needs = _needs(prior, below)
    except UsageError:  # the model cannot be traced; the next user of the estimate reports it
        return plain
    if not below:
        return plain
    fitting = np.flatnonzero(needs <= room)
    place = int(fitting[0]) if len(fitting) else int(np.argmin(needs))
    if needs[place] >= need:
        return plain
    chosen = below[place]
    less = (each for each, needed in zip(below[place + 1 :], needs[place + 1 :]) if needed < needs[place])
    smaller = _smallest(space, chosen)
    return FirstTrial(
        config=chosen,
        fallback=smaller if smaller not in (None, chosen) else next(less, None),
        note=_note(chosen, default, need, prior.memory_limit_mib, headroom, fits=bool(len(fitting))),
    )


def ladder(space: Space) -> Iterator[list[Config]]:
    """Yields what a person would try one after the other if the default configuration does not fit, one list per
    rung. Each rung keeps the changes of those before it, and goes from the Trainer's micro-batch down to the
    smallest.

    Rungs are ordered by their cost in speed, if the devices are there, and in manual work: a smaller micro-batch; half
    precision; ZeRO 2 and 3 (FSDP); recomputing every block (a third more arithmetic); tensor parallelism within a node
    (every block waits for its collectives); optimizer states in host memory; a pipeline (which has to be kept full);
    sequences cut over ranks. Lossy values are never tried.
    """
    chosen = _chosen(space, space.default())
    sizes = _numbers(space.by_name[MICRO_BATCH])[::-1] if MICRO_BATCH in chosen else []
    below = [size for size in sizes if size < chosen[MICRO_BATCH]]
    if smaller := _with_sizes(space, chosen, below):
        yield smaller
    usual = max(TRAINER_MICRO_BATCH, chosen.get(MICRO_BATCH, 0))
    below = [size for size in sizes if size <= usual]
    for name, value in _steps(space):
        changed = {**chosen, name: value}
        if chosen.get(name) != value and (rung := _with_sizes(space, changed, below)):
            chosen = changed
            yield rung


def _steps(space: Space) -> list[tuple[str, Any]]:
    """Changes of the ladder that the space offers, in order."""
    knobs = {knob.name: knob for knob in space.knobs if not knob.derived}

    def offered(name: str, wanted: Sequence[Any]) -> list[tuple[str, Any]]:
        return [(name, value) for value in wanted if name in knobs and value in knobs[name].values]

    def rising(name: str) -> list[tuple[str, Any]]:
        return [(name, value) for value in _numbers(knobs[name]) if value > 1] if name in knobs else []

    full = "precision" in knobs and knobs["precision"].default == "fp32"
    return [
        *(offered("precision", ("bf16", "fp16"))[:1] if full else ()),
        *offered("zero", (2, 3)),
        *offered("checkpoint_ratio", (1.0,)),
        *rising("tp"),
        *offered("offload", ("optimizer",)),
        *rising("pp"),
        *rising("sp"),
        *rising("cp"),
    ]


def _numbers(knob: Knob) -> list[int]:
    """Integers among a knob's values, ascending."""
    return sorted(value for value in knob.values if isinstance(value, int))


def _with_sizes(space: Space, chosen: Mapping[str, Any], sizes: Sequence[int]) -> list[Config]:
    """Valid configurations with these micro-batches; without that knob, the configuration itself."""
    points = [{**chosen, MICRO_BATCH: size} for size in sizes] if MICRO_BATCH in chosen else [chosen]
    found = [_config(space, point) for point in points]
    return list(dict.fromkeys(config for config in found if config is not None))


def _config(space: Space, chosen: Mapping[str, Any]) -> Config | None:
    """Returns the configuration with these values. Conditional knobs are left out if they make it invalid."""
    always = {name: value for name, value in chosen.items() if space.by_name[name].when is None}
    for values in (chosen, always):
        with suppress(SpaceError):
            return space.config(values)
    return None


def _smallest(space: Space, config: Config) -> Config | None:
    """The same configuration with the smallest micro-batch; None if that is not valid."""
    knob = space.by_name.get(MICRO_BATCH)
    if knob is None or knob.derived or MICRO_BATCH not in config:
        return None
    with suppress(SpaceError):
        return space.config({**_chosen(space, config), MICRO_BATCH: _numbers(knob)[0]})
    return None


def _chosen(space: Space, config: Config) -> dict[str, Any]:
    """The configuration without derived knobs."""
    return {knob.name: config[knob.name] for knob in space.knobs if not knob.derived and knob.name in config}


def _needs(estimator: Any, configs: Sequence[Config]) -> np.ndarray:
    """Predicted peak memory of the fullest rank, MiB; infinite for configurations that cannot run. Shape (n,)."""
    if not configs:
        return np.zeros(0)
    table = estimator.table(configs)
    return np.where(np.isfinite(table.step_ms), table.fullest_memory_mib, np.inf)


def _note(config: Config, default: Config, need_mib: float, limit_mib: float, headroom: float, *, fits: bool) -> str:
    derived = ("dp", "grad_accum")
    changed = {name: value for name, value in config.items() if name not in derived and default.get(name) != value}
    unit, by = ("GiB", 1024.0) if limit_mib >= 4096 else ("MiB", 1.0)
    digits = 0 if need_mib / by >= 100 else 1
    kept = "" if need_mib > limit_mib else f", of which {100 * headroom:g} % have to stay free"
    text = (
        f"trial 0 is {config_text(changed)}, otherwise the default configuration, because the default itself is predicted to "
        f"need {need_mib / by:,.{digits}f} of {limit_mib / by:,.{digits}f} {unit}{kept}"
    )
    either = "; it is not predicted to fit either, but needs the least of the configurations that one would try next"
    return text if fits else text + either
