"""Subgraphs of traced modules, as returned by `find`."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...base._torch import is_erased
from ...base.errors import ScheduleError
from ..calls import as_plain
from ..forward import layers_of
from ..tree import ScheduledModule, join
from .pattern import Attribute, ClosestMiss, match, trace_pattern
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
    """Their graph."""
    nodes: tuple[fx.Node, ...]
    """Matched nodes in the order of the graph."""
    inputs: tuple[Any, ...]
    """Values of the pattern's parameters: nodes, attributes of modules, or constants."""
    outputs: tuple[fx.Node, ...]
    """Nodes whose values the pattern returns."""
    pattern: Pattern | None
    where: Where | None = None

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def __str__(self) -> str:
        graph, _ = extract(self)
        lines = graph.python_code("self").src.strip().splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("def "))
        return "\n".join(line.split("  #")[0] for line in lines[start:] if line.strip())

    __repr__ = __str__

    def to_recipe(self) -> dict[str, Any]:
        """The handle as plain data: pattern, location, and index of the match."""
        plain = {"find": as_plain(self.pattern, "find"), "at": self.path, "nodes": self.names}
        return plain if self.where is None else {**plain, "where": as_plain(self.where, "find")}


def traced_below(sch: ScheduledModule) -> list[tuple[str, nn.Module, Traced]]:
    """Traced modules at and below a schedule, with their paths."""
    return [
        (join(sch.path, path), module, layer)
        for path, module in sch.module.named_modules()
        for layer in layers_of(module, Traced)
    ]


def find_subgraphs(
    sch: ScheduledModule, pattern: Pattern | None, where: Where | None = None, explain: bool = False
) -> list[Subgraph]:
    """Non-overlapping matches at and below a schedule, in the order of modules and nodes.

    Raises:
        ScheduleError: nothing is traced; the pattern is neither a regular expression nor a function; or there is no
            match, with `explain`.
    """
    places = traced_below(sch)
    if not places:
        raise ScheduleError(f"find on '{sch.name}': trace it first, or a module below it")
    if pattern is None and where is None:
        raise ScheduleError(f"find on '{sch.name}': pass a pattern, or where= to say which nodes")
    miss = ClosestMiss()
    if pattern is None or isinstance(pattern, str):
        found = [each for place in places for each in _single(*place, pattern, where)]
    elif callable(pattern):
        graph = trace_pattern(pattern)
        matches = [each for place in places for each in _by_pattern(*place, pattern, graph, miss)]
        found = [each for each in matches if where is None or any(map(where, each.nodes))]
    else:
        raise ScheduleError(
            f"find on '{sch.name}': pattern must be a regular expression or a function, but got {pattern!r}"
        )
    if explain and not found:
        names = dict.fromkeys(_name(node) for _, _, layer in places for node in layer.graph.nodes if _named(node))
        reason = miss.difference or f"there are the operations {', '.join(names)}"
        raise ScheduleError(f"find on '{sch.name}': there is no match; {reason}")
    return found


