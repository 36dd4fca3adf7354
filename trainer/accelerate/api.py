"""`redline.accelerate`: runs the user's own training loop in any configuration, from its strategy or found by the estimate."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base.device import detect
from ...base.errors import StudyError, UsageError, WorkloadError, unknown
from ...base.reading import path_of
from ...knobs.strategy import BLOCK_KNOBS, STANDARD, Strategy
from ...models import Workload
from ...models.spaces import make_space
from ...space import Config, Knob
from ...tuner.budget import parse_memory
from ..listener import devices_text
from ..planning import Planned, adapted, plan, with_samples_of
from ..ranks import RankPlace, decide_once, place
from ..request import read_source
from .arguments import ModelArguments, Resolved, resolve_arguments
from .optimisations import NEUTRAL, Followed, follow

if TYPE_CHECKING:
    import torch

    from ...training import Training
    from .prepared import Info, Loader, PreparedModel, PreparedOptimizer


@dataclass(frozen=True, kw_only=True)
class StrategyRequest:
    """Arguments of `redline.accelerate` that decide on a configuration, apart from the model."""

    strategy: Any = None
    memory_limit_mib: float | None = None
    fix: Mapping[str, Any] | None = None
    global_batch: int | None = None
    """Samples of a step, if they were given; the workload may have those of its default."""


def decide(workload: Workload, request: StrategyRequest, size: int) -> Planned:
    """Returns the configuration for all ranks, `size` of them.

    Raises:
        UsageError: the strategy is invalid, or cannot be followed here.
        NothingFound: no configuration fits.
    """
    strategy = request.strategy
    if strategy is None:
        return _planned(workload, request, size)
    if isinstance(strategy, Mapping):
        return _from_mapping(workload, strategy, request, size)
    if isinstance(strategy, (list, tuple)):
        return _followed(workload, follow(strategy, size), request, size)
    if not isinstance(strategy, (str, Path)):
        raise UsageError(
            "strategy must be a run's folder, a best.yaml, a configuration as a dict, or a list of optimisations, but got a "
            f"{type(strategy).__name__}"
        )
    path = path_of(strategy)
    if not path.exists() or (path.is_file() and path.suffix not in (".yaml", ".yml")):
        raise UsageError(
            f"there is no strategy '{strategy}': give a run's folder, a best.yaml, or a list of optimisations, which json.load "
            "reads from a file"
        )
    return _of_run(workload, path, request, size)


def _of_run(workload: Workload, path: Path, request: StrategyRequest, size: int) -> Planned:
    source = read_source(path, of_model=False)
    if source.config is None:
        raise StudyError(f"'{path}' names no configuration: it is neither a run's folder nor a best.yaml")
    trained = workload if request.global_batch is not None else with_samples_of(workload, source.config)
    if source.devices in (None, size) and request.memory_limit_mib in (None, source.limit_mib):
        of = f"the winner of '{path}'"
        nearest = adapted(trained, source.config, detect(), devices=size, fixed=request.fix or {}, of=of)
        return replace(nearest, predicted=source.predicted if nearest.config == source.config else None)
    planned = _planned(trained, request, size, like=source.config)
    return replace(planned, why=f"replanned after '{path}', which is for {source.devices} devices: {planned.why}")


def _from_mapping(workload: Workload, config: Mapping[str, Any], request: StrategyRequest, size: int) -> Planned:
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
    return Planned(config=Config(chosen), why="the configuration that was given")


def _followed(workload: Workload, optimisations: Followed, request: StrategyRequest, size: int) -> Planned:
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


def _planned(workload: Workload, request: StrategyRequest, size: int, like: Config | None = None) -> Planned:
    return plan(
        workload,
        devices=size,
        memory_limit_mib=request.memory_limit_mib,
        like=like,
        fixed=request.fix or {},
    )


KNOBS = (*STANDARD, *BLOCK_KNOBS)
"""The standard knobs, whether or not they vary on the devices at hand."""


class Accelerated(NamedTuple):
    """Objects that a training loop works with."""

    model: "PreparedModel"
    """`loss = model(**batch)`: the mean loss over the global batch."""
    optimizer: "PreparedOptimizer"
    """`optimizer.step()`."""
    loader: "Loader"
    """Batches of this replica, one per optimizer step."""
    info: "Info"
    """The configuration, and operations on all ranks together."""


def accelerate(
    model: Any,
    dataset: Any = None,
    *,
    strategy: Any = None,
    devices: int | None = None,
    memory_limit: str | float | None = None,
    fix: Mapping[str, Any] | None = None,
    optimizer: "Callable[..., torch.optim.Optimizer] | None" = None,
    loss: "Callable[[Any, Any], torch.Tensor] | None" = None,
    clip: float | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    lora: str | None = None,
    weights: str | Path | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    cache: str | Path = "redline-data",
) -> Accelerated:
    """A model, an optimizer and batches for a training loop of your own, in the fastest configuration or a given one.

        model, optimizer, loader, info = redline.accelerate(model, dataset, strategy="best.yaml")
        for batch in loader:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The loop is the same in every configuration, including pipelines and gradient accumulation: each iteration is an
    optimizer step of the global batch. Call it with the same arguments on every rank that torchrun has started, or in
    a single process. Without a strategy, rank 0 finds a configuration before any rank touches a device, and sends it
    to the others.

    Args:
        model: a model's name or folder, a Workload, a torch module (its weights are kept; all ranks get those of rank
            0), or a class or function that builds one (initialized from the seed).
        dataset: a map-style data set of dicts or tuples (torch's, Hugging Face's, a list), or files as `redline train`
            reads them: paths, or a `DataPlan`. None for the workload's own data.
        strategy: a run's folder, a best.yaml, a configuration as a dict, or a list of optimisations in
            ATorch's format such as `["zero2", ("amp_native", {"dtype": "bf16"}), "checkpoint"]`; None for the estimate's best.
        devices: number of devices; must equal the number of ranks that were started.
        memory_limit: memory of a device that the estimate may use, MiB or as in `8GiB`.
        fix: values of knobs that override the strategy.
        optimizer: makes the optimizer of the parameters, such as `functools.partial(torch.optim.AdamW, lr=3e-4)`; None
            for the workload's, or AdamW.
        loss: `loss(output, batch)`, the mean over a batch; None for the model's own loss.
        clip: largest norm of all gradients together; None for no limit.
        global_batch: samples of an optimizer step over all ranks; None for the model's default.
        seq_len: tokens of a sample; None for the model's default, or the length of the data set's samples.
        lora: train adapters only, such as `r=16`, of a model given by name.
        weights: a checkpoint of another tool to start from, of a model given by name.
        collate: makes a batch of a list of samples of the data set; None stacks them.
        shuffle: whether each epoch has its own order.
        seed: seed of the order, of dropout, and of new weights.
        cache: folder for the tokens of files.

    Raises:
        UsageError: an argument has an unsupported type or value, or contradicts the ranks.
        NothingFound: no configuration fits; the message says what would.
    """
    here = place()
    if devices is not None and devices != here.size:
        started = "this is the only process" if here.size == 1 else f"{here.size} ranks were started"
        raise UsageError(
            f"devices={devices}, but {started}: start the script by `torchrun --nproc-per-node {devices}` (fewer on "
            "each of several hosts), or leave devices out"
        )
    arguments = ModelArguments(
        model=model, dataset=dataset, loss=loss, optimizer=optimizer, global_batch=global_batch, seq_len=seq_len, lora=lora,
        collate=collate, shuffle=shuffle, seed=seed, cache=cache,
    )  # fmt: skip
    resolved = resolve_arguments(arguments)
    request = StrategyRequest(
        strategy=strategy, memory_limit_mib=parse_memory(memory_limit), fix=fix, global_batch=global_batch,
    )  # fmt: skip
    decision, device, group = decide_once(here, lambda: decide(resolved.workload, request, here.size))
    return _prepared(resolved, decision, here, device, group, arguments, clip, weights)


def _prepared(
    resolved: Resolved,
    decision: Planned,
    here: RankPlace,
    device: "torch.device",
    group: "torch.distributed.ProcessGroup | None",
    arguments: ModelArguments,
    clip: float | None,
    weights: str | Path | None,
) -> Accelerated:
    from ...schedule.parallel.experts import expect_unequal_tokens
    from ...training import Training
    from ..data import FromWorkload
    from .prepared import Info, Loader, PreparedModel, PreparedOptimizer, Steps

    if resolved.module is not None and group is not None:
        _broadcast(resolved.module, group)
    training = Training(
        resolved.workload,
        decision.config,
        device,
        seed=arguments.seed,
        rank=here.rank,
        world_size=here.size,
        own_data=False,
    )
    # The loop may pad, or cut, the samples of each rank to a length of their own.
    expect_unequal_tokens(training.model)
    from_weights = _begin(training, resolved, weights)
    samples = resolved.samples
    if isinstance(
        samples, FromWorkload
    ):  # as in dry runs, even if the samples of a step were chosen with the configuration
        samples = FromWorkload(resolved.workload, seed=arguments.seed, samples_per_step=training.samples_per_step)
    steps = Steps(training, samples, clip)
    loader = Loader(steps, samples)
    info = Info(
        steps, loader, why=decision.why, notes=decision.notes, predicted=decision.predicted, group=group,
        from_weights=from_weights,
    )  # fmt: skip
    return Accelerated(PreparedModel(steps), PreparedOptimizer(steps), loader, info)


def _begin(training: "Training", resolved: Resolved, weights: str | Path | None) -> frozenset[str]:
    """Loads weights that the model's constructor does not set. Returns the names of frozen ones among `weights`."""
    from ...models.architecture import Architecture
    from ...models.layouts.hugging_face import find_weights
    from ..checkpoint.state import State

    if weights is not None:
        architecture = resolved.workload.model
        if not isinstance(architecture, Architecture) or resolved.module is not None:
            raise WorkloadError(
                f"weights={str(weights)!r} goes with a Hugging Face model given by its name; load them into your module, whose "
                "weights are kept"
            )
        initial = find_weights(str(weights), architecture)
        State(training).load_weights(initial)
        return frozenset(training.outline.frozen) & initial.tensors.keys()
    if resolved.module is not None and resolved.loads:
        State(training).load_weights(_of_module(resolved.module))
    return frozenset()


def _of_module(module: "torch.nn.Module") -> Any:
    """Returns a module's weights by name."""
    from ...models.layouts.weights import LazyTensor, Weights

    def stored(tensor: "torch.Tensor") -> LazyTensor:
        return LazyTensor(lambda box: tensor.detach()[box].cpu(), tensor.shape, tensor.dtype)

    return Weights({name: stored(tensor) for name, tensor in module.state_dict().items()})


def _broadcast(module: "torch.nn.Module", group: Any) -> None:
    """Copies the weights of rank 0 to all ranks, in place."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            host = tensor.detach().cpu().contiguous()
            dist.broadcast(host, src=0, group=group)
            tensor.copy_(host)
