"""Merges the graphs of a module in training and in evaluation."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import fx

from ...base._torch import OpOverload, schema_of, tree_flatten, tree_unflatten
from ...base.errors import ScheduleError, TraceError


def check(value: Any, expected: Any, subject: str) -> None:
    """Raises ScheduleError for a call in which the control flow of the traced code would differ from the example's."""
    if value != expected:
        raise ScheduleError(
            f"a traced module was traced where {subject} is {expected!r}, but here it is {value!r}; trace it with examples= "
            "of this call"
        )


def check_in(training: bool, mode: bool, value: Any, expected: Any, subject: str) -> None:
    """Like `check`, but in one mode only: `mode` is True for training, False for evaluation."""
    if training == mode:
        check(value, expected, subject)


def choose(training: bool, trains: Any, evaluates: Any) -> Any:
    """Returns one of two values, by the module's training mode."""
    return trains if training else evaluates


def merged(trains: fx.Graph, evaluates: fx.Graph) -> fx.Graph:
    """Merges the graphs of both modes, which may differ in arguments of operations and in checks; returns the first one.

    The merged graph selects by the module's training mode.

    Raises:
        TraceError: the graphs have different operations.
    """
    pairs = list(_aligned(trains, evaluates))
    head = next(node for node in trains.nodes if node.op != "placeholder")
    with trains.inserting_before(head):
        training = trains.get_attr("training")
    counterparts: dict[fx.Node, fx.Node] = {}
    for index, (train_node, eval_node) in enumerate(pairs):
        if eval_node is None:
            assert train_node is not None
            _restrict(train_node, training, True)
            if _is_contiguous(train_node):
                replaced = [node for node, counterpart in counterparts.items() if counterpart is train_node.args[0]]
                counterparts.update(dict.fromkeys(replaced, train_node))
        elif train_node is None:
            following = next(node for node, _ in pairs[index:] if node is not None)
            with trains.inserting_before(following):
                copied = counterparts[eval_node] = trains.node_copy(eval_node, counterparts.__getitem__)
            _restrict(copied, training, False)
            if _is_contiguous(eval_node):
                # Also in training, where it has no effect: later operations then have equal inputs.
                copied.args[0].replace_all_uses_with(
                    copied, delete_user_cb=lambda user, copied=copied: user is not copied
                )
        else:
            counterparts[eval_node] = train_node
            if train_node.op != "placeholder":
                args, kwargs = fx.node.map_arg((eval_node.args, eval_node.kwargs), counterparts.__getitem__)
                _select(trains, training, train_node, (args, dict(kwargs)))
    return trains


def _aligned(trains: fx.Graph, evaluates: fx.Graph) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Yields pairs of nodes with the same operation, one of each mode.

    A node is paired with None if it may exist in one mode only: a check, an input of one, or an operation that makes a
    tensor contiguous, which torch.export omits for contiguous tensors.
    """
    train_nodes, eval_nodes = list(trains.nodes), list(evaluates.nodes)
    checks = _checks(trains) | _checks(evaluates)
    optional = checks | {node for node in (*train_nodes, *eval_nodes) if _is_contiguous(node)}
    while train_nodes or eval_nodes:
        train_node, eval_node = next(iter(train_nodes), None), next(iter(eval_nodes), None)
        kinds = [None if node is None else (node.op, node.target, node in checks) for node in (train_node, eval_node)]
        if kinds[0] == kinds[1]:
            yield train_nodes.pop(0), eval_nodes.pop(0)
        elif train_node in optional:
            yield train_nodes.pop(0), None
        elif eval_node in optional:
            yield None, eval_nodes.pop(0)
        else:
            raise TraceError("it does other operations in training than in evaluation; trace the modules below it")


def _checks(graph: fx.Graph) -> set[fx.Node]:
    """Returns the checks of a graph, and the nodes used only by checks."""
    only_for_checks: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target is check or (node.op != "placeholder" and node.users and only_for_checks.issuperset(node.users)):
            only_for_checks.add(node)
    return only_for_checks


def _is_contiguous(node: fx.Node) -> bool:
    return str(node.target) == "aten.contiguous.default" and not node.kwargs


def _restrict(node: fx.Node, training: fx.Node, mode: bool) -> None:
    """Restricts a check to one mode."""
    if node.target is check:
        node.target = check_in
        node.args = (training, mode, *node.args)


def _with_defaults(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the positional arguments of an operator, with defaults for missing ones."""
    if not isinstance(node.target, OpOverload):
        return args
    parameters = schema_of(node.target).arguments[len(args) :]
    missing = itertools.takewhile(lambda parameter: not parameter.kwarg_only, parameters)
    return (*args, *(parameter.default_value for parameter in missing))


def _select(graph: fx.Graph, training: fx.Node, node: fx.Node, evaluates: tuple[Any, dict[str, Any]]) -> None:
    """Makes an operator take its own arguments in training and those in `evaluates` in evaluation."""
    train_args, eval_args = _with_defaults(node, node.args), _with_defaults(node, evaluates[0])
    train_values, spec = tree_flatten((train_args, dict(node.kwargs)))
    eval_values, eval_spec = tree_flatten((eval_args, evaluates[1]))
    if spec != eval_spec:
        raise TraceError(f"{node.name} is given other arguments in training than in evaluation")
    changed = False
    for index, (train_value, eval_value) in enumerate(zip(train_values, eval_values)):
        has_node = isinstance(train_value, fx.Node) or isinstance(eval_value, fx.Node)
        # Nodes are compared by identity only.
        if train_value is not eval_value and (has_node or train_value != eval_value):
            changed = True
            if (train_value, eval_value) == (True, False):
                train_values[index] = training
            else:
                with graph.inserting_before(node):
                    train_values[index] = graph.call_function(choose, (training, train_value, eval_value))
    if changed:
        node.args, node.kwargs = tree_unflatten(train_values, spec)
