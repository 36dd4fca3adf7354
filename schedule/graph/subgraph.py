"""Subgraphs of traced modules: what `find` returns, and how they are fused, replaced and checkpointed."""

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..._torch import children_of, is_erased
from ...errors import ScheduleError
from ..calls import as_plain
from ..forward import layers_of
from ..tree import ScheduledModule, join
from .compiled import compiled
from .pattern import Attribute, match, trace_pattern
from .trace import ITSELF, Traced, function_of

Pattern = str | Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Nodes of a traced module that match a pattern; prints as code."""

    path: str
    """Path of the traced module."""
    layer: Traced
    """The graph they are in."""
    nodes: tuple[fx.Node, ...]
    """The matched nodes in the order of the graph."""
    inputs: tuple[Any, ...]
    """What stands for the pattern's parameters: nodes, attributes of modules, or constants."""
    outputs: tuple[fx.Node, ...]
    """The nodes whose values the pattern returns."""
    pattern: Pattern
    """What was looked for."""

    @property
    def names(self) -> list[str]:
        """Names of the nodes."""
        return [node.name for node in self.nodes]

    def __str__(self) -> str:
        graph, _ = extract(self)
        lines = graph.python_code("self").src.strip().splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("def "))
        return "\n".join(line.split("  #")[0] for line in lines[start:] if line.strip())

    __repr__ = __str__

    def to_recipe(self) -> dict[str, Any]:
        """The handle as plain data: what to look for where, and which match is meant."""
        return {"find": as_plain(self.pattern, "find"), "at": self.path, "nodes": self.names}


class SubgraphCall:
    """A subgraph as one operation of the graph around it, called with the traced module and its inputs."""

    def __init__(self, graph: fx.Graph, name: str, compiler: Any = "none", checkpoint: Any = None) -> None:
        self.graph = graph
        self.compiler = compiler
        self.checkpoint = checkpoint
        self.function: Callable[..., Any] | None = None
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def fresh(self) -> "SubgraphCall":
        """The same region, not compiled yet."""
        return SubgraphCall(self.graph, self.__name__, self.compiler, self.checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "function": None}

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        if self.function is None:
            self.function = compiled(function_of(self.graph), self.compiler)
        if self.checkpoint is not None:
            return torch_checkpoint(self.function, module, *inputs, use_reentrant=False, **self.checkpoint())
        return self.function(module, *inputs)


