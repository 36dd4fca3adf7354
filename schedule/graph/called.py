"""Finds the modules that a model still calls if some of them run as graphs."""

from collections.abc import Collection, Sequence

from torch import fx, nn

from ...base.errors import ScheduleError
from ..forward import layers_of
from ..tree import ScheduledModule, is_within, with_ancestors
from .trace import ITSELF, SubgraphCall, Traced


def used_modules(
    root: nn.Module, without: Collection[fx.Node] = ()
) -> tuple[set[nn.Module], set[tuple[nn.Module, str]]]:
    """Returns the modules that the model calls, and the attributes (module, name) that its graphs read.

    Args:
        without: nodes to ignore.
    """
    alive: set[nn.Module] = set()
    read: set[tuple[nn.Module, str]] = set()
    stack = [root]
    while stack:
        module = stack.pop()
        if module in alive:
            continue
        alive.add(module)
        graphs = [layer.graph for layer in layers_of(module, Traced)]
        if not graphs:
            stack += module.children()
        while graphs:
            for node in graphs.pop().nodes:
                if node in without:
                    continue
                if node.op == "call_module":
                    stack.append(module.get_submodule(node.target))
                elif node.op == "get_attr" and node.target != ITSELF:
                    holder, _, name = node.target.rpartition(".")
                    read.add((module.get_submodule(holder), name))
                elif isinstance(node.target, SubgraphCall):
                    graphs.append(node.target.graph)
    return alive, read


def check_called(sch: ScheduledModule, primitive: str) -> None:
    """Checks that the model calls a module: a primitive on it would otherwise have no effect.

    Raises:
        ScheduleError: a graph above inlines its operations, has replaced them, or does not use the module.
    """
    traced = graph_above(sch)
    # A ModuleList is never called.
    if traced is None or type(sch.module).forward is nn.Module.forward:
        return
    if sch.module not in used_modules(sch.tree.module)[0]:
        enclosing = f"sch['{traced}']" if traced else "sch"
        raise ScheduleError(
            f"{primitive} on '{sch.name}': the graph of '{traced or 'the root'}' does not call it, but has its operations "
            f"itself, has replaced them, or skips it, so this would have no effect; use {primitive} before "
            f"{enclosing}.trace, keep it a call there (leaves=), or use the result of {enclosing}.find"
        )


def graph_above(sch: ScheduledModule) -> str | None:
    """Returns the path of the nearest module above that runs as a graph; None if there is none."""
    for path in with_ancestors(sch.path)[1:]:
        if layers_of(sch.tree.module.get_submodule(path), Traced):
            return path
    return None


def scheduled_below(sch: ScheduledModule) -> list[nn.Module]:
    """Returns the modules below one whose calls `build` will wrap."""
    paths = [work.path for work in sch.tree.deferred if work.path != sch.path and is_within(work.path, sch.path)]
    return [sch.tree.module.get_submodule(path) for path in paths]


def check_read(sch: ScheduledModule, primitive: str, layers: Sequence[nn.Module]) -> None:
    """Checks that graphs call the layers whose weights they read: a primitive on a layer would otherwise be lost there.

    Raises:
        ScheduleError: a graph reads the weight of a layer without calling it; the message names the layer.
    """
    alive, read = used_modules(sch.tree.module)
    modules_read = {module for module, name in read if name == "weight"}
    for path, module in sch.module.named_modules():
        if module in layers and module in modules_read - alive:
            raise ScheduleError(
                f"{primitive} on '{sch.name}': a graph reads the weights of '{path}' without calling it, so this "
                f"would be lost there; use {primitive} before trace and replace, or keep it a call"
            )
