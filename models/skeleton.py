"""A workload's model on the meta device, its experts, and its equal repeated blocks."""

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..base._torch import parameters_of
from ..base._transformers import quiet
from .batches import ForwardPass, each_tensor
from .workload import Batch, Workload, user_code_errors

if TYPE_CHECKING:
    from torch import nn


def skeleton(workload: Workload, config: Mapping[str, Any] | None = None) -> "nn.Module":
    """Returns the module on the meta device, or on the CPU if its constructor computes with values.

    The global random state is restored.

    Raises:
        WorkloadError: the model cannot be built.
    """
    import torch

    with torch.random.fork_rng(devices=[]), user_code_errors(f"{workload.name}: building the model"):
        try:
            with torch.device("meta"):
                return workload.build_model(config)
        except RuntimeError:  # including NotImplementedError: a value of a meta tensor was read
            return workload.build_model(config)


UNABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions of user code that cannot handle the given values."""
LEAST_CALLS, CALLS_A_MODULE = 3000, 30
"""Limit on the calls of torch in a forward pass: more than three times those of the largest models whose code has no loop over
the sequence. A thousand take about a second."""


class TooManyCalls(RuntimeError):
    """A pass over one sample calls torch more often than that of a model without a loop over the sequence."""


@contextmanager
def bounded(model: "nn.Module") -> Iterator[None]:
    """Context in which calls of torch are counted.

    Calls, not operators: an exception while an operator is dispatched can end the process.

    Raises:
        TooManyCalls: there are more than the limit.
    """
    from torch.overrides import TorchFunctionMode

    class Counted(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            if self.count % 1000 == 0:
                limit = LEAST_CALLS + CALLS_A_MODULE * sum(1 for _ in model.modules())
                if self.count > limit:
                    raise TooManyCalls(
                        f"a pass over one sample calls torch more than {limit:,} times, as a loop over the sequence does"
                    )
            return func(*args, **(kwargs or {}))

    with Counted():
        yield


@contextmanager
def fake_pass(
    workload: Workload, config: Mapping[str, Any], batch: Batch
) -> "Iterator[tuple[nn.Module, ForwardPass, Batch]]":
    """Context in which the model runs on fake tensors, without memory or arithmetic.

    Yields:
        The model in training mode, its forward pass, and the batch as fake tensors.

    Raises:
        TooManyCalls: the model loops over the sequence, which would take minutes.
    """
    import torch
    from transformers.initialization import no_init_weights

    from ..base._torch import FakeTensorMode
    from ..schedule.parallel.partition import by_shapes_alone

    # Meta tensors would be enough, but transformers reads values unless it detects tracing.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), quiet(), fake:
        with no_init_weights():  # some read the values that they draw
            model = by_shapes_alone(workload.build_model(config).train())
        fakes = each_tensor(batch, fake.from_tensor)
        with bounded(model):
            yield model, ForwardPass(workload, model), fakes


def experts_of(workload: Workload) -> tuple[int, ...]:
    """Numbers of experts of the mixtures in a workload's model, unique and ascending; empty for none."""
    return workload.once(_find_experts)


def _find_experts(workload: Workload) -> tuple[int, ...]:
    return experts_in(skeleton(workload))


def experts_in(model: "nn.Module") -> tuple[int, ...]:
    """Numbers of experts of the mixtures in a model, unique and ascending; empty for none."""
    from ..schedule.parallel.experts import mixtures_of, num_experts

    return tuple(sorted({num_experts(mixture) for mixture in mixtures_of(model).values()}))


FOLLOWED = 3
"""Number of blocks of a kind that are not replaced: the first, the second and the last."""
_POSITIONS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_id")
"""Attributes with the index of a block. A difference that they make at construction appears in other attributes."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def stand_ins_for(model: "nn.Module", blocks: Sequence[str]) -> dict[str, str]:
    """Maps blocks between the second and the last of their kind to the second: path -> path."""
    kinds: dict[Hashable, list[str]] = {}
    for index, path in enumerate(blocks):
        kinds.setdefault(described(model.get_submodule(path), index), []).append(path)
    return {path: equal[1] for equal in kinds.values() if len(equal) > FOLLOWED for path in equal[2:-1]}


def short_copy(model: "nn.Module", blocks: Sequence[str]) -> "tuple[nn.Module, list[str]]":
    """Returns a copy of a model on the meta device without the blocks that others represent, and the paths of its blocks,
    in order, which are the same as in the model.

    Blocks that share a weight with another part of the model are kept.
    """
    from ..schedule.parallel.partition import meta_copy

    holders: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for param in parameters_of(module).values():
            if param is not None:
                holders.setdefault(param, set()).add(id(module))
    left_out = set()
    for path in stand_ins_for(model, blocks):
        block = model.get_submodule(path)
        inside = {id(module) for module in block.modules()}
        if all(holders[param] <= inside for param in block.parameters()):
            left_out.add(path)
    return meta_copy(model, left_out), [path for path in blocks if path not in left_out]


def described(block: "nn.Module", index: int) -> Hashable:
    """Returns equal values for blocks that do the same with equal inputs, apart from the values of their weights:
    classes, shapes and plain attributes of all their modules, and settings of the configuration for this block.
    """
    description: list[Hashable] = []
    configs: dict[int, Any] = {}
    for path, module in block.named_modules():
        attributes = []
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or name in _POSITIONS:
                continue
            if hasattr(value, "to_dict") and not isinstance(value, type):
                configs[id(value)] = value
            attributes.append((name, _hashable(value)))
        description.append((path, type(module), tuple(attributes)))
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        description.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    for config in configs.values():
        for name, value in sorted(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) > index:
                description.append((name, _hashable(value[index])))
    return tuple(description)


def _hashable(value: Any) -> Hashable:
    """Converts a value to a hashable one with the same equality; other objects are returned unchanged."""
    import torch

    if isinstance(value, (*_SCALARS, torch.dtype, torch.device)):
        return type(value).__name__, value
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((str(key), _hashable(item)) for key, item in value.items())
    if isinstance(value, functools.partial):  # of an activation, made for each block
        return _hashable(value.func), _hashable(value.args), _hashable(value.keywords)
    return id(value)