def _named(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output", "get_attr")


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _single(
    path: str, module: nn.Module, layer: Traced, pattern: str | None, where: Where | None
) -> Iterable[Subgraph]:
    for node in layer.graph.nodes:
        fits = _named(node) and (pattern is None or re.fullmatch(pattern, _name(node)))
        if fits and (where is None or where(node)):
            yield Subgraph(path, module, layer, (node,), tuple(node.all_input_nodes), (node,), pattern, where)


def _by_pattern(
    path: str, module: nn.Module, layer: Traced, pattern: Pattern, graph: fx.Graph, miss: ClosestMiss
) -> Iterable[Subgraph]:
    used: set[fx.Node] = set()
    order = {node: i for i, node in enumerate(layer.graph.nodes)}
    parameters = [node for node in graph.nodes if node.op == "placeholder"]
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for binding, outputs in match(layer.graph, module, graph, miss):
        nodes = sorted((binding[node] for node in inner if node in binding), key=order.__getitem__)
        inputs = tuple(binding[node] for node in parameters if node in binding)
        if used.isdisjoint(nodes) and not any(value is node for value in inputs for node in nodes):
            used.update(nodes)
            yield Subgraph(path, module, layer, tuple(nodes), inputs, tuple(outputs), pattern)


def extract(subgraph: Subgraph) -> tuple[fx.Graph, list[fx.Node]]:
    """The subgraph as a separate graph, and the surrounding nodes that are its inputs."""
    graph, mapped, outside = fx.Graph(), {}, []
    for node in subgraph.nodes:
        for each in node.all_input_nodes:
            if each not in subgraph.nodes and each not in outside:
                outside.append(each)
    for node in outside:
        mapped[node] = graph.placeholder(node.name)
    for node in subgraph.nodes:
        mapped[node] = graph.node_copy(node, mapped.__getitem__)
    results = tuple(mapped[node] for node in subgraph.outputs)
    graph.output(results[0] if len(results) == 1 else results)
    return graph, outside


def chosen(sch: ScheduledModule, primitive: str, given: Any) -> list[Subgraph]:
    """Checks the handles given to a primitive.

    Raises:
        ScheduleError: they are not handles of this model, or stale; or an inner value of one is used outside it.
    """
    handles = list(given) if isinstance(given, (list, tuple)) else [given]
    if not handles or not all(isinstance(each, Subgraph) for each in handles):
        raise ScheduleError(f"{primitive} on '{sch.name}': subgraph must be what find returned, but got {given!r}")
    owners: dict[fx.Node, Subgraph] = {}
    for each in handles:
        for node in each.nodes:
            if (other := owners.setdefault(node, each)) is not each:
                raise ScheduleError(
                    f"{primitive} on '{sch.name}': subgraphs must not overlap, but '{node.name}' is in {other.names} and "
                    f"in {each.names}"
                )
    here = {layer for _, _, layer in traced_below(sch)}
    for each in handles:
        label = f"{primitive} of {each.names} in '{each.path or sch.name}'"
        if each.layer not in here:
            raise ScheduleError(f"{label}: it must be a subgraph of '{sch.name}' or of a module below it")
        if any(is_erased(node) for node in each.nodes):
            raise ScheduleError(f"{label}: the graph has changed since find; find it again")
        for node in each.nodes:
            users = [user.name for user in node.users if user not in each.nodes]
            if users and node not in each.outputs:
                raise ScheduleError(
                    f"{label}: what is inside must be used inside only, but '{node.name}' is used by {', '.join(users)}"
                )
        order = {node: i for i, node in enumerate(each.layer.graph.nodes)}
        entered = [order[other] for node in each.nodes for other in node.all_input_nodes if other not in each.nodes]
        for node in each.outputs:
            early = [
                user.name for user in node.users if user not in each.nodes and order[user] < max(entered, default=0)
            ]
            if early:
                raise ScheduleError(
                    f"{label}: {', '.join(early)} must come after it, but the rest of it depends on that"
                )
    return handles


def merged(label: str, handles: list[Subgraph]) -> Subgraph:
    """Merges several subgraphs of one graph to one with as many outputs; common inputs occur once.

    Raises:
        ScheduleError: they are in several graphs.
    """
    first = handles[0]
    if any(each.layer is not first.layer for each in handles):
        raise ScheduleError(
            f"{label}: subgraphs that are replaced together must be in one graph, but are in "
            f"{', '.join(dict.fromkeys(each.path or 'the root' for each in handles))}"
        )
    order = {node: i for i, node in enumerate(first.layer.graph.nodes)}
    nodes = sorted({node for each in handles for node in each.nodes}, key=order.__getitem__)
    inputs: list[Any] = []
    for value in (value for each in handles for value in each.inputs):
        if not any(value is other or (isinstance(value, Attribute) and value == other) for other in inputs):
            inputs.append(value)
    outputs = tuple(node for each in handles for node in each.outputs)
    return Subgraph(first.path, first.module, first.layer, tuple(nodes), tuple(inputs), outputs, first.pattern)


def from_recipe(at: ScheduledModule, plain: Any, value: Callable[..., Any]) -> Subgraph:
    """Returns the subgraph of a handle written by `to_recipe`."""
    root = ScheduledModule(at.tree)
    sch = root[plain["at"]] if plain["at"] else root
    found = find_subgraphs(sch, value(plain["find"], at), value(plain.get("where"), at))
    for each in found:
        if each.path == sch.path and each.names == plain["nodes"]:
            return each
    parts = {name: each for each in found if each.path == sch.path for name in each.names}
    if all(name in parts for name in plain["nodes"]):  # several subgraphs that were replaced together
        return merged("recipe", list(dict.fromkeys(parts[name] for name in plain["nodes"])))
    raise ScheduleError(f"recipe: no match in '{sch.name}' consists of {plain['nodes']}")
