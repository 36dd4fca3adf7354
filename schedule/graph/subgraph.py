"""Subgraphs of traced modules, as returned by `find`."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from ...base._torch import is_erased
from ...base.errors import ScheduleError
from ..forward import layers_of
from ..tree import ScheduledModule, join
from .pattern import Attribute, match, trace_pattern
from .trace import Traced

Pattern = str | Callable[..., Any]
Where = Callable[[fx.Node], bool]


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Nodes of a traced module that match a pattern; prints as code."""

    path: str
    """Path of the traced module."""
    module: nn.Module
    """The traced module."""
    layer: Traced
    """The layer that runs the graph."""
    nodes: tuple[fx.Node, ...]
    """Matched nodes in the order of the graph."""
    inputs: tuple[Any, ...]
    """Values of the pattern's parameters: nodes, attributes of modules, or constants."""
    outputs: tuple[fx.Node, ...]
    """Nodes whose values the pattern returns."""

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def __str__(self) -> str:
        graph, _ = extract(self)
        lines = graph.python_code("self").src.strip().splitlines()
        start = next(index for index, line in enumerate(lines) if line.startswith("def "))
        return "\n".join(line.split("  #")[0] for line in lines[start:] if line.strip())

    __repr__ = __str__


def traced_below(sch: ScheduledModule) -> list[tuple[str, nn.Module, Traced]]:
    """Returns the traced modules at and below a schedule, with their paths."""
    return [
        (join(sch.path, path), module, layer)
        for path, module in sch.module.named_modules()
        for layer in layers_of(module, Traced)
    ]


def find_subgraphs(sch: ScheduledModule, pattern: Pattern | None, predicate: Where | None = None) -> list[Subgraph]:
    """Returns the non-overlapping matches at and below a schedule, in the order of modules and nodes.

    Raises:
        ScheduleError: no module is traced; or the pattern is neither a regular expression nor a function.
    """
    traced_modules = traced_below(sch)
    if not traced_modules:
        raise ScheduleError(f"find on '{sch.name}': trace it first, or a module below it")
    if pattern is None and predicate is None:
        raise ScheduleError(f"find on '{sch.name}': pass a pattern, or a predicate on nodes as where=")
    if pattern is None or isinstance(pattern, str):
        return [
            subgraph for traced_module in traced_modules for subgraph in _single(*traced_module, pattern, predicate)
        ]
    if not callable(pattern):
        raise ScheduleError(
            f"find on '{sch.name}': pattern must be a regular expression or a function, but got {pattern!r}"
        )
    graph = trace_pattern(pattern)
    return [
        subgraph
        for traced_module in traced_modules
        for subgraph in _by_pattern(*traced_module, graph)
        if predicate is None or any(map(predicate, subgraph.nodes))
    ]


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _single(
    path: str, module: nn.Module, layer: Traced, pattern: str | None, predicate: Where | None
) -> Iterable[Subgraph]:
    for node in layer.graph.nodes:
        is_operation = node.op not in ("placeholder", "output", "get_attr")
        if (
            is_operation
            and (pattern is None or re.fullmatch(pattern, _name(node)))
            and (predicate is None or predicate(node))
        ):
            yield Subgraph(path, module, layer, (node,), tuple(node.all_input_nodes), (node,))


def _by_pattern(path: str, module: nn.Module, layer: Traced, graph: fx.Graph) -> Iterable[Subgraph]:
    used: set[fx.Node] = set()
    order = {node: position for position, node in enumerate(layer.graph.nodes)}
    parameters = [node for node in graph.nodes if node.op == "placeholder"]
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for binding, outputs in match(layer.graph, module, graph):
        nodes = sorted((binding[node] for node in inner if node in binding), key=order.__getitem__)
        inputs = tuple(binding[node] for node in parameters if node in binding)
        # The first of overlapping matches wins. A node cannot be an input of its own subgraph.
        if used.isdisjoint(nodes) and not any(value is node for value in inputs for node in nodes):
            used.update(nodes)
            yield Subgraph(path, module, layer, tuple(nodes), inputs, tuple(outputs))


