"""State of a training as tensors of the whole model, of which each rank has parts.

 name | contents |
---|---|
 `model/NAME` | a parameter or buffer, by its name in the model as constructed |
 `optimizer/NAME/KEY` | the optimizer's state of a parameter: of the same shape, or a single number |
 `group/NUMBER/KEY` | a number in a group of the optimizer that steps have changed, other than its learning rate |

Random numbers and the order of samples are functions of the seed and the step, so they are not saved.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...base.errors import WorkloadError
from ...models.layouts.weights import LazyTensors, Weights, shape_differences
from ...training.training import NUMBERS, group_numbers

if TYPE_CHECKING:
    import torch

    from ...schedule.parallel.sharding import Region
    from ...training.training import Training

MODEL, OPTIMIZER, GROUP = "model", "optimizer", "group"
_NUMBERS: Mapping[str, Callable[[float], Any]] = {each.__name__: each for each in NUMBERS}
"""Kinds of numbers that optimizers keep as numbers rather than as tensors; their keys end in `:KIND`."""
Located = dict[str, "tuple[torch.Tensor, Region]"]
PROGRESS_S = 5.0
"""Interval between reports of a load, s. Faster loads are not reported."""
Report = Callable[[Mapping[str, Any]], None]
"""Receives lines of a training's log."""


class State:
    """A training's tensors by name.

    Args:
        from_weights: names of frozen parameters that the weights which the training began with contain, and which a
            checkpoint therefore leaves out.
    """

    def __init__(self, training: "Training", from_weights: Collection[str] = ()) -> None:
        from ...schedule.parallel.sharding import regions_of

        self._training = training
        self._from_weights = frozenset(from_weights)
        self._model = regions_of(training.model, training.outline.names)
        self._names: dict[Any, str] = {tensor: name for name, (tensor, _) in self._model.items()}
        for param, host in getattr(training.optimizer, "pairs", ()):
            self._names[host] = self._names[param]

    def tensors(self) -> Located:
        """Current tensors of this rank that a checkpoint contains, and their parts of the whole.

        Raises:
            WorkloadError: the optimizer's state of a parameter is neither of its shape nor a number, on a rank with
                only a part of the parameter; or steps change numbers of its groups, and each stage has its own.
        """
        tensors = self._of_model()
        for param, name in self._updated():
            region = self._model[name][1]
            for key, value in self._training.optimizer.state.get(param, {}).items():
                state_tensor = self._of_state(name, key, value, param, region)
                if state_tensor is not None:
                    tensors[f"{OPTIMIZER}/{name}/{state_tensor[0]}"] = state_tensor[1:]
        for (number, key), value in group_numbers(self._training.optimizer).items():
            if value != self._training.first_numbers.get((number, key)):
                tensors[f"{GROUP}/{number}/{key}:{type(value).__name__}"] = self._of_group(key, value)
        return tensors

    def _of_model(self) -> Located:
        return {f"{MODEL}/{name}": located for name, located in self._model.items() if name not in self._from_weights}

    def check(self, stored: LazyTensors) -> None:
        """Refuses a checkpoint of another model.

        Raises:
            WorkloadError: the tensors differ; the message names them.
        """
        shapes = self._training.outline.shapes
        expected = {name: shape for name, shape in shapes.items() if name not in self._from_weights}
        prefix = f"{MODEL}/"
        stored_shapes = {
            name.removeprefix(prefix): tensor.shape for name, tensor in stored.items() if name.startswith(prefix)
        }
        if differences := shape_differences(expected, stored_shapes):
            raise WorkloadError(
                f"the checkpoint is of another model than {self._training.workload.name}: {differences}"
            )

    def load(self, stored: LazyTensors, checkpoint: str = "a checkpoint", report: Report = lambda line: None) -> None:
        """Loads this rank's part of a checkpoint.

        Args:
            checkpoint: its name, for the report.
            report: receives the progress.

        Raises:
            WorkloadError: it is of another model, or damaged.
        """
        self.check(stored)  # before any tensor changes
        targets = self._of_model()
        states = self._targets(stored)
        for name, keys in states.items():
            targets |= {f"{OPTIMIZER}/{name}/{key}": located for key, located in keys.items()}
        groups = {full: _whole_number(0.0) for full in stored if full.startswith(f"{GROUP}/")}
        _fill(targets | groups, stored, f"reading {checkpoint}", report)
        for full, (value, _) in groups.items():
            _, number, key = full.split("/", 2)
            if int(number) < len(self._training.optimizer.param_groups):
                self._training.optimizer.param_groups[int(number)].update([_as_kept(key, value)])
        self._put({name: {key: located[0] for key, located in keys.items()} for name, keys in states.items()})

    def load_weights(self, weights: Weights) -> None:
        """Loads this rank's part of another tool's checkpoint. Missing tensors, such as adapters, do not change."""
        stored = weights.tensors
        _fill({name: located for name, located in self._model.items() if name in stored}, stored)

    def _updated(self) -> Iterator[tuple[Any, str]]:
        """Yields the parameters that this rank's optimizer updates, with their names."""
        for group in self._training.optimizer.param_groups:
            for param in group["params"]:
                if param in self._names:  # at ZeRO 1 a rank that owns nothing has a parameter without elements
                    yield param, self._names[param]

    def _of_group(self, key: str, value: float) -> "tuple[torch.Tensor, Region]":
        if self._training.strategy.pp > 1:
            raise WorkloadError(
                f"{type(self._training.optimizer).__name__} keeps '{key}' in its groups, of which each pipeline stage has its "
                "own; checkpoints of it need pp=1"
            )
        return _whole_number(value)

    def _of_state(
        self, name: str, key: str, value: Any, param: "torch.Tensor", region: "Region"
    ) -> "tuple[str, torch.Tensor, Region] | None":
        import torch

        from ...schedule.parallel.sharding import local, whole_region

        kind = type(value).__name__
        if value is None:
            return None
        if kind in _NUMBERS:
            return f"{key}:{kind}", *_whole_number(value)
        if isinstance(value, torch.Tensor):
            if local(value).shape == local(param).shape and local(param).dim():
                return key, value, region
            if not value.dim() or region.complete:
                return key, value, whole_region(value.shape)
        optimizer = type(self._training.optimizer).__name__
        raise WorkloadError(
            f"{optimizer} keeps '{key}' of {name} in a form that cannot be assembled from the parts of several ranks; "
            "checkpoints of it need tp=1 and zero of at most 1"
        )

    def _targets(self, stored: LazyTensors) -> "dict[str, Located]":
        """Allocates the optimizer's state of each parameter that it updates here, by parameter and key."""
        import torch

        from ...schedule.parallel.sharding import whole_region

        keys: dict[str, list[str]] = {}
        for full in stored:
            kind, _, name_and_key = full.partition("/")
            if kind == OPTIMIZER:
                name, _, key = name_and_key.rpartition("/")
                keys.setdefault(name, []).append(key)
        targets: dict[str, Located] = {}
        for param, name in self._updated():
            region = self._model[name][1]
            for key in keys.get(name, ()):
                tensor = stored[f"{OPTIMIZER}/{name}/{key}"]
                shape, dtype = tensor.shape, tensor.dtype
                sharded = bool(shape) and shape == region.shape
                room = torch.zeros_like(param, dtype=dtype) if sharded else torch.zeros(shape, dtype=dtype)
                targets.setdefault(name, {})[key] = room.detach(), region if sharded else whole_region(shape)
        return targets

    def _put(self, states: "Mapping[str, Mapping[str, torch.Tensor]]") -> None:
        optimizer = self._training.optimizer
        document = optimizer.state_dict()
        document["state"] = {}
        number = -1
        for group in optimizer.param_groups:
            for param in group["params"]:
                number += 1
                state = states.get(self._names.get(param, ""))
                if state:
                    document["state"][number] = dict(_as_kept(key, value) for key, value in state.items())
        optimizer.load_state_dict(document)
        for param, name in self._updated():  # it has cast states to their parameter's format
            state = optimizer.state.get(param, {})
            for key, value in states.get(name, {}).items():
                if key in state and state[key].dtype != value.dtype:
                    state[key] = value.to(state[key].device)


