"""Merges the graphs of a module in training and in evaluation."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import fx

from ...base._torch import OpOverload, schema_of, tree_flatten, tree_unflatten
from ...base.errors import ScheduleError, TraceError


def check(value: Any, expected: Any, where: str) -> None:
    """Refuses a call for which the traced code would have taken another path than in its example."""
    if value != expected:
        raise ScheduleError(
            f"a traced module was traced where {where} is {expected!r}, but here it is {value!r}; trace it with examples= "
            "of this call"
        )


def check_in(training: bool, mode: bool, value: Any, expected: Any, where: str) -> None:
    """Like `check`, but in one mode only: `mode` is True for training, False for evaluation."""
    if training == mode:
        check(value, expected, where)


def choose(training: bool, trains: Any, evaluates: Any) -> Any:
    """Returns one of two values, by the module's training mode."""
    return trains if training else evaluates


def merged(trains: fx.Graph, evaluates: fx.Graph) -> fx.Graph:
    """Merges two graphs that differ only in the arguments of operations and in their checks; the module's mode
    selects.

    Raises:
        TraceError: they have different operations.
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
            if _is_contiguous(one):
                other.update({two: one for two, each in other.items() if each is one.args[0]})
        elif one is None:
            following = next(node for node, _ in pairs[i:] if node is not None)
            with trains.inserting_before(following):
                other[two] = trains.node_copy(two, other.__getitem__)
            _in_one_mode(other[two], training, False)
            if _is_contiguous(two):
                # Also in training, where it has no effect: later operations then have equal inputs.
                given = other[two].args[0]
                given.replace_all_uses_with(other[two], delete_user_cb=lambda user, own=other[two]: user is not own)
        else:
            other[two] = one
            if one.op != "placeholder":
                args, kwargs = fx.node.map_arg((two.args, two.kwargs), other.__getitem__)
                _chosen(trains, training, one, (args, dict(kwargs)))
    return trains


def _aligned(trains: fx.Graph, evaluates: fx.Graph) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Pairs of nodes that do the same; None for nodes that may exist in one mode only: checks, their inputs, or
    operations that make a tensor contiguous, which torch.export omits if it is.
    """
    ones, twos = list(trains.nodes), list(evaluates.nodes)
    checks = _checks(trains) | _checks(evaluates)
    free = checks | {node for node in (*ones, *twos) if _is_contiguous(node)}
    while ones or twos:
        one, two = next(iter(ones), None), next(iter(twos), None)
        kinds = [None if each is None else (each.op, each.target, each in checks) for each in (one, two)]
        if kinds[0] == kinds[1]:
            yield ones.pop(0), twos.pop(0)
        elif one in free:
            yield ones.pop(0), None
        elif two in free:
            yield None, twos.pop(0)
        else:
            raise TraceError("it does other operations in training than in evaluation; trace the modules below it")


def _checks(graph: fx.Graph) -> set[fx.Node]:
    """Checks of a graph, and nodes used only by them."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target is check or (node.op != "placeholder" and node.users and found.issuperset(node.users)):
            found.add(node)
    return found


def _is_contiguous(node: fx.Node) -> bool:
    return str(node.target) == "aten.contiguous.default" and not node.kwargs


def _in_one_mode(node: fx.Node, training: fx.Node, mode: bool) -> None:
    """Restricts a check to one mode."""
    if node.target is check:
        node.target = check_in
        node.args = (training, mode, *node.args)


def _filled(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments of an operator, with defaults for missing ones."""
    if not isinstance(node.target, OpOverload):
        return args
    rest = itertools.takewhile(lambda each: not each.kwarg_only, schema_of(node.target).arguments[len(args) :])
    return (*args, *(each.default_value for each in rest))


def _chosen(graph: fx.Graph, training: fx.Node, node: fx.Node, evaluates: tuple[Any, dict[str, Any]]) -> None:
    """Selects the arguments of an operator by the training mode."""
    given, others = _filled(node, node.args), _filled(node, evaluates[0])
    own_values, spec = tree_flatten((given, dict(node.kwargs)))
    other_values, shape = tree_flatten((others, evaluates[1]))
    if spec != shape:
        raise TraceError(f"{node.name} is given other arguments in training than in evaluation")
    changed = False
    for i, (left, right) in enumerate(zip(own_values, other_values)):
        if left is not right and (isinstance(left, fx.Node) or isinstance(right, fx.Node) or left != right):
            changed = True
            if (left, right) == (True, False):
                own_values[i] = training
            else:
                with graph.inserting_before(node):
                    own_values[i] = graph.call_function(choose, (training, left, right))
    if changed:
        node.args, node.kwargs = tree_unflatten(own_values, spec)
