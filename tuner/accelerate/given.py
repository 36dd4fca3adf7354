"""Converts a name, a workload, a built module or a module's builder to a workload."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import UsageError, WorkloadError
from ...models import Workload
from ...models.architecture import Architecture, from_configuration
from ...models.batches import batch_slice, entries
from ...models.data import Task
from ...models.families import schedule_of
from ...models.huggingface import hugging_face
from ...models.resolve import workload as resolve_workload
from ...models.skeleton import skeleton
from ...models.workload import DEFAULT_GLOBAL_BATCH, Batch
from ...training.data import DataPlan, FromDataset, TrainingData, training_data

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Arguments of `redline.accelerate` that describe the model and its data."""

    model: Any
    """Name, Workload, module, or builder of a module."""
    dataset: Any = None
    """Data set, files, or None."""
    loss: "Callable[[Any, Any], torch.Tensor] | None" = None
    """`loss(output, batch)`; None for the model's own loss."""
    optimizer: "Callable[..., torch.optim.Optimizer] | None" = None
    """Makes the optimizer of the parameters; None for AdamW."""
    global_batch: int | None = None
    """Samples of a step; None for the model's default."""
    seq_len: int | None = None
    """Tokens of a sample; None for the model's default, or the length of the data set's samples."""
    lora: str | None = None
    """Adapters to train; None trains all weights."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples of a data set; None stacks them."""
    shuffle: bool = True
    """True if each epoch has its own order."""
    seed: int = 0
    """Seed of the order, of new weights, and of dropout."""
    cache: str | Path = "redline-data"
    """Folder for tokens of files."""

    def __post_init__(self) -> None:
        import torch

        if isinstance(self.optimizer, torch.optim.Optimizer):
            kind = type(self.optimizer).__name__
            raise UsageError(
                f"optimizer is a {kind} that is built already, of parameters that are not those that will be trained: pass what "
                f"builds it, such as optimizer=functools.partial(torch.optim.{kind}, lr=...)"
            )


@dataclass(frozen=True, kw_only=True)
class Given:
    """Workload and samples of the training."""

    workload: Workload
    samples: TrainingData
    module: "nn.Module | None" = None
    """A built module whose weights on rank 0 are copied to all ranks; None if weights are initialized from the seed."""
    loads: bool = False
    """True if each rank loads its part of these weights when the model is built in its configuration; otherwise the
    model is a copy of the module.
    """


def given(asked: Asked) -> Given:
    """Converts the arguments to a workload and its samples.

    Raises:
        UsageError: the type of the model or of the data is not supported.
    """
    from torch import nn

    module = asked.model if isinstance(asked.model, nn.Module) else None
    if module is None and not isinstance(asked.model, (str, Path, Workload)):
        workload = _of_builder(asked)
    elif module is not None:
        workload = _of_module(asked, module)
    else:
        workload = _with_choices(asked, _named(asked))
    samples = _samples(asked, workload)
    if isinstance(samples, FromDataset):
        workload = _with_data(workload, samples)
    return Given(workload=workload, samples=samples, module=module, loads=isinstance(workload.model, Unfrozen))


@dataclass(frozen=True, kw_only=True)
class Unfrozen(Architecture):
    """Architecture of a built module, with the same parameters frozen."""

    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained."""

    def __call__(self, config: Mapping[str, Any]) -> "nn.Module":
        """Builds the model, see `Architecture`."""
        made = super().__call__(config)
        for name, param in made.named_parameters(remove_duplicate=False):
            if name in self.frozen:
                param.requires_grad_(False)
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class Copied:
    """Builds copies of a module."""

    module: "nn.Module"

    def __call__(self) -> "nn.Module":
        """Returns a copy with the module's weights."""
        return copy.deepcopy(self.module)


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """The first samples of a data set as a workload's batches. Dry runs and estimates time steps, so any samples will
    do.
    """

    batch: Batch
    task: Task | None = None
    """Task of a language model."""

    def __call__(self, size: int, seed: int) -> Batch:
        """Returns `size` samples, starting at a random one."""
        import torch

        parts = entries(self.batch)
        count = len(next(iter(parts.values())))
        numbers = (torch.arange(size) + seed) % count
        made = {name: each[numbers] for name, each in parts.items()}
        return made if isinstance(self.batch, Mapping) else tuple(made.values())  # type: ignore[return-value]


def _named(asked: Asked) -> Workload:
    if isinstance(asked.model, Workload) and asked.lora is None:
        return resolve_workload(asked.model, global_batch=asked.global_batch, seq_len=asked.seq_len)
    return resolve_workload(asked.model, seq_len=_length(asked), global_batch=asked.global_batch, lora=asked.lora)


