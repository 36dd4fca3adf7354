"""Choice of the configuration for the user's own loop: from its strategy, or by a search."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...base.device import detect
from ...base.errors import StudyError, UsageError, unknown
from ...base.reading import path_of
from ...knobs.strategy import BLOCK_KNOBS, STANDARD, Strategy
from ...models import Workload
from ...models.spaces import make_space
from ...space import Config, Knob
from ..listener import devices_text
from ..planning import adapted, plan, with_samples_of
from ..ranks import RankPlace
from ..strategy import read_source
from .optimisations import NEUTRAL, Followed, follow, read_list


@dataclass(frozen=True, kw_only=True)
class StrategyRequest:
    """Arguments of `redline.accelerate` that decide on a configuration, apart from the model."""

    strategy: Any = None
    trials: int = 0
    memory_limit_mib: float | None = None
    fix: Mapping[str, Any] | None = None
    global_batch: int | None = None
    """Samples of a step, if they were given; the workload may have those of its default."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Decision of rank 0, which is sent to the other ranks."""

    config: Config
    why: str
    """Reason for this configuration, in a sentence."""
    predicted: float | None = None
    """Throughput, measured or estimated; None if unknown."""
    notes: tuple[str, ...] = ()
    """Parts of the strategy that are not followed."""


def decide(workload: Workload, request: StrategyRequest, here: RankPlace, local_ranks: int) -> Decision:
    """Returns the configuration for all ranks.

    Raises:
        UsageError: the strategy is invalid, or cannot be followed here, or dry runs would need other hosts.
        NothingFound: no configuration fits.
    """
    if request.trials and here.size > local_ranks:
        raise UsageError(
            f"trials={request.trials} needs the devices of other hosts, but this rank reaches only {local_ranks} of {here.size}: "
            "search first with `redline tune`, then give strategy='best.yaml'"
        )
    strategy = request.strategy
    if strategy is None:
        return _planned(workload, request, here.size)
    if isinstance(strategy, Mapping):
        return _from_mapping(workload, strategy, request, here.size)
    if isinstance(strategy, (list, tuple)):
        return _followed(workload, follow(strategy, here.size), request, here.size)
    if not isinstance(strategy, (str, Path)):
        raise UsageError(
            "strategy must be a run's folder, a best.yaml, a configuration as a dict, or a list or file of optimisations, but "
            f"got a {type(strategy).__name__}"
        )
    path = path_of(strategy)
    if not path.exists():
        raise UsageError(
            f"there is no strategy '{strategy}': give a run's folder, a best.yaml, or a list of optimisations"
        )
    if path.is_file() and path.suffix not in (".yaml", ".yml"):
        return _of_file(workload, path, request, here.size)
    return _of_run(workload, path, request, here.size)


def _of_run(workload: Workload, path: Path, request: StrategyRequest, size: int) -> Decision:
    source = read_source(path, of_model=False)
    if source.config is None:
        raise StudyError(f"'{path}' names no configuration: it is neither a run's folder nor a best.yaml")
    trained = workload if request.global_batch is not None else with_samples_of(workload, source.config)
    if source.devices in (None, size) and request.memory_limit_mib in (None, source.limit_mib):
        of = f"the winner of '{path}'"
        nearest = adapted(trained, source.config, detect(), devices=size, fixed=request.fix or {}, of=of)
        predicted = source.predicted if nearest.config == source.config else None
        return Decision(config=nearest.config, why=nearest.why, predicted=predicted)
    planned = _planned(trained, request, size, like=source.config)
    return replace(planned, why=f"replanned after '{path}', which is for {source.devices} devices: {planned.why}")


def _of_file(workload: Workload, path: Path, request: StrategyRequest, size: int) -> Decision:
    content = read_list(path)
    if isinstance(content, Mapping):
        return _from_mapping(workload, content.get("configuration", content), request, size)
    return _followed(workload, follow(content, size), request, size)


def _from_mapping(workload: Workload, config: Mapping[str, Any], request: StrategyRequest, size: int) -> Decision:
    """Returns the given configuration. A workload with its own space knows its knobs itself.

    Raises:
        UsageError: a knob is unknown, or its samples of a step are not the requested global batch.
    """
    for name in config:
        if name not in KNOBS and workload.space is None:
            raise UsageError(unknown("knob", name, KNOBS))
    chosen = {**config, **(request.fix or {})}
    if request.global_batch is not None and "micro_batch" in chosen and "grad_accum" in chosen:
        strategy = Strategy.of(chosen, devices=size)
        samples = strategy.micro_batch * strategy.grad_accum * strategy.dp
        if samples != request.global_batch:
            raise UsageError(
                f"micro_batch * grad_accum * dp is {samples} in the configuration, but global_batch is {request.global_batch}: "
                "leave one of them out"
            )
    return Decision(config=Config(chosen), why="the configuration that was given")


def _followed(workload: Workload, optimisations: Followed, request: StrategyRequest, size: int) -> Decision:
    """Plans the knobs that a list of optimisations leaves open, such as the micro-batch."""
    space = make_space(workload, detect(), size)
    fixed, notes = dict(request.fix or {}), list(optimisations.notes)
    requested = {name: value for name, value in optimisations.knobs.items() if value != NEUTRAL.get(name)}
    for name, value in optimisations.knobs.items():
        if name in space.by_name:
            if name not in fixed:
                fixed[name] = _checked_value(space.by_name[name], value, workload, size)
        elif name in requested:
            notes.append(
                f"{name}={json.dumps(value)} is not followed: {workload.name} has no such knob on {size} devices"
            )
    planned = _planned(workload, replace(request, fix=fixed), size)
    degrees = " ".join(f"{name}={planned.config[name]}" for name in ("tp", "pp", "dp") if name in planned.config)
    notes += [
        f"{name}={json.dumps(value)} is not followed: it has no effect with {degrees}"
        for name, value in requested.items()
        if name in space.by_name and name not in planned.config
    ]
    return replace(planned, why=f"the list of optimisations; {planned.why}", notes=tuple(notes))


def _checked_value(knob: Knob, value: Any, workload: Workload, size: int) -> Any:
    """Returns the value of a knob that a list of optimisations requires.

    Raises:
        UsageError: the knob does not have this value here; the message lists its values.
    """
    if knob.others is not None and value not in (*knob.values, *knob.others):
        instead = ", as by ('amp_native', {'dtype': 'bf16'})" if knob.name == "precision" else ""
        raise UsageError(
            f"the list of optimisations requires {knob.name}={json.dumps(value)}, which {workload.name} cannot have on "
            f"{devices_text(size)} of this kind; name another one{instead}. There are: {', '.join(map(str, knob.values))}"
        )
    return value


def _planned(workload: Workload, request: StrategyRequest, size: int, like: Config | None = None) -> Decision:
    planned = plan(
        workload,
        devices=size,
        memory_limit_mib=request.memory_limit_mib,
        like=like,
        trials=request.trials,
        fixed=request.fix or {},
        seed=request.seed,
    )
    measured = next((trial.throughput for trial in planned.trials if trial.config == planned.config and trial.ok), None)
    estimated = None if planned.estimate is None else planned.estimate.throughput
    return Decision(config=planned.config, why=planned.why, predicted=measured if measured is not None else estimated)


KNOBS = (*STANDARD, *BLOCK_KNOBS)
"""The standard knobs, whether or not they vary on the devices at hand."""