class Call:
    """Any callable as an operation of a graph, under a name that code can have."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        name = re.sub(r"\W", "_", getattr(function, "__name__", type(function).__name__)).strip("_")
        self.__name__ = self.__qualname__ = name or "function"
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def traced_below(sch: ScheduledModule) -> list[tuple[str, nn.Module, Traced]]:
    """The traced modules at and below a schedule, with their paths."""
    return [
        (join(sch.path, path), module, layer)
        for path, module in sch.module.named_modules()
        for layer in layers_of(module, Traced)
    ]


def find_subgraphs(sch: ScheduledModule, pattern: Pattern) -> list[Subgraph]:
    """Matches at and below a schedule that do not overlap, in the order of modules and nodes.

    Raises:
        ScheduleError: nothing is traced; the pattern is neither a regular expression nor a function.
    """
    places = traced_below(sch)
    if not places:
        raise ScheduleError(f"find on '{sch.name}': trace it first, or a module below it")
    if isinstance(pattern, str):
        return [each for place in places for each in _by_name(*place, pattern)]
    if not callable(pattern):
        raise ScheduleError(
            f"find on '{sch.name}': pattern must be a regular expression or a function, but got {pattern!r}"
        )
    graph = trace_pattern(pattern)
    return [each for place in places for each in _by_pattern(*place, pattern, graph)]


def _by_name(path: str, module: nn.Module, layer: Traced, pattern: str) -> Iterable[Subgraph]:
    for node in layer.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if re.fullmatch(pattern, target):
            yield Subgraph(path, layer, (node,), tuple(node.all_input_nodes), (node,), pattern)


def _by_pattern(path: str, module: nn.Module, layer: Traced, pattern: Pattern, graph: fx.Graph) -> Iterable[Subgraph]:
    taken: set[fx.Node] = set()
    order = {node: i for i, node in enumerate(layer.graph.nodes)}
    parameters = [node for node in graph.nodes if node.op == "placeholder"]
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for binding, outputs in match(layer.graph, module, graph):
        nodes = sorted((binding[node] for node in inner if node in binding), key=order.__getitem__)
        inputs = tuple(binding[node] for node in parameters if node in binding)
        if taken.isdisjoint(nodes) and not any(value is node for value in inputs for node in nodes):
            taken.update(nodes)
            yield Subgraph(path, layer, tuple(nodes), inputs, tuple(outputs), pattern)


def extract(subgraph: Subgraph) -> tuple[fx.Graph, list[fx.Node]]:
    """The subgraph as a graph of its own, and the nodes around it that are its inputs."""
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
    """The handles that a primitive was given, checked.

    Raises:
        ScheduleError: not handles of this model; a value inside of one is used outside of it; stale.
    """
    handles = list(given) if isinstance(given, (list, tuple)) else [given]
    if not handles or not all(isinstance(each, Subgraph) for each in handles):
        raise ScheduleError(f"{primitive} on '{sch.name}': subgraph must be what find returned, but got {given!r}")
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
        last = max(order[node] for node in each.nodes)
        for node in each.outputs:
            early = [user.name for user in node.users if user not in each.nodes and order[user] < last]
            if early:
                raise ScheduleError(
                    f"{label}: {', '.join(early)} must come after it, but the rest of it depends on that"
                )
    return handles


def fuse_subgraph(sch: ScheduledModule, given: Any, compiler: Any) -> None:
    """Turns subgraphs into one operation each, run through a compiler."""
    for each in chosen(sch, "fuse", given):
        graph, outside = extract(each)
        name = "fused_" + "_".join(dict.fromkeys(re.sub(r"\W|_?\d+$", "", n) for n in each.names))
        _insert(each, SubgraphCall(graph, name, compiler), outside, with_module=True)


def checkpoint_subgraph(sch: ScheduledModule, given: Any, extra: Callable[[], dict[str, Any]]) -> None:
    """Turns subgraphs into one operation each, recomputed in the backward pass."""
    for each in chosen(sch, "checkpoint", given):
        graph, outside = extract(each)
        _insert(each, SubgraphCall(graph, "checkpointed", checkpoint=extra), outside, with_module=True)


def replace_subgraph(sch: ScheduledModule, new: Any, given: Any) -> None:
    """Puts a call of `new` with the pattern's inputs in the place of subgraphs."""
    handles = chosen(sch, "replace", given)
    if not callable(new):
        raise ScheduleError(f"replace on '{sch.name}': new must be a module or a function, but got {new!r}")
    owned = isinstance(new, nn.Module) and any(True for _ in new.parameters())
    if owned and len(handles) > 1:
        raise ScheduleError(
            f"replace on '{sch.name}': one module with parameters cannot stand for {len(handles)} subgraphs, "
            "or they would share them; replace them one by one"
        )
    for each in handles:
        _arity(sch, new, each)
    for each in handles:
        if isinstance(new, nn.Module):
            module = sch.tree.module.get_submodule(each.path)
            taken = children_of(module)
            name = next(n for n in (f"replaced_{i}" for i in range(len(taken) + 1)) if n not in taken)
            module.add_module(name, new.train(module.training))
            _insert(each, name, list(each.inputs), with_module=False)
        else:
            _insert(each, Call(new), list(each.inputs), with_module=False)


def _arity(sch: ScheduledModule, new: Any, each: Subgraph) -> None:
    try:
        signature = inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except ValueError:
        # A builtin that does not tell.
        return
    try:
        signature.bind(*each.inputs)
    except TypeError as error:
        raise ScheduleError(
            f"replace on '{sch.name}': new is called with the {len(each.inputs)} inputs of the pattern, but {error}"
        ) from error


def _insert(each: Subgraph, target: Any, inputs: Sequence[Any], with_module: bool) -> None:
    """Puts one node in the place of a subgraph's nodes."""
    graph = each.layer.graph
    last = [node for node in graph.nodes if node in each.nodes][-1]
    with graph.inserting_after(last):
        args = []
        anchor = last
        for value in inputs:
            if isinstance(value, Attribute):
                with graph.inserting_after(anchor):
                    value = anchor = graph.get_attr(value.target)
            args.append(value)
        if with_module:
            with graph.inserting_after(anchor):
                # The traced module itself: `self` in the graph's code.
                anchor = graph.get_attr(ITSELF)
            args.insert(0, anchor)
    with graph.inserting_after(anchor):
        add = graph.call_module if isinstance(target, str) else graph.call_function
        new = add(target, tuple(args))
    if len(each.outputs) == 1:
        each.outputs[0].replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    else:
        for i, output in enumerate(each.outputs):
            with graph.inserting_after(new):
                item = graph.call_function(operator.getitem, (new, i))
            output.replace_all_uses_with(item, delete_user_cb=lambda user: user is not new)
    for node in reversed(each.nodes):
        graph.erase_node(node)
    each.layer.changed()


def from_recipe(at: ScheduledModule, plain: Any, value: Callable[..., Any]) -> Subgraph:
    """The subgraph that a handle written by `to_recipe` meant."""
    root = ScheduledModule(at.tree)
    sch = root[plain["at"]] if plain["at"] else root
    for each in find_subgraphs(sch, value(plain["find"], at)):
        if each.path == sch.path and each.names == plain["nodes"]:
            return each
    raise ScheduleError(f"recipe: no match in '{sch.name}' consists of {plain['nodes']}")