def _of_module(asked: Asked, module: "nn.Module") -> Workload:
    """Returns the workload of a built module."""
    _refuse_lora(asked)
    architecture = _architecture(module)
    if architecture is not None:
        frozen = tuple(name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad)
        own = {each.name: getattr(architecture, each.name) for each in fields(architecture)}
        whole = _hugging_face(asked, module)
        return _with_choices(asked, replace(whole, model=Unfrozen(**own, frozen=frozen)))
    kind = type(module)
    shapes = {name: list(each.shape) for name, each in module.state_dict().items()}
    return _own(
        asked, Copied(module=module), kind.__name__, {"class": f"{kind.__module__}.{kind.__qualname__}", **shapes}
    )


def _of_builder(asked: Asked) -> Workload:
    """Returns the workload of a class or a function that builds the module."""
    if not callable(asked.model):
        raise UsageError(
            f"model must be a name, a Workload, a torch module, or what builds one, but got a {type(asked.model).__name__}"
        )
    _refuse_lora(asked)
    made = _own(asked, asked.model, getattr(asked.model, "__name__", type(asked.model).__name__), None)
    module = skeleton(made)
    if _architecture(module) is None:
        return made
    whole = _hugging_face(asked, module)
    return _with_choices(asked, replace(whole, model=asked.model, identity=None))


def _own(asked: Asked, build: Callable[..., "nn.Module"], name: str, identity: Mapping[str, Any] | None) -> Workload:
    if asked.dataset is None:
        raise UsageError(
            f"{name} is a module of your own: give a dataset to train it on, or a redline.Workload, which has data"
        )
    if isinstance(asked.dataset, (str, Path, DataPlan)) or _are_paths(asked.dataset):
        raise UsageError(
            f"{name} is a module of your own, for which files cannot be cut into samples: give a data set whose samples it takes"
        )
    return Workload(
        model=build,
        batch=lambda size, seed: (),  # replaced by the data set's batches
        loss=asked.loss,
        optimizer=asked.optimizer,
        name=name,
        global_batch=asked.global_batch if asked.global_batch is not None else DEFAULT_GLOBAL_BATCH,
        seq_len=_length(asked),
        identity=identity,
    )


def _hugging_face(asked: Asked, module: Any) -> Workload:
    return hugging_face(
        module.config,
        name=type(module).__name__,
        schedule=schedule_of(module.config.model_type),
        seq_len=_length(asked),
        global_batch=asked.global_batch,
    )


def _architecture(module: Any) -> Architecture | None:
    """Returns the architecture of a Hugging Face language model or image classifier; None for all other modules."""
    if not hasattr(type(module), "config_class") or not hasattr(module, "config"):
        return None
    try:
        found = from_configuration(module.config, type(module).__name__)
    except WorkloadError:  # of another task, which its own forward may support
        return None
    return found if type(module) is found.model_class else None


def _with_choices(asked: Asked, workload: Workload) -> Workload:
    if asked.loss is not None:
        workload = replace(workload, loss=asked.loss)
    return workload if asked.optimizer is None else replace(workload, optimizer=asked.optimizer)


def _refuse_lora(asked: Asked) -> None:
    if asked.lora is not None:
        raise UsageError(
            f"lora={asked.lora!r} goes with a model's name; put adapters into a module of your own by peft.get_peft_model"
        )


def _samples(asked: Asked, workload: Workload) -> TrainingData:
    dataset = asked.dataset
    if dataset is None:
        return training_data(DataPlan(seed=asked.seed), workload, Path(asked.cache))
    if isinstance(dataset, DataPlan):
        return training_data(dataset, workload, Path(asked.cache))
    if isinstance(dataset, (str, Path)) or _are_paths(dataset):
        paths = (dataset,) if isinstance(dataset, (str, Path)) else dataset
        plan = DataPlan(paths=tuple(map(str, paths)), seed=asked.seed, shuffle=asked.shuffle)
        return training_data(plan, workload, Path(asked.cache))
    task: Task | None = getattr(workload.batch, "task", None) if workload.loss is None else None
    return FromDataset(dataset, collate=asked.collate, task=task, shuffle=asked.shuffle, seed=asked.seed)


def _with_data(workload: Workload, samples: FromDataset) -> Workload:
    task: Task | None = getattr(workload.batch, "task", None)
    count = min(len(samples.dataset), max(2, workload.global_batch))
    whole = samples.collate([samples.dataset[number] for number in range(count)])
    batch: Batch = dict(whole) if isinstance(whole, Mapping) else tuple(whole)
    return replace(workload, batch=Examples(batch=batch_slice(batch, 0, count), task=task))


def _length(asked: Asked) -> int | None:
    """Tokens of a sample: the requested number, or the length of the first sample of the data set."""
    if asked.seq_len is not None or asked.dataset is None or isinstance(asked.dataset, (str, Path, DataPlan)):
        return asked.seq_len
    if _are_paths(asked.dataset):
        return None
    first = entries(FromDataset(asked.dataset, collate=asked.collate)(0, 1))
    ids = first.get("input_ids")
    return None if ids is None else int(ids.shape[1])


def _are_paths(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, (str, Path)) for each in value)
