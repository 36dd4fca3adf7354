"""A model divided into pipeline stages, without a change to its code.

Every rank keeps the whole module tree and runs the model's own forward, with a gate at each module. Modules of the stage
run. Modules of an earlier stage are skipped: the module that the cut follows returns the received tensors, and those
before it return placeholders of the right shape, filled with NaN so that a value that bypasses the cut is detected. The
forward ends after the stage's last module. The model itself computes masks, positions and the like on every stage, from
the batch that every rank gets.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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
from ...knobs.pipeline import Placement
from .. import held
from ..forward import layers_of
from ..outputs import without_cache
from ..tree import Tree, is_within, join


class StageEnd(BaseException):
    """Unwinds the model's forward after the last module of a stage. It is not an error, hence not an Exception."""

    def __init__(self, output: Any) -> None:
        super().__init__("the stage ends here")
        self.output = output


@dataclass(slots=True)
class Unit:
    """A maximal part of the model that lies in one stage."""

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
    """(shape, dtype, True) for a tensor, (value, None, False) for anything else."""

    @staticmethod
    def of(output: Any) -> "Form":
        leaves, spec = tree_flatten(output)
        tensors = [isinstance(each, torch.Tensor) for each in leaves]
        return Form(
            spec,
            tuple(
                (tuple(x.shape), x.dtype, True) if tensor else (x, None, False) for x, tensor in zip(leaves, tensors)
            ),
        )

    def tensors(self, device: torch.device | str, fill: bool = False) -> tuple[torch.Tensor, ...]:
        """Returns zero tensors of these shapes; with `fill`, floating-point tensors are NaN."""
        out = []
        for shape, dtype, tensor in self.leaves:
            if tensor:
                value = torch.zeros(shape, dtype=dtype, device=device)
                out.append(value.fill_(float("nan")) if fill and dtype.is_floating_point else value)
        return tuple(out)

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Returns the output with these tensors."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if tensor else x for x, _, tensor in self.leaves], self.spec)


class EitherWay(TorchDispatchMode):
    """Lets code that reads values run on the meta device: each value is zero, or False.

    The tensors that cross a cut have one form, so code that branches on values must return the same form on both branches.
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
    """True while values that bypass the cut are looked for."""
    passed: bool = False
    """True from the cut on that the stage begins with."""
    late: list[str] = field(default_factory=list)
    """Modules of earlier stages that the model calls after that cut."""
    lacking: str = ""
    """The first module of the stage that is given a placeholder, or what is computed from one."""
    stages: int = 1


class Gate:
    """Replaces a unit's call, hooks and compilation included: runs it, skips it, or ends the stage after it."""

    def __init__(self, unit: Unit, meta: nn.Module, board: Board) -> None:
        self.unit, self.meta, self.board = unit, meta, board
        self.inner: Callable[..., Any] = call_of(unit.module)
        self.known: dict[Any, Form] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        board, unit = self.board, self.unit
        if board.stage is None:
            raise ScheduleError("a model cut into pipeline stages runs by model.pipeline.step(...)")
        if board.inferring:
            form = self.form(args, kwargs)
            if unit.ends:
                board.forms.append(form)
                if len(board.forms) == board.stages - 1:
                    raise StageEnd(None)
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
        key = (spec, *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves))
        if key not in self.known:
            leaves = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = tree_unflatten(leaves, spec)
            try:
                with torch.no_grad(), EitherWay():
                    self.known[key] = Form.of(self.meta(*args, **kwargs))
            except NotImplementedError as error:
                raise ScheduleError(
                    f"the shapes of what '{self.unit.path}' returns cannot be told without computing it, as every "
                    f"stage of a pipeline must: {error}"
                ) from error
        return self.known[key]


def _any_nan(values: Any) -> bool:
    tensors = (each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor) and each.is_floating_point())
    return any(bool(each.isnan().any()) for each in tensors)


def units_of(tree: Tree) -> list[Unit]:
    """Returns the units of a model in the order in which it registers its modules.

    Raises:
        ScheduleError: a module that a cut divides has a parameter of its own, or a cut lies inside a module that runs
            as a whole.
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


def tied_within(root: nn.Module, units: list[Unit], placement: Placement) -> str:
    """Returns a weight that several units on one rank of the pipeline share, as `a and b`; empty if there is none."""
    unit_of = {each: unit for unit in units for each in unit.module.modules()}
    found: dict[tuple[nn.Parameter, int], tuple[Unit, str]] = {}
    for path, module in root.named_modules():
        for name, param in parameters_of(module).items():
            if param is None or module not in unit_of:
                continue
            unit = unit_of[module]
            first, where = found.setdefault((param, placement.rank(unit.stage)), (unit, join(path, name)))
            if first is not unit:
                return f"{where} and {join(path, name)}"
    return ""


def check_divided(tree: Tree, module: nn.Module, path: str) -> None:
    """Raises ScheduleError if a cut lies within a module that cannot be divided."""
    name = path or type(module).__name__
    if any(not each.divisible for each in layers_of(module)):
        raise ScheduleError(f"a pipeline cut must not lie inside of what is traced or fused, but '{name}' is")
    for each in tree.deferred:
        whole = each.phase in ("checkpoint", "compile") or (each.phase == "offload" and path)
        if each.path == path and whole:
            raise ScheduleError(
                f"a pipeline cut must not lie inside of what runs as a whole, but '{name}' has {each.phase}; "
                "apply it to the modules below"
            )
    own = [key for key, value in parameters_of(module).items() if value is not None]
    if own:
        raise ScheduleError(
            f"a pipeline cut divides '{name}', so it must hold no parameter itself, but holds {', '.join(own)}"
        )


def meta_copy(module: nn.Module, without: Iterable[str] = ()) -> nn.Module:
    """Returns a copy on the meta device, hooks and layers included; the weights are not copied.

    Args:
        module: the original.
        without: paths of modules that the copy lacks.
    """
    left_out = tuple(without)
    memo: dict[int, Any] = {id(module.get_submodule(path)): nn.Identity() for path in left_out}
    for each in module.modules():
        for tensor in [*parameters_of(each).values(), *buffers_of(each).values()]:
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
            elif tensor is not None:
                memo[id(tensor)] = tensor.detach().to("meta")  # another object, on the meta device too
    copied = copy.deepcopy(module, memo)
    for path in left_out:
        parent, _, name = path.rpartition(".")
        del children_of(copied.get_submodule(parent))[name]
    return by_shapes_alone(copied)


def by_shapes_alone(module: nn.Module) -> nn.Module:
    """Returns the module, set to compute such that the shapes of its results do not depend on values.

    The other implementations of a mixture of experts in transformers sort the tokens by expert.
    """
    for each in module.modules():
        experts_by_shapes_alone(each.__dict__.get("config"))
    return module


def drop(module: nn.Module) -> None:
    """Removes the tensors of a unit that belongs to another rank; their names leave `state_dict`.

    Meta tensors that are not parameters take their place, because models read the dtype of a weight.
    """

    def form(tensor: torch.Tensor, path: str) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta", requires_grad=False)

    held.exchange(module, form, lambda tensor, path: form(tensor, path) if tensor.is_meta else tensor)
    for each in module.modules():
        for name, tensor in held.own_tensors(each):
            (parameters_of(each) if name in parameters_of(each) else buffers_of(each)).pop(name)
            each.__dict__[name] = tensor
