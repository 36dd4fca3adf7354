"""A model divided into pipeline stages, without a change to its code.

Every rank keeps the whole module tree and runs the model's own forward; a gate at each module decides. What
belongs to the stage runs. What belongs to an earlier one is skipped: the module that the cut follows returns
what was received, those before it return placeholders of the right shape, filled with NaN so that a value
which by-passes the cut does not go unnoticed. Behind its last module a stage ends. Masks, positions and the
like are computed on every stage by the model itself, from the batch that every rank is given.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base._torch import (
    TorchDispatchMode,
    TreeSpec,
    buffers_of,
    call_of,
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
from ..tree import Tree, join


class StageEnd(BaseException):
    """Unwinds the model's forward behind the last module of a stage. Not an error, hence no Exception."""

    def __init__(self, output: Any) -> None:
        super().__init__("the stage ends here")
        self.output = output


@dataclass(slots=True)
class Unit:
    """A largest part of the model that lies in one stage."""

    path: str
    module: nn.Module
    stage: int
    ends: bool = False
    """Whether the cut follows it."""


@dataclass(frozen=True, slots=True)
class Form:
    """An output without its tensors' values."""

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
        """Tensors of these shapes; with `fill`, NaN where the format has one."""
        out = []
        for shape, dtype, tensor in self.leaves:
            if tensor:
                value = torch.zeros(shape, dtype=dtype, device=device)
                out.append(value.fill_(float("nan")) if fill and dtype.is_floating_point else value)
        return tuple(out)

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The output with these tensors."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if tensor else x for x, _, tensor in self.leaves], self.spec)


class _EitherWay(TorchDispatchMode):
    """Lets code that looks at values run where there are none: each is zero, or false.

    What crosses a cut has one form, so code that goes one way or the other by values must return the same either way.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense" and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Board:
    """What the gates of one model share while it runs."""

    device: torch.device
    stage: int | None = None
    """The stage that runs; None outside of a step."""
    received: tuple[torch.Tensor, ...] = ()
    """Tensors received from the stage before."""
    inferring: bool = False
    """Nothing runs; the forms of what crosses the cuts are found."""
    forms: list[Form] = field(default_factory=list)
    """What crosses each cut."""
    stages: int = 1


class Gate:
    """Stands before a unit's call, hooks and compilation included."""

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
                return board.forms[unit.stage].fill(board.received)
            form = self.form(args, kwargs)
            return form.fill(form.tensors(board.device, fill=True))
        output = self.inner(*args, **kwargs)
        if unit.ends:
            raise StageEnd(output)
        return output

    def form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """What the unit would return, from a copy of it on the meta device."""
        args, kwargs = without_cache(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        key = (spec, *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves))
        if key not in self.known:
            leaves = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = tree_unflatten(leaves, spec)
            try:
                with torch.no_grad(), _EitherWay():
                    self.known[key] = Form.of(self.meta(*args, **kwargs))
            except NotImplementedError as error:
                raise ScheduleError(
                    f"the shapes of what '{self.unit.path}' returns cannot be told without computing it, as every "
                    f"stage of a pipeline must: {error}"
                ) from error
        return self.known[key]


def units_of(tree: Tree) -> list[Unit]:
    """The units of a model in the order in which it registers its modules.

    Raises:
        ScheduleError: a parameter lies directly in a module that a cut divides; a cut lies inside of what
            runs as a whole.
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
        elif any(cut.startswith(path + "." if path else "") for cut in tree.cuts):
            check_divided(tree, module, path)
            for name, child in module.named_children():
                walk(child, join(path, name))
        elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            # Containers are never called themselves.
            for name, child in module.named_children():
                walk(child, join(path, name))
        else:
            units.append(Unit(path, module, stage))

    walk(tree.module, "")
    return units


def tied_within(root: nn.Module, units: list[Unit], placement: Placement) -> str:
    """A weight that several units on one of the pipeline's ranks hold, as `a and b`; empty where there is none."""
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
    """Refuses a cut within what cannot be divided."""
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


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy on the meta device, hooks and layers included; the weights are not copied."""
    memo: dict[int, Any] = {}
    for each in module.modules():
        for tensor in [*parameters_of(each).values(), *buffers_of(each).values()]:
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
            elif tensor is not None:
                memo[id(tensor)] = tensor.detach().to("meta")  # another object, on the meta device too
    return by_shapes_alone(copy.deepcopy(module, memo))


def by_shapes_alone(module: nn.Module) -> nn.Module:
    """The module, set to compute such that the shapes of its results do not depend on values.

    Of transformers' ways through a mixture of experts the others sort the tokens by expert.
    """
    for each in module.modules():
        experts_by_shapes_alone(each.__dict__.get("config"))
    return module


def drop(module: nn.Module) -> None:
    """Takes the tensors out of a unit that lives on another rank; their names leave `state_dict`.

    What is left in their place has no values and is no parameter: models ask for the format of a weight.
    """

    def form(tensor: torch.Tensor, path: str) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta", requires_grad=False)

    held.exchange(module, form, lambda tensor, path: form(tensor, path) if tensor.is_meta else tensor)
    for each in module.modules():
        for name, tensor in held.own(each):
            (parameters_of(each) if name in parameters_of(each) else buffers_of(each)).pop(name)
            each.__dict__[name] = tensor
