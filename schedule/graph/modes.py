"""One graph of two: of what a module does in training, and in evaluation."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from ..._torch import tree_flatten, tree_unflatten
from ...errors import ScheduleError, TraceError


def check(value: Any, expected: Any, where: str) -> None:
    """Refuses a call on which the traced code would have gone another way than in its example."""
    if value != expected:
        raise ScheduleError(
            f"a traced module was traced where {where} is {expected!r}, but here it is {value!r}; trace it with examples= "
            "of this call"
        )


def check_in(training: bool, mode: bool, value: Any, expected: Any, where: str) -> None:
    """The same in one mode alone: `mode` is whether in training or in evaluation."""
    if training == mode:
        check(value, expected, where)


def choose(training: bool, trains: Any, evaluates: Any) -> Any:
    """One of two values, by whether the module trains."""
    return trains if training else evaluates


def merged(trains: fx.Graph, evaluates: fx.Graph) -> fx.Graph:
    """One graph of two that differ in what operations are given and in what they check only, which it chooses by the
    module's mode.

    Raises:
        TraceError: they differ in what they do.
    """
    pairs = list(_aligned(trains, evaluates))
    head = next(node for node in trains.nodes if node.op != "placeholder")
    with trains.inserting_before(head):
        training = trains.get_attr("training")
    other: dict[fx.Node, fx.Node] = {}
    for i, (one, two) in enumerate(pairs):
        if two is None:
            assert one is not None
            _in_one_mode(one, training, True)
        elif one is None:
            following = next(node for node, _ in pairs[i:] if node is not None)
            with trains.inserting_before(following):
                other[two] = trains.node_copy(two, other.__getitem__)
            _in_one_mode(other[two], training, False)
        else:
            other[two] = one
            if one.op != "placeholder":
                args, kwargs = fx.node.map_arg((two.args, two.kwargs), other.__getitem__)
                _chosen(trains, training, one, (args, dict(kwargs)))
    return trains


def _aligned(trains: fx.Graph, evaluates: fx.Graph) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Nodes that do the same; None beside a check, or what is computed for one, that there is in one mode alone."""
    ones, twos = list(trains.nodes), list(evaluates.nodes)
    checks = _checks(trains) | _checks(evaluates)
    while ones or twos:
        one, two = next(iter(ones), None), next(iter(twos), None)
        kinds = [None if each is None else (each.op, each.target, each in checks) for each in (one, two)]
        if kinds[0] == kinds[1]:
            yield ones.pop(0), twos.pop(0)
        elif one in checks:
            yield ones.pop(0), None
        elif two in checks:
            yield None, twos.pop(0)
        else:
            raise TraceError("it does other operations in training than in evaluation; trace the modules below it")


def _checks(graph: fx.Graph) -> set[fx.Node]:
    """The checks of a graph, and what is computed for them alone."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target is check or (node.op != "placeholder" and node.users and found.issuperset(node.users)):
            found.add(node)
    return found


def _in_one_mode(node: fx.Node, training: fx.Node, mode: bool) -> None:
    """Has a check be made in one mode alone."""
    if node.target is check:
        node.target = check_in
        node.args = (training, mode, *node.args)


def _chosen(graph: fx.Graph, training: fx.Node, node: fx.Node, evaluates: tuple[Any, dict[str, Any]]) -> None:
    """Has an operation be given what it is in training, or what it is in evaluation."""
    mine, spec = tree_flatten((node.args, dict(node.kwargs)))
    theirs, shape = tree_flatten(evaluates)
    if spec != shape:
        raise TraceError(f"{node.name} is given other arguments in training than in evaluation")
    changed = False
    for i, (left, right) in enumerate(zip(mine, theirs)):
        if left is not right and (isinstance(left, fx.Node) or isinstance(right, fx.Node) or left != right):
            changed = True
            if (left, right) == (True, False):
                mine[i] = training
            else:
                with graph.inserting_before(node):
                    mine[i] = graph.call_function(choose, (training, left, right))
    if changed:
        node.args, node.kwargs = tree_unflatten(mine, spec)