def extract(subgraph: Subgraph) -> tuple[fx.Graph, list[fx.Node]]:
    """Returns the subgraph as a separate graph, and the surrounding nodes that are its inputs."""
    graph, copies, inputs = fx.Graph(), {}, []
    for node in subgraph.nodes:
        for input_node in node.all_input_nodes:
            if input_node not in subgraph.nodes and input_node not in inputs:
                inputs.append(input_node)
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in subgraph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = tuple(copies[node] for node in subgraph.outputs)
    graph.output(results[0] if len(results) == 1 else results)
    return graph, inputs


def chosen(sch: ScheduledModule, primitive: str, subgraphs: Any) -> list[Subgraph]:
    """Returns the subgraphs that a primitive was called with as a list, after checking them.

    Raises:
        ScheduleError: they are not subgraphs of this model, overlap, or are stale; or an inner value is used outside.
    """
    handles = list(subgraphs) if isinstance(subgraphs, (list, tuple)) else [subgraphs]
    if not handles or not all(isinstance(handle, Subgraph) for handle in handles):
        raise ScheduleError(f"{primitive} on '{sch.name}': subgraph must be what find returned, but got {subgraphs!r}")
    owners: dict[fx.Node, Subgraph] = {}
    for handle in handles:
        for node in handle.nodes:
            if (earlier := owners.setdefault(node, handle)) is not handle:
                raise ScheduleError(
                    f"{primitive} on '{sch.name}': subgraphs must not overlap, but '{node.name}' is in {earlier.names} and "
                    f"in {handle.names}"
                )
    layers_below = {layer for _, _, layer in traced_below(sch)}
    for handle in handles:
        label = f"{primitive} of {handle.names} in '{handle.path or sch.name}'"
        if handle.layer not in layers_below:
            raise ScheduleError(f"{label}: it must be a subgraph of '{sch.name}' or of a module below it")
        if any(is_erased(node) for node in handle.nodes):
            raise ScheduleError(f"{label}: the graph has changed since find; find it again")
        for node in handle.nodes:
            names = [user.name for user in node.users if user not in handle.nodes]
            if names and node not in handle.outputs:
                raise ScheduleError(
                    f"{label}: inner values must be used inside only, but '{node.name}' is used by {', '.join(names)}"
                )
        order = {node: position for position, node in enumerate(handle.layer.graph.nodes)}
        inputs = {value for node in handle.nodes for value in node.all_input_nodes if value not in handle.nodes}
        last_input = max((order[node] for node in inputs), default=0)
        for node in handle.outputs:
            users = [user for user in node.users if user not in handle.nodes]
            early_users = [user.name for user in users if order[user] < last_input]
            if early_users:
                raise ScheduleError(
                    f"{label}: {', '.join(early_users)} must come after it, but the rest of it depends on that"
                )
    return handles


def merged(label: str, handles: list[Subgraph]) -> Subgraph:
    """Merges several subgraphs of one graph to one with as many outputs; common inputs occur once.

    Raises:
        ScheduleError: the subgraphs are in several graphs.
    """
    first_subgraph = handles[0]
    if any(handle.layer is not first_subgraph.layer for handle in handles):
        raise ScheduleError(
            f"{label}: subgraphs that are replaced together must be in one graph, but are in "
            f"{', '.join(dict.fromkeys(handle.path or 'the root' for handle in handles))}"
        )
    order = {node: position for position, node in enumerate(first_subgraph.layer.graph.nodes)}
    nodes = sorted({node for handle in handles for node in handle.nodes}, key=order.__getitem__)
    inputs: list[Any] = []
    for value in (value for handle in handles for value in handle.inputs):
        if not any(value is earlier or (isinstance(value, Attribute) and value == earlier) for earlier in inputs):
            inputs.append(value)
    outputs = tuple(node for handle in handles for node in handle.outputs)
    return replace(first_subgraph, nodes=tuple(nodes), inputs=tuple(inputs), outputs=outputs)
