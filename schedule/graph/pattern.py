"""Matches patterns in graphs, in any order of nodes and of commutative operands."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import fx, nn

from ...base._torch import OpOverload, children_of, parameters_of, schemas_of
from ...base.errors import TraceError
from ..forward import layers_of
from ..parallel.exchange import WithoutBias

COMMUTATIVE = {
    "add",
    "mul",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "and_",
    "or_",
    "xor",
    "logical_and",
    "logical_or",
}
_SAME = {"iadd": "add", "imul": "mul", "isub": "sub", "itruediv": "div", "truediv": "div",
         "true_divide": "div",
         "multiply": "mul", "subtract": "sub", "divide": "div", "add_": "add", "mul_": "mul", "relu_": "relu",
         "mm": "matmul", "bmm": "matmul", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
         "concat": "cat", "concatenate": "cat", "clip": "clamp", "absolute": "abs", "negative": "neg"}  # fmt: skip
_NUMPY = {"input": "self", "axis": "dim", "keepdims": "keepdim"}
"""Other names of arguments, by their name in the signatures of operators."""

_ACTIVATIONS = {
    "ReLU": "relu",
    "SiLU": "silu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "SiLUActivation": "silu",
}
"""Modules without options, of torch.nn and transformers, by their equivalent function."""
_GELUS = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
    "GELUTanh": "tanh",
}
"""Modules of transformers that are a GELU, and their approximation."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or attribute of a module, as an input of a subgraph."""

    target: str
    """Path from the traced module."""


@dataclass(slots=True)
class Operation:
    """Operation of a node, in the same form for modules, functions and methods."""

    name: str
    args: list[Any] = field(default_factory=list)
    """Operands: nodes, Attributes and constants."""
    options: dict[str, Any] = field(default_factory=dict)
    """Constants by name."""


def call_module(kind: str | type[nn.Module], *args: Any) -> Any:
    """Represents, in a pattern, the call of a child module, by a regular expression for its path or by its class.

    Raises:
        TraceError: outside a pattern.
    """
    traced = next((argument for argument in args if isinstance(argument, fx.Proxy)), None)
    if traced is None:
        raise TraceError(
            "call_module represents the call of a module in a pattern for find: pass it a parameter of the pattern's "
            f"function, or a value computed from one, but it got {args or 'nothing'}"
        )
    return traced.tracer.create_proxy("call_function", call_module, (kind, *args), {})


class _PatternTracer(fx.Tracer):
    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, type) else super().create_arg(a)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        required = [
            self.create_proxy("placeholder", name, (), {})
            for name, parameter in inspect.signature(root_fn).parameters.items()
            if parameter.default is parameter.empty
        ]
        # Parameters with defaults are constants of the pattern.
        return (lambda *args: root_fn(*args)), required


def trace_pattern(pattern: Callable[..., Any]) -> fx.Graph:
    """Returns the graph of a pattern function; its parameters without defaults match anything.

    Raises:
        TraceError: a graph cannot express the function.
    """
    try:
        return _PatternTracer().trace(pattern)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"find: the pattern {pattern!r} is not a graph: {error}") from error


