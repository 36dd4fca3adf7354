"""Division of a model into pipeline stages, without a change to its code.

Every rank keeps the full module tree and runs the model's own forward, with a gate at each module. Modules of the stage
run. Modules of an earlier stage are skipped: the module that the cut follows returns the received tensors, and those
before it return placeholders of the right shape, filled with NaN so that a value that bypasses the cut is detected. The
forward ends after the stage's last module. The model computes masks, positions and similar values on every stage, from
the batch that every rank gets.

The backward pass of a stage may have two parts: gradients of its inputs first, those of its weights later (`splits`).
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ...base._torch import (
    TorchDispatchMode,
    TreeSpec,
    buffers_of,
    call_of,
    children_of,
    parameters_of,
    tree_flatten,
    tree_unflatten,
)
from ...base._transformers import experts_by_shapes_alone
from ...base.errors import ScheduleError
from ...knobs.meaning import Placement
from ..forward import Layer, layers_of, without_cache
from ..tree import Tree, is_within, join, own_tensors, replace_tensor


class StageEnd(BaseException):
    """Unwinds the model's forward after the last module of a stage. It is not an error, hence not an Exception."""

    def __init__(self, output: Any) -> None:
        super().__init__("the stage ends here")
        self.output = output


@dataclass(slots=True)
class Unit:
    """A largest submodule that is in one stage."""

    path: str
    module: nn.Module
    stage: int
    ends: bool = False
    """True if a cut follows it."""


@dataclass(frozen=True, slots=True)
class Form:
    """The structure of an output, with the shapes and dtypes of its tensors."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """(shape, dtype, True) for a tensor, (value, None, False) for another value."""

    @staticmethod
    def of(output: Any) -> "Form":
        leaves, spec = tree_flatten(output)
        described = [
            (tuple(leaf.shape), leaf.dtype, True) if isinstance(leaf, torch.Tensor) else (leaf, None, False)
            for leaf in leaves
        ]
        return Form(spec, tuple(described))

    def tensors(self, device: torch.device | str, fill: bool = False) -> tuple[torch.Tensor, ...]:
        """Returns zero tensors of these shapes; with `fill`, floating-point tensors are NaN."""
        tensors = []
        for shape, dtype, is_tensor in self.leaves:
            if is_tensor:
                value = torch.zeros(shape, dtype=dtype, device=device)
                tensors.append(value.fill_(float("nan")) if fill and dtype.is_floating_point else value)
        return tuple(tensors)

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Returns the output with these tensors."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if is_tensor else leaf for leaf, _, is_tensor in self.leaves], self.spec)


class EitherWay(TorchDispatchMode):
    """Lets code that reads values of tensors run on the meta device: each value is zero, or False.

    The form of the tensors that cross a cut is fixed, so code that branches on values must return the same form on both
    branches.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense" and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Board:
    """The state that the gates of one model share during a step."""

    device: torch.device
    stage: int | None = None
    """The stage that runs; None outside of a step."""
    received: tuple[torch.Tensor, ...] = ()
    """Tensors received from the previous stage."""
    inferring: bool = False
    """True while the forms of the tensors that cross the cuts are inferred; no unit runs then."""
    forms: list[Form] = field(default_factory=list)
    """The form of the tensors that cross each cut."""
    checking: bool = False
    """True while the stage looks for values that bypass the cut."""
    passed: bool = False
    """True once the forward has reached the cut that the stage begins with."""
    late: list[str] = field(default_factory=list)
    """Modules of earlier stages that the model calls after that cut."""
    lacking: str | None = None
    """The first module of the stage whose input is a placeholder, or is computed from one."""
    stages: int = 1


