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
from ...models.data import GENERAL, Task
from ...models.huggingface import hugging_face_workload
from ...models.resolve import workload as resolve_workload
from ...models.skeleton import skeleton
from ...models.workload import DEFAULT_GLOBAL_BATCH, Batch
from ...training.training_data import TrainingData
from ..data import DataPlan, FromDataset, training_data

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Arguments of `redline.accelerate` that describe the model and its data, and are documented there."""

    model: Any
    dataset: Any = None
    loss: "Callable[[Any, Any], torch.Tensor] | None" = None
    optimizer: "Callable[..., torch.optim.Optimizer] | None" = None
    global_batch: int | None = None
    seq_len: int | None = None
    lora: str | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    seed: int = 0
    cache: str | Path = "redline-data"

    def __post_init__(self) -> None:
        import torch

        if isinstance(self.optimizer, torch.optim.Optimizer):
            kind = type(self.optimizer).__name__
            raise UsageError(
                f"optimizer is a {kind} that is built already, for parameters that are not those that will be trained: pass "
                f"a function that builds it, such as optimizer=functools.partial(torch.optim.{kind}, lr=...)"
            )


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Workload and samples of the training."""

    workload: Workload
    samples: TrainingData
    module: "nn.Module | None" = None
    """A built module whose weights on rank 0 are copied to all ranks; None if weights are initialized from the seed."""
    loads: bool = False
    """True if each rank loads its part of these weights when the model is built in its configuration; otherwise the
    model is a copy of the module.
    """


def resolve_arguments(arguments: ModelArguments) -> Resolved:
    """Converts the arguments to a workload and its samples.

    Raises:
        UsageError: the type of the model or of the data is not supported.
    """
    from torch import nn

    module = arguments.model if isinstance(arguments.model, nn.Module) else None
    if module is None and not isinstance(arguments.model, (str, Path, Workload)):
        workload = _of_builder(arguments)
    elif module is not None:
        workload = _of_module(arguments, module)
    else:
        workload = _with_choices(arguments, _named_workload(arguments))
    samples = _samples(arguments, workload)
    if isinstance(samples, FromDataset):
        workload = _with_data(workload, samples)
    return Resolved(workload=workload, samples=samples, module=module, loads=isinstance(workload.model, Unfrozen))