def match(graph: fx.Graph, module: nn.Module, pattern: fx.Graph) -> Iterator[tuple[dict[fx.Node, Any], list[fx.Node]]]:
    """Yields every match: the value of each node of the pattern, and the matched nodes."""
    outputs = pattern.output_node().args[0]
    heads = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]

    def extend(index: int, binding: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
        if index == len(heads):
            yield binding
            return
        for node in nodes:
            for extended in _bindings(module, heads[index], node, binding):
                yield from extend(index + 1, extended)

    for binding in extend(0, {}):
        yield binding, [binding[head] for head in heads]


def _bindings(
    module: nn.Module, expected: Any, value: Any, binding: dict[fx.Node, Any]
) -> Iterator[dict[fx.Node, Any]]:
    """Yields the bindings under which `value` matches `expected`."""
    if not isinstance(expected, fx.Node) or expected in binding:
        required = binding[expected] if isinstance(expected, fx.Node) else expected
        if _same(required, value):
            yield binding
        return
    if expected.op == "placeholder":
        yield {**binding, expected: value}
        return
    if not isinstance(value, fx.Node) or any(bound is value for bound in binding.values()):
        return
    if expected.op == "call_function" and expected.target is call_module:
        kind, *args = expected.args
        if value.op == "call_module" and len(args) <= len(value.args) and _is_call_of(module, value, kind):
            yield from _all(module, list(zip(args, value.args)), {**binding, expected: value})
        return
    expected_op, op = operation(expected, None), operation(value, module)
    if op is None or expected_op is None or expected_op.name != op.name:
        return
    if expected_op.options.keys() != op.options.keys() or len(expected_op.args) > len(op.args):
        return
    if any(not isinstance(argument, Attribute | None) for argument in op.args[len(expected_op.args) :]):
        return
    options = [(expected_op.options[name], op.options[name]) for name in expected_op.options]
    orders = [op.args[: len(expected_op.args)]]
    # Both orders are tried with backtracking, so that a pattern matches whichever operand is first.
    if expected_op.name in COMMUTATIVE and len(expected_op.args) == 2:
        orders.append(orders[0][::-1])
    for operands in orders:
        yield from _all(module, [*zip(expected_op.args, operands), *options], {**binding, expected: value})


def _all(module: nn.Module, pairs: list[tuple[Any, Any]], binding: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """Yields the bindings under which all values match what is expected of them."""
    if not pairs:
        yield binding
        return
    (expected, value), remaining = pairs[0], pairs[1:]
    if isinstance(expected, (tuple, list)) and isinstance(value, (tuple, list)):
        if len(expected) == len(value):
            yield from _all(module, [*zip(expected, value), *remaining], binding)
        return
    for extended in _bindings(module, expected, value, binding):
        yield from _all(module, remaining, extended)


def _is_call_of(module: nn.Module, node: fx.Node, kind: str | type[nn.Module]) -> bool:
    """Returns True if a node calls a child whose path matches a regular expression, or of a class."""
    if isinstance(kind, str):
        return re.fullmatch(kind, node.target) is not None
    return isinstance(module.get_submodule(node.target), kind)


def _same(left: Any, right: Any) -> bool:
    """Returns True if two values of a graph are equal: nodes by identity, constants by type and value."""
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return left is right
    return type(left) is type(right) and left == right


def operation(node: fx.Node, module: nn.Module | None) -> Operation | None:
    """Returns the operation of a node; None for nodes without one (inputs, attributes)."""
    if node.op == "call_module":
        return _of_module(node, module.get_submodule(node.target)) if module is not None else None
    if node.op == "call_method":
        name = _SAME.get(node.target, node.target)
    elif node.op == "call_function":
        target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
        name = getattr(target, "__name__", str(target)).removeprefix("_")
        name = _SAME.get(name, name)
    else:
        return None
    return _of_call(name, node)


def _of_module(node: fx.Node, child: nn.Module) -> Operation:
    path, args = node.target, list(node.args)
    attribute = {name: Attribute(f"{path}.{name}") for name in parameters_of(child)}
    weight_and_bias = [
        attribute[name] if parameters_of(child)[name] is not None else None
        for name in ("weight", "bias")
        if name in attribute
    ]
    if node.kwargs or "parametrizations" in children_of(child):  # its weight is computed
        return Operation(type(child).__name__, args, dict(node.kwargs))
    if isinstance(child, nn.Linear):
        return Operation(
            "linear", [*args, weight_and_bias[0], None if layers_of(child, WithoutBias) else weight_and_bias[1]]
        )
    if isinstance(child, nn.LayerNorm):
        return Operation("layer_norm", [*args, *weight_and_bias], {"eps": child.eps})
    if isinstance(child, nn.Embedding):
        return Operation("embedding", [*args, *weight_and_bias])
    if isinstance(child, nn.Dropout):
        return Operation("dropout", args, {"p": child.p})
    if isinstance(child, nn.GELU):
        return Operation("gelu", args, {"approximate": child.approximate})
    if type(child).__name__ in _GELUS:
        return Operation("gelu", args, {"approximate": _GELUS[type(child).__name__]})
    if isinstance(child, nn.Softmax):
        return Operation("softmax", args, {"dim": child.dim})
    return Operation(_ACTIVATIONS.get(type(child).__name__, type(child).__name__), args)


def _of_call(name: str, node: fx.Node) -> Operation:
    args, kwargs = list(node.args), dict(node.kwargs)

    def take(position: int, key: str, default: Any) -> Any:
        return kwargs.pop(key) if key in kwargs else args[position] if len(args) > position else default

    if name == "linear":
        return Operation(name, [args[0], take(1, "weight", None), take(2, "bias", None)])
    if name == "layer_norm":
        weight, bias, eps = take(2, "weight", None), take(3, "bias", None), take(4, "eps", 1e-5)
        return Operation(name, [args[0], weight, bias], {"eps": eps})
    if name == "gelu":
        return Operation(name, args[:1], {"approximate": take(1, "approximate", "none")})
    if name == "dropout":
        return Operation(name, args[:1], {"p": take(1, "p", 0.5)})
    if name == "softmax":
        return Operation(name, args[:1], {"dim": take(1, "dim", None)})
    if name in ("relu", "silu"):
        return Operation(name, args[:1])
    target = node.target
    if node.op == "call_function" and inspect.isfunction(target) and target is not call_module:
        # Calls with omitted and with explicit default arguments are equal.
        bound = inspect.signature(target).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {key: value for key, value in bound.arguments.items() if (key, value) != ("inplace", False)}
        return Operation(name, _in_order(name, [], arguments) or list(bound.arguments.values()))
    in_order = _in_order(name, args, kwargs)
    return Operation(name, args, kwargs) if in_order is None else Operation(name, in_order)


_schemas = cache(schemas_of)


def _in_order(name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Returns arguments in the order of PyTorch's operator of this name; None if no overload takes them.

    Sizes and dimensions are tuples, and defaults at the end are left out.
    """
    bound = (_bind(schema.arguments, args, kwargs) for schema in _schemas(name))
    return next((values for values in bound if values is not None), None)


def _bind(parameters: list[Any], args: list[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    names = [parameter.name for parameter in parameters]
    positional = [parameter for parameter in parameters if not parameter.kwarg_only]
    if len(args) > len(positional) > 0 and _is_list_of_int(positional[-1]):
        # x.permute(0, 2, 1) is x.permute((0, 2, 1)).
        args = [*args[: len(positional) - 1], tuple(args[len(positional) - 1 :])]
    if len(args) > len(positional):
        return None
    values_by_name = dict(zip(names, args))
    for key, value in kwargs.items():
        key = key if key in names else _NUMPY.get(key, key)
        if key not in names or key in values_by_name:
            return None
        values_by_name[key] = value
    values, length = [], 0
    for parameter in parameters:
        if parameter.name not in values_by_name:
            if not parameter.has_default_value():
                return None
            values.append(_plain(parameter, parameter.default_value))
            continue
        value = _plain(parameter, values_by_name[parameter.name])
        if not _fits(parameter, value):
            return None
        values.append(value)
        if not parameter.has_default_value() or not _same(value, _plain(parameter, parameter.default_value)):
            length = len(values)
    return values[:length]


def _is_list_of_int(parameter: Any) -> bool:
    return str(parameter.type).removeprefix("Optional[").startswith("List[int]")


def _plain(parameter: Any, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,) if _is_list_of_int(parameter) and type(value) is int else value


def _fits(parameter: Any, value: Any) -> bool:
    """Returns True if a parameter accepts a constant of this type; a node may have any type."""
    kind = str(parameter.type).removeprefix("Optional[").rstrip("]")
    if isinstance(value, fx.Node | None):
        return True
    if kind.startswith("List["):
        return isinstance(value, tuple)
    if kind == "Tensor":
        return isinstance(value, Attribute)
    return not isinstance(value, tuple | Attribute) and (kind == "str") == isinstance(value, str)
