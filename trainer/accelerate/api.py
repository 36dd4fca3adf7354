"""`redline.accelerate`: runs the user's own training loop in any configuration."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base.errors import UsageError, WorkloadError
from ...tuner.budget import parse_memory
from ..ranks import JoinedRanks, decide_once, place
from .arguments import ModelArguments, Resolved, resolve_arguments
from .decision import Decision, StrategyRequest, decide

if TYPE_CHECKING:
    import torch

    from ...training import Training
    from .prepared import Info, Loader, PreparedModel, PreparedOptimizer


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
    trials: int = 0,
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
        strategy: a run's folder, a best.yaml, a configuration as a dict, or a list or file of optimisations in
            ATorch's format such as `["zero2", ("amp_native", {"dtype": "bf16"}), "checkpoint"]`; None for a search.
        devices: number of devices; must equal the number of ranks that were started.
        trials: dry runs of the search, on this host; 0 uses the estimate's best.
        memory_limit: memory of a device that the search may use, MiB or as in `8GiB`.
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
        strategy=strategy, trials=trials, memory_limit_mib=parse_memory(memory_limit), fix=fix, global_batch=global_batch,
        seed=seed,
    )  # fmt: skip
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", here.size))
    decision, joined = decide_once(here, lambda: decide(resolved.workload, request, here, local_ranks))
    return _prepared(resolved, decision, joined, arguments, clip, weights)


def _prepared(
    resolved: Resolved,
    decision: Decision,
    joined: JoinedRanks,
    arguments: ModelArguments,
    clip: float | None,
    weights: str | Path | None,
) -> Accelerated:
    from ...schedule.parallel.experts import expect_unequal_tokens
    from ...training import Training
    from ..data import FromWorkload
    from .prepared import Info, Loader, PreparedModel, PreparedOptimizer, Steps

    if resolved.module is not None and joined.group is not None:
        _broadcast(resolved.module, joined.group)
    training = Training(
        resolved.workload,
        decision.config,
        joined.device,
        seed=arguments.seed,
        rank=joined.place.rank,
        world_size=joined.place.size,
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
        steps, loader, why=decision.why, notes=decision.notes, predicted=decision.predicted, group=joined.group,
        from_weights=from_weights,
    )  # fmt: skip
    return Accelerated(PreparedModel(steps), PreparedOptimizer(steps), loader, info)


def _begin(training: "Training", resolved: Resolved, weights: str | Path | None) -> frozenset[str]:
    """Loads weights that the model's constructor does not set. Returns the names of frozen ones among `weights`."""
    from ...models.architecture import Architecture
    from ...models.layouts.find import find_weights
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
    from ...models.layouts.lazy import LazyTensor
    from ...models.layouts.weights import Weights

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
