"""Traces one module to a graph symbolically, and merges the graphs of a module in training and in evaluation."""

import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import (
    buffers_of,
    has_backward_hooks,
    has_forward_hooks,
    parameters_of,
    tree_flatten,
    tree_unflatten,
)
from ...base.errors import ScheduleError, TraceError
from ..tree import join
from .trace import Traced, tidy

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


def trace_symbolically(
    module: nn.Module, label: str, flatten: bool, leaves: Sequence[Any], inputs: Sequence[str]
) -> Traced:
    """Returns a module's forward as a graph; the module is not changed.

    Raises:
        TraceError: a graph cannot express the forward; the message has the operation and the line.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    unknown_inputs = set(inputs) - {parameter.name for parameter in parameters}
    if unknown_inputs:
        raise TraceError(f"trace of '{label}': inputs must be parameters of its forward, but has {unknown_inputs}")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fixed: dict[str, Any] = {
        parameter.name: {}
        if parameter.kind is parameter.VAR_KEYWORD
        else ()
        if parameter.kind is parameter.VAR_POSITIONAL
        else parameter.default
        for parameter in parameters
        if parameter.kind in variadic or (parameter.default is not parameter.empty and parameter.name not in inputs)
    }
    tracer = Tracer(module, flatten, leaves, fixed)
    try:
        with state_kept(module) as written:
            graph = tracer.trace(module)
    except Exception as error:
        advice = "; examples= of a call give values that symbols do not have" if "examples" not in str(error) else ""
        raise TraceError(f"trace of '{label}': {cause(error)}{advice}") from error
    refuse_written(label, written)
    tidy(graph)
    return Traced(graph, fixed, flatten)


class Tracer(fx.Tracer):
    def __init__(self, root: nn.Module, flatten: bool, leaves: Sequence[Any], fixed: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())
        self.top, self.flatten, self.leaves, self.fixed = root, flatten, leaves, fixed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not self.flatten or "forward" in m.__dict__ or has_forward_hooks(m) or has_backward_hooks(m):
            # A scheduled module stays a call, or its layers and hooks would be lost.
            return True
        for leaf in self.leaves:
            if isinstance(leaf, str) and re.fullmatch(leaf, module_qualified_name):
                return True
            if leaf is m or (isinstance(leaf, type) and isinstance(m, leaf)):
                return True
        return m.__module__.startswith("torch.nn") and not isinstance(m, (nn.Sequential, nn.ModuleList))

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        # A child may be named `self` (as in BERT's attention), which in the graph's code is the module.
        return super().create_node(kind, target, args, kwargs, "self_" if target == "self" else name, type_expr)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        # `self.training` is read when the graph runs, not when it is made.
        for path, module in self.top.named_modules():
            if path == "" or not self.is_leaf_module(module, path):
                target = f"{path}.training" if path else "training"
                module.__dict__["training"] = self.create_proxy("get_attr", target, (), {})
        names = list(inspect.signature(root_fn).parameters)[1:]
        named_arguments = {
            name: self.fixed[name] if name in self.fixed else self.create_proxy("placeholder", name, (), {})
            for name in names
        }
        args, kwargs = call_of_form(type(self.top), named_arguments, len(names))
        return (lambda top: root_fn(top, *args, **kwargs)), [self.top]


def call_of_form(
    kind: type[nn.Module], named_arguments: dict[str, Any], positional: int
) -> tuple[list[Any], dict[str, Any]]:
    """Converts arguments by name to a call of a module's forward, with the given number of positional arguments."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in list(inspect.signature(kind.forward).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += named_arguments[parameter.name]
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= named_arguments[parameter.name]
        elif parameter.kind is parameter.KEYWORD_ONLY or len(args) >= positional:
            kwargs[parameter.name] = named_arguments[parameter.name]
        else:
            args.append(named_arguments[parameter.name])
    return args, kwargs


