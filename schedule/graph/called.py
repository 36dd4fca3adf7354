"""Finds what a model still calls if some of its modules run as graphs."""

from collections.abc import Collection, Sequence

from torch import fx, nn

from ...base.errors import ScheduleError
from ..forward import layers_of
from ..tree import ScheduledModule, is_within, with_ancestors
from .operations import SubgraphCall
from .trace import ITSELF, Traced


def used_modules(
    root: nn.Module, without: Collection[fx.Node] = ()
) -> tuple[set[nn.Module], set[tuple[nn.Module, str]]]:
    """Modules that the model still calls, and the attributes (module, name) that its graphs read.

    Args:
        without: nodes that do not count.
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
    """Refuses work around the calls of a module that a graph above it no longer calls.

    Raises:
        ScheduleError: its operations are inlined in that graph, were replaced there, or it was never called.
    """
    traced = graph_above(sch)
    # A list of modules is not called.
    if traced is None or type(sch.module).forward is nn.Module.forward:
        return
    if sch.module not in used_modules(sch.tree.module)[0]:
        above = f"sch['{traced}']" if traced else "sch"
        raise ScheduleError(
            f"{primitive} on '{sch.name}': the graph of '{traced or 'the root'}' does not call it, but has its operations "
            f"itself, has others in their place, or skips it, so this would do nothing; use {primitive} before "
            f"{above}.trace, keep it a call there (leaves=), or use what {above}.find returns"
        )


def graph_above(sch: ScheduledModule) -> str | None:
    """Path of the nearest module above that runs as a graph; None if there is none."""
    for path in with_ancestors(sch.path)[1:]:
        if layers_of(sch.tree.module.get_submodule(path), Traced):
            return path
    return None


def scheduled_below(sch: ScheduledModule) -> list[nn.Module]:
    """Modules below one whose calls `build` will wrap."""
    paths = [each.path for each in sch.tree.deferred if each.path != sch.path and is_within(each.path, sch.path)]
    return [sch.tree.module.get_submodule(path) for path in paths]


def check_read(sch: ScheduledModule, primitive: str, layers: Sequence[nn.Module]) -> None:
    """Refuses work on layers whose weights graphs read without calling the layer.

    Raises:
        ScheduleError: there is such a layer; the message names it.
    """
    alive, read = used_modules(sch.tree.module)
    of = {module for module, name in read if name == "weight"}
    for path, module in sch.module.named_modules():
        if module in layers and module in of - alive:
            raise ScheduleError(
                f"{primitive} on '{sch.name}': a graph reads the weights of '{path}' without calling it, so this "
                f"would be lost there; use {primitive} before trace and replace, or keep it a call"
            )