class Gate:
    """Replaces a unit's call, including its hooks and compilation: runs it, skips it, or ends the stage after it."""

    def __init__(self, unit: Unit, meta: nn.Module, board: Board) -> None:
        self.unit, self.meta, self.board = unit, meta, board
        self.inner: Callable[..., Any] = call_of(unit.module)
        self.forms_by_key: dict[Any, Form] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        board, unit = self.board, self.unit
        if board.stage is None:
            raise ScheduleError("a model cut into pipeline stages runs by model.pipeline.step(...)")
        if board.inferring:
            form = self.form(args, kwargs)
            if unit.ends:
                board.forms.append(form)
                if len(board.forms) == board.stages - 1:
                    raise StageEnd(None)  # the output of the last stage crosses no cut
            return form.fill(form.tensors(board.device, fill=True))
        if unit.stage > board.stage:
            raise ScheduleError(
                f"'{unit.path}' belongs to pipeline stage {unit.stage} by its place in the model, but is "
                f"called in stage {board.stage}; cut elsewhere"
            )
        if unit.stage < board.stage:
            if unit.ends and unit.stage == board.stage - 1:
                board.passed = True
                return board.forms[unit.stage].fill(board.received)
            if board.passed and unit.path not in board.late:
                board.late.append(unit.path)
            form = self.form(args, kwargs)
            return form.fill(form.tensors(board.device, fill=True))
        if board.checking and not board.lacking and _any_nan((args, kwargs)):
            board.lacking = unit.path
        output = self.inner(*args, **kwargs)
        if unit.ends:
            raise StageEnd(output)
        return output

    def form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """Returns the form of the unit's output, computed by its copy on the meta device."""
        args, kwargs = without_cache(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        key = (spec, *((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves))
        if (
            key not in self.forms_by_key
        ):  # once for each shape: the forward on the meta device takes longer than a lookup
            leaves = [leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, spec)
            try:
                with torch.no_grad(), EitherWay():
                    self.forms_by_key[key] = Form.of(self.meta(*args, **kwargs))
            except NotImplementedError as error:
                raise ScheduleError(
                    f"the shapes of the outputs of '{self.unit.path}' depend on values, but every stage of a pipeline "
                    f"must infer them without values: {error}"
                ) from error
        return self.forms_by_key[key]


def _any_nan(values: Any) -> bool:
    tensors = (leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return any(bool(tensor.isnan().any()) for tensor in tensors)


def units_of(tree: Tree) -> list[Unit]:
    """Returns the units of a model in the order in which it registers its modules.

    Raises:
        ScheduleError: a module that a cut divides has a parameter of its own, or a cut is inside a module that runs as a
            unit.
    """
    units: list[Unit] = []
    stage = 0

    def walk(module: nn.Module, path: str) -> None:
        nonlocal stage
        if path in tree.late:
            units.append(Unit(path, module, len(tree.cuts)))
        elif path in tree.cuts:
            units.append(Unit(path, module, stage, ends=True))
            stage += 1
        elif any(is_within(cut, path) for cut in tree.cuts):
            check_divided(tree, module, path)
            for name, child in module.named_children():
                walk(child, join(path, name))
        elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            # Containers are never called.
            for name, child in module.named_children():
                walk(child, join(path, name))
        else:
            units.append(Unit(path, module, stage))

    walk(tree.module, "")
    return units


def tied_within(root: nn.Module, units: list[Unit], placement: Placement) -> str | None:
    """Returns a weight that several units on one rank of the pipeline share, as `a and b`; None if there is none."""
    unit_of = {submodule: unit for unit in units for submodule in unit.module.modules()}
    first_uses: dict[tuple[nn.Parameter, int], tuple[Unit, str]] = {}
    for path, module in root.named_modules():
        for name, param in parameters_of(module).items():
            if param is None or module not in unit_of:
                continue
            unit = unit_of[module]
            first_unit, first_name = first_uses.setdefault(
                (param, placement.rank(unit.stage)), (unit, join(path, name))
            )
            if first_unit is not unit:
                return f"{first_name} and {join(path, name)}"
    return None


def check_divided(tree: Tree, module: nn.Module, path: str) -> None:
    """Raises ScheduleError if a cut is inside a module that cannot be divided."""
    name = path or type(module).__name__
    if any(not layer.divisible for layer in layers_of(module, Layer)):
        raise ScheduleError(f"a pipeline cut must not be inside a traced or fused module, but '{name}' is one")
    for work in tree.deferred:
        runs_as_unit = work.phase in ("checkpoint", "compile") or (work.phase == "offload" and path)
        if work.path == path and runs_as_unit:
            raise ScheduleError(
                f"a pipeline cut must not be inside a module that runs as a unit, but '{name}' has {work.phase}; "
                "apply it to the modules below"
            )
    parameter_names = [key for key, value in parameters_of(module).items() if value is not None]
    if parameter_names:
        raise ScheduleError(
            f"a pipeline cut divides '{name}', so it must have no parameter of its own, but has {', '.join(parameter_names)}"
        )


def meta_copy(module: nn.Module, without: Iterable[str] = ()) -> nn.Module:
    """Returns a copy on the meta device, hooks and layers included; the weights are not copied.

    Args:
        module: the original.
        without: paths of modules to leave out of the copy.
    """
    paths_without = tuple(without)
    memo: dict[int, Any] = {id(module.get_submodule(path)): nn.Identity() for path in paths_without}
    for submodule in module.modules():
        for tensor in [*parameters_of(submodule).values(), *buffers_of(submodule).values()]:
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
            elif tensor is not None:
                memo[id(tensor)] = tensor.detach().to("meta")  # another object, on the meta device too
    copied = copy.deepcopy(module, memo)
    for path in paths_without:
        parent, _, name = path.rpartition(".")
        del children_of(copied.get_submodule(parent))[name]
    return by_shapes_alone(copied)


def by_shapes_alone(module: nn.Module) -> nn.Module:
    """Configures a module such that the shapes of its results do not depend on values, and returns it.

    Only one of transformers' implementations of a mixture of experts has that property; the others sort tokens by expert.
    """
    for submodule in module.modules():
        experts_by_shapes_alone(submodule.__dict__.get("config"))
    return module


def drop(module: nn.Module) -> None:
    """Removes the tensors of a unit that belongs to another rank; their names leave `state_dict`.

    Meta tensors that are not parameters take their place, because models read the dtype of a weight.
    """
    for submodule in module.modules():
        for name, tensor in own_tensors(submodule):
            replace_tensor(submodule, name, None)  # also in the list of an LSTM
            delattr(submodule, name)
            submodule.__dict__[name] = torch.empty_like(tensor, device="meta", requires_grad=False)


def leave(result: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a stage's result in the form that torch.distributed.pipelining needs: the same values in the same memory.

    torch splits the backward pass at the nodes where the paths from the weights and from the received tensors meet. For a
    result that depends on weights only there is no such node, and their gradients would be lost; the returned result adds
    one. It is neither a view nor a received tensor, since torch detaches it in place.
    """
    input_with_grad = next((tensor for tensor in received if tensor.requires_grad), None)
    return result if input_with_grad is None or not result.requires_grad else _Leave.apply(result, input_with_grad)


def splits(results: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> bool:
    """Returns True if torch.distributed.pipelining can compute the gradients of a stage in two parts.

    The first part runs back from the results to the received tensors. The second runs from every node on that path to
    its weights, separately for each node, and frees the nodes that it visits. No node off the path may therefore be
    reachable from two nodes on it. Counterexamples: a weight that is used twice, or a decoder that starts from the batch
    and uses the encoder's output in several places.
    """
    users: dict[Any, list[Any]] = {}
    nodes_to_visit = [result.grad_fn for result in results if result.grad_fn is not None]
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        for producer in _producers(node):
            if producer not in users:
                users[producer] = []
                nodes_to_visit.append(producer)
            users[producer].append(node)
    path = {get_gradient_edge(tensor).node for tensor in received if tensor.requires_grad}
    nodes_to_visit = list(path)
    while nodes_to_visit:
        new_nodes = [user for user in users.get(nodes_to_visit.pop(), ()) if user not in path]
        path.update(new_nodes)
        nodes_to_visit += new_nodes
    depends_on: dict[Any, Any] = {}
    side_nodes = [
        (producer, path_node) for path_node in path for producer in _producers(path_node) if producer not in path
    ]
    while side_nodes:
        node, path_node = side_nodes.pop()
        if node not in depends_on:
            depends_on[node] = path_node
            side_nodes += [(producer, path_node) for producer in _producers(node)]
        elif depends_on[node] is not path_node:
            return False
    return True


def _producers(node: Any) -> list[Any]:
    """Returns the next nodes of a node of the backward graph, which produced its inputs in the forward pass."""
    return [next_node for next_node, _ in node.next_functions if next_node is not None]


class _Leave(torch.autograd.Function):
    """Returns its first argument, as if it depended on the second."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