@contextmanager
def state_kept(module: nn.Module) -> Iterator[list[str]]:
    """Restores the attributes and tensors of a module that a traced forward writes.

    Yields:
        A list that contains the paths of written tensors after the context.
    """
    written: list[str] = []
    modules = dict(module.named_modules())
    saved = {
        path: (dict(submodule.__dict__), dict(buffers_of(submodule)), dict(parameters_of(submodule)))
        for path, submodule in modules.items()
    }
    all_buffers = [buffer for _, buffers, _ in saved.values() for buffer in buffers.values() if buffer is not None]
    saved_values = {buffer: (buffer._version, buffer.detach().clone()) for buffer in all_buffers}
    try:
        yield written
    finally:
        for path, (attributes, buffers, parameters) in saved.items():
            submodule = modules[path]
            for tensors, original in ((buffers_of(submodule), buffers), (parameters_of(submodule), parameters)):
                changed = {name for name in {*tensors, *original} if tensors.get(name) is not original.get(name)}
                changed |= {
                    name
                    for name, tensor in original.items()
                    if tensor is not None and tensor in saved_values and tensor._version != saved_values[tensor][0]
                }
                written += [join(path, name) for name in sorted(changed)]
                tensors.clear()
                tensors.update(original)
            new_attributes = {
                name: value for name, value in submodule.__dict__.items() if attributes.get(name) is not value
            }
            # Except for the training mode and rates of dropout, which the tracer sets.
            symbols = [name for name, value in new_attributes.items() if isinstance(value, fx.Proxy)]
            written += [join(path, name) for name in symbols if name not in ("training", "p") and "drop" not in name]
            submodule.__dict__.clear()
            submodule.__dict__.update(attributes)
        with torch.no_grad():
            for tensor, (version, value) in saved_values.items():
                if tensor._version != version:
                    tensor.copy_(value)


def refuse_written(label: str, written: Sequence[str]) -> None:
    """Checks that a traced forward has not written tensors of its module.

    Raises:
        TraceError: it has.
    """
    if written:
        raise TraceError(
            f"trace of '{label}': its forward writes {', '.join(dict.fromkeys(written))}, which a graph would do when it is "
            "traced and not when it runs; move that to a child module, and keep it a call by leaves="
        )


def cause(error: Exception) -> str:
    """Returns the operation and the line of model code that caused an error in tracing."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _HERE)) and not frame.filename.startswith("<")
    ]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not frames:
        return reason
    frame_of_model = frames[-1]
    path = frame_of_model.filename.rpartition("site-packages/")[2]
    return f"'{frame_of_model.line}' at {path}:{frame_of_model.lineno} in {frame_of_model.name}: {reason}"


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
        elif train_node is None:
            following = next(node for node, _ in pairs[index:] if node is not None)
            with trains.inserting_before(following):
                copied = counterparts[eval_node] = trains.node_copy(eval_node, counterparts.__getitem__)
            _restrict(copied, training, False)
        else:
            counterparts[eval_node] = train_node
            if train_node.op != "placeholder":
                args, kwargs = fx.node.map_arg((eval_node.args, eval_node.kwargs), counterparts.__getitem__)
                _select(trains, training, train_node, (args, dict(kwargs)))
    return trains


def _aligned(trains: fx.Graph, evaluates: fx.Graph) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Yields pairs of nodes with the same operation, one of each mode.

    A node is paired with None if it may exist in one mode only: a check, or an input of one.
    """
    train_nodes, eval_nodes = list(trains.nodes), list(evaluates.nodes)
    checks = _checks(trains) | _checks(evaluates)
    while train_nodes or eval_nodes:
        train_node, eval_node = next(iter(train_nodes), None), next(iter(eval_nodes), None)
        # Both modes begin with the same attributes, some of which one of them only checks.
        kinds = [
            None if node is None else (node.op, node.target, node in checks and node.op != "get_attr")
            for node in (train_node, eval_node)
        ]
        if kinds[0] == kinds[1]:
            yield train_nodes.pop(0), eval_nodes.pop(0)
        elif train_node in checks:
            yield train_nodes.pop(0), None
        elif eval_node in checks:
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


def _restrict(node: fx.Node, training: fx.Node, mode: bool) -> None:
    """Restricts a check to one mode."""
    if node.target is check:
        node.target = check_in
        node.args = (training, mode, *node.args)


def _select(graph: fx.Graph, training: fx.Node, node: fx.Node, evaluates: tuple[Any, dict[str, Any]]) -> None:
    """Makes an operator take its own arguments in training and those in `evaluates` in evaluation."""
    train_values, spec = tree_flatten((node.args, dict(node.kwargs)))
    eval_values, eval_spec = tree_flatten(evaluates)
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