def _fill(targets: Located, stored: LazyTensors, task: str = "", report: Report = lambda line: None) -> None:
    """Loads the stored values into this rank's parts of tensors."""
    pieces = [(name, *piece) for name, (tensor, region) in targets.items() for piece in region.parts(tensor)]
    sizes = [stored[name].dtype.itemsize * here.numel() for name, _, here in pieces]
    bytes_read, reported_at = 0, time.monotonic()
    for (name, box, here), size in zip(pieces, sizes):
        here.copy_(stored[name].read(box.of_whole))
        bytes_read += size
        if time.monotonic() - reported_at >= PROGRESS_S:
            reported_at = time.monotonic()
            report({"kind": "progress", "what": task, "bytes": bytes_read, "of": sum(sizes)})


def _whole_number(value: float) -> "tuple[torch.Tensor, Region]":
    """A number as a tensor that every rank has whole."""
    import torch

    from ...schedule.parallel.sharding import whole_region

    return torch.tensor(float(value), dtype=torch.float64), whole_region(torch.Size())


def _as_kept(key: str, value: "torch.Tensor") -> tuple[str, Any]:
    """A key and a value of an optimizer's state in the optimizer's own form."""
    name, _, kind = key.rpartition(":")
    return (name, _NUMBERS[kind](float(value))) if name and kind in _NUMBERS else (key, value)