@dataclass(frozen=True, kw_only=True)
class Unfrozen(Architecture):
    """Architecture of a built module, with the same parameters frozen."""

    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained."""

    def __call__(self, config: Mapping[str, Any]) -> "nn.Module":
        """Builds the model, see `Architecture`."""
        result = super().__call__(config)
        for name, param in result.named_parameters(remove_duplicate=False):
            if name in self.frozen:
                param.requires_grad_(False)
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleCopies:
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

        columns = entries(self.batch)
        count = len(next(iter(columns.values())))
        numbers = (torch.arange(size) + seed) % count
        result = {name: column[numbers] for name, column in columns.items()}
        return result if isinstance(self.batch, Mapping) else tuple(result.values())  # type: ignore[return-value]


def _named_workload(arguments: ModelArguments) -> Workload:
    if isinstance(arguments.model, Workload) and arguments.lora is None:
        return resolve_workload(arguments.model, global_batch=arguments.global_batch, seq_len=arguments.seq_len)
    return resolve_workload(
        arguments.model, seq_len=_length(arguments), global_batch=arguments.global_batch, lora=arguments.lora
    )


def _of_module(arguments: ModelArguments, module: "nn.Module") -> Workload:
    """Returns the workload of a built module."""
    _refuse_lora(arguments)
    architecture = _architecture(module)
    if architecture is not None:
        frozen = tuple(
            name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad
        )
        architecture_fields = {field.name: getattr(architecture, field.name) for field in fields(architecture)}
        language_model = _hugging_face(arguments, module)
        return _with_choices(arguments, replace(language_model, model=Unfrozen(**architecture_fields, frozen=frozen)))
    kind = type(module)
    shapes = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    return _module_workload(
        arguments,
        ModuleCopies(module=module),
        kind.__name__,
        {"class": f"{kind.__module__}.{kind.__qualname__}", **shapes},
    )


def _of_builder(arguments: ModelArguments) -> Workload:
    """Returns the workload of a class or a function that builds the module."""
    if not callable(arguments.model):
        raise UsageError(
            "model must be a name, a Workload, a torch module, or a function that builds one, but got a "
            f"{type(arguments.model).__name__}"
        )
    _refuse_lora(arguments)
    workload = _module_workload(
        arguments, arguments.model, getattr(arguments.model, "__name__", type(arguments.model).__name__), None
    )
    module = skeleton(workload)
    if _architecture(module) is None:
        return workload
    language_model = _hugging_face(arguments, module)
    return _with_choices(arguments, replace(language_model, model=arguments.model, identity=None))


def _module_workload(
    arguments: ModelArguments, build: Callable[..., "nn.Module"], name: str, identity: Mapping[str, Any] | None
) -> Workload:
    if arguments.dataset is None:
        raise UsageError(
            f"{name} is a module of your own: give a dataset to train it on, or a redline.Workload, which has data"
        )
    if isinstance(arguments.dataset, (str, Path, DataPlan)) or _are_paths(arguments.dataset):
        raise UsageError(
            f"{name} is a module of your own, for which files cannot be cut into samples: give a data set whose samples it takes"
        )
    return Workload(
        model=build,
        batch=lambda size, seed: (),  # replaced by the data set's batches
        loss=arguments.loss,
        optimizer=arguments.optimizer,
        name=name,
        global_batch=arguments.global_batch if arguments.global_batch is not None else DEFAULT_GLOBAL_BATCH,
        seq_len=_length(arguments),
        identity=identity,
    )


def _hugging_face(arguments: ModelArguments, module: Any) -> Workload:
    name = type(module).__name__
    return hugging_face_workload(
        from_configuration(module.config, name, named=name),
        name=name,
        spec=name,
        seq_len=_length(arguments),
        global_batch=arguments.global_batch,
    )


def _architecture(module: Any) -> Architecture | None:
    """Returns the architecture of a Hugging Face language model or image classifier; None for all other modules."""
    if not hasattr(type(module), "config_class") or not hasattr(module, "config"):
        return None
    try:
        architecture = from_configuration(module.config, type(module).__name__, named=type(module).__name__)
    except WorkloadError:  # of another task, which its own forward may support
        return None
    return architecture if architecture.task in GENERAL and type(module) is architecture.model_class else None


def _with_choices(arguments: ModelArguments, workload: Workload) -> Workload:
    if arguments.loss is not None:
        workload = replace(workload, loss=arguments.loss)
    return workload if arguments.optimizer is None else replace(workload, optimizer=arguments.optimizer)


def _refuse_lora(arguments: ModelArguments) -> None:
    if arguments.lora is not None:
        raise UsageError(
            f"lora={arguments.lora!r} goes with a model's name; put adapters into a module of your own by peft.get_peft_model"
        )


def _samples(arguments: ModelArguments, workload: Workload) -> TrainingData:
    dataset = arguments.dataset
    if dataset is None:
        return training_data(DataPlan(seed=arguments.seed), workload, Path(arguments.cache))
    if isinstance(dataset, DataPlan):
        return training_data(dataset, workload, Path(arguments.cache))
    if isinstance(dataset, (str, Path)) or _are_paths(dataset):
        paths = (dataset,) if isinstance(dataset, (str, Path)) else dataset
        plan = DataPlan(paths=tuple(map(str, paths)), seed=arguments.seed, shuffle=arguments.shuffle)
        return training_data(plan, workload, Path(arguments.cache))
    task: Task | None = getattr(workload.batch, "task", None) if workload.loss is None else None
    return FromDataset(dataset, collate=arguments.collate, task=task, shuffle=arguments.shuffle, seed=arguments.seed)


def _with_data(workload: Workload, samples: FromDataset) -> Workload:
    task: Task | None = getattr(workload.batch, "task", None)
    count = min(len(samples.dataset), max(2, workload.global_batch))
    collated = samples.collate([samples.dataset[number] for number in range(count)])
    batch: Batch = dict(collated) if isinstance(collated, Mapping) else tuple(collated)
    return replace(workload, batch=Examples(batch=batch_slice(batch, 0, count), task=task))


def _length(arguments: ModelArguments) -> int | None:
    """Returns the tokens of a sample: the requested number, or the length of the first sample of the data set."""
    if (
        arguments.seq_len is not None
        or arguments.dataset is None
        or isinstance(arguments.dataset, (str, Path, DataPlan))
    ):
        return arguments.seq_len
    if _are_paths(arguments.dataset):
        return None
    first_sample = entries(FromDataset(arguments.dataset, collate=arguments.collate)(0, 1))
    ids = first_sample.get("input_ids")
    return None if ids is None else int(ids.shape[1])


def _are_paths(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (str, Path)) for item in value)
