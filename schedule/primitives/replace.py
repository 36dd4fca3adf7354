"""replace: put another module in a module's place."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...base._torch import children_of
from ...base.errors import ScheduleError
from ..deferred import noted
from ..forward import layers_of
from ..graph.called import check_called
from ..graph.editing import replace_subgraph
from ..primitive import primitive
from ..recording import recording_of
from ..transfer import transfer
from ..tree import ScheduledModule, called_with_path, places


@primitive
def replace(
    sch: ScheduledModule,
    new: nn.Module | Callable[..., Any],
    subgraph: Any = None,
    name: str | None = None,
    together: bool = False,
) -> None:
    """Puts another module in this one's place, or a module or function in the place of subgraphs of a traced one.

    Parameters and buffers whose names and shapes match are kept (the same objects, so ties hold), as are
    hooks and the training mode. What could not be kept is said in a warning.

    The replacement of a subgraph is called with what stands for the pattern's parameters. What the modules inside
    exchange between ranks before and after them is exchanged before and after it; what has no place there is
    refused. Parameters that nothing uses any more leave the model.

    Args:
        new: a module, or a factory that is called with the old module, and with its path where it takes two, and
            returns one; the factory runs on the old module's device, `meta` included. With `subgraph`, a module or
            function of its inputs.
        subgraph: one match or a list of matches from `find`; None replaces the module itself.
        name: with `subgraph`, what a module is called among its neighbours, and an operation in the graph.
        together: one call of `new` stands for all subgraphs of the list: it is given the inputs of all, those that
            they have in common once, and returns as many outputs (one module for the projections to q, k and v).

    Raises:
        ScheduleError: `new` does not yield a module; the old one is sharded (replace before sharding); something on
            a module inside of a subgraph would be lost.
    """
    if subgraph is not None:
        replace_subgraph(sch, new, subgraph, name, together)
        return
    if name is not None or together:
        raise ScheduleError(f"replace on '{sch.name}': name and together go with a subgraph")
    made = make(sch, sch.module, new)
    put(sch, sch.module, made)


def make(sch: ScheduledModule, old: nn.Module, new: nn.Module | Callable[..., Any]) -> nn.Module:
    """The module that is to take the place of `old`; nothing is changed yet."""
    check_called(sch, "replace")
    for path, each in old.named_modules():
        if layers_of(each) or "_shards" in each.__dict__:
            raise ScheduleError(
                f"replace on '{sch.name}': a module must be replaced before it is sharded, traced or fused, "
                f"but '{path or sch.name}' already is"
            )
    if isinstance(new, nn.Module):
        return new
    if not callable(new):
        raise ScheduleError(
            f"replace on '{sch.name}': new must be a module or a factory called with the old module, "
            f"but got {type(new).__name__}"
        )
    if isinstance(new, type) and issubclass(new, nn.Module):
        _check_class(sch, old, new)
    held = [*old.parameters(), *old.buffers()]
    if held and recording_of(old) is None:
        with torch.device(held[0].device):
            made = called_with_path(new, old, sch.path)
    else:
        with noted(*held):
            made = called_with_path(new, old, sch.path)
    if not isinstance(made, nn.Module):
        raise ScheduleError(
            f"replace on '{sch.name}': the factory must return a module, but returned {type(made).__name__}"
        )
    return made


def _check_class(sch: ScheduledModule, old: nn.Module, new: type[nn.Module]) -> None:
    """Refuses a class that is not made of the old module alone."""
    try:
        inspect.signature(new).bind(old)
    except TypeError as error:
        raise ScheduleError(
            f"replace on '{sch.name}': a class is called with the old module, but {new.__name__} takes other arguments "
            f"({error}); pass {new.__name__}(...), or a function such as lambda old: {new.__name__}(...)"
        ) from None
    first = next(iter(inspect.signature(new).parameters.values()))
    if first.annotation in (int, float, "int", "float"):
        raise ScheduleError(
            f"replace on '{sch.name}': a class is called with the old module, but {new.__name__} takes {first.name}, a "
            f"number; pass {new.__name__}({first.name}), or lambda old: {new.__name__}(...)"
        )


def put(sch: ScheduledModule, old: nn.Module, new: nn.Module) -> None:
    """Puts `new` at every place where `old` stands, and warns of what was not kept."""
    if new is old:
        return
    root = sch.tree.module
    where = places(root, old)
    # Sought before anything moves: `new` may contain `old`.
    notes = [] if old in set(new.modules()) else transfer(old, new)
    new.train(old.training)
    if old is root:
        sch.tree.module = new
    for parent, name, _ in where:
        children_of(parent)[name] = new
    if notes:
        warnings.warn(f"replace on '{sch.name}': not kept: {'; '.join(notes)}", stacklevel=4)
