"""Traces by example: symbolically, with the value of every node for one call on the meta device.

The example determines values that symbols do not have: the number of dimensions of a shape, the presence of a mask, the
branch of a condition. Sizes stay symbols. If the control flow depends on a value that is not a tensor, the graph checks
that value when it runs (`check`). If it depends on the training mode, both paths are traced, and their differences are
selected when the graph runs.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from ...base._torch import tree_flatten, tree_map, tree_unflatten
from ...base._transformers import values_unread
from ...base.errors import TraceError
from ..parallel.partition import meta_copy
from ..random_state import quiet, rates_of
from ..tree import ScheduledModule, join, with_ancestors
from .trace import CallForm, Input, Traced, arguments, tidy
from .tracing import Tracer, call_of_form, cause, check, merged, refuse_written, state_kept

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""
UNKNOWN = object()
"""Placeholder for a value that the example does not determine."""
MAKERS = ("arange", "empty", "finfo", "full", "ones", "tensor", "zeros")
"""Functions of torch that make values from sizes and formats only, which may be symbols."""


def trace_by_example(
    module: nn.Module,
    label: str,
    flatten: bool,
    leaves: Sequence[Any],
    inputs: Sequence[str],
    example: Example,
) -> Traced:
    """Returns a module's forward as a graph of the example call; the module is not changed.

    Raises:
        TraceError: a graph cannot express the forward; the message has the operation and the line.
    """
    form, values = _form_of(module, label, example, inputs)
    skeleton = meta_copy(module)
    written_paths: list[str] = []

    def traced(training: bool | None) -> fx.Graph:
        tracer = _ByExample(module, flatten, leaves, form, values, skeleton, training)
        with state_kept(module) as written, tracer.makers():
            graph = tracer.trace(module)
        written_paths.extend(written)
        return graph

    try:
        try:
            graph = traced(None)
        except _ReadsMode:
            graph = merged(traced(True), traced(False))
    except Exception as error:
        raise TraceError(f"trace of '{label}': {cause(error)}") from error
    refuse_written(label, written_paths)
    tidy(graph)
    return Traced(graph, {}, flatten, form)


def _form_of(module: nn.Module, label: str, example: Example, inputs: Sequence[str]) -> tuple[CallForm, list[Any]]:
    """Returns which leaves of a call's arguments are inputs of the graph, and the values of these on the meta device."""
    named_arguments = arguments(module, *example)
    unknown_inputs = [input_name for input_name in inputs if input_name.split("[")[0] not in named_arguments]
    if unknown_inputs:
        raise TraceError(f"trace of '{label}': inputs must be parameters of its forward, but has {set(unknown_inputs)}")
    names: list[str] = []
    for key, value in named_arguments.items():
        value_leaves = tree_flatten(value)[0]
        is_leaf = len(value_leaves) == 1 and value_leaves[0] is value
        names += [key] if is_leaf else [f"{key}[{index}]" for index in range(len(value_leaves))]
    flat_leaves, spec = tree_flatten(named_arguments)
    are_inputs = [
        isinstance(leaf, torch.Tensor) or name in inputs or name.split("[")[0] in inputs
        for name, leaf in zip(names, flat_leaves)
    ]
    values = [
        leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf
        for leaf, is_input in zip(flat_leaves, are_inputs)
        if is_input
    ]
    leaves = tuple(Input.of(leaf) if is_input else leaf for leaf, is_input in zip(flat_leaves, are_inputs))
    return CallForm(spec=spec, names=tuple(names), leaves=leaves, positional=len(example[0])), values


class _ReadsMode(Exception):
    """The control flow of the code depends on the training mode."""


class _ExampleProxy(fx.Proxy):
    """A symbol with its value in the example, or UNKNOWN."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        value = self.tracer.value(self)
        if not isinstance(value, (tuple, list, dict)):
            return super().__len__()
        return len(value)

    def __index__(self) -> int:
        value = self.tracer.value(self)
        if not isinstance(value, int):
            raise TraceError("a number is needed, but there is a symbol")
        return self.tracer.settled(self)

    def __int__(self) -> int:
        return self.__index__()

    def __float__(self) -> float:
        value = self.tracer.value(self)
        if not isinstance(value, (int, float)):
            raise TraceError("a number is needed, but there is a symbol")
        return float(self.tracer.settled(self))

    def __contains__(self, item: Any) -> bool:
        value = self.tracer.value(self)
        if not isinstance(value, (tuple, list, dict)):
            raise TraceError("membership in a symbol is needed")
        return item in value

    def __getattr__(self, name: str) -> Any:
        value = self.tracer.value(self)
        if value is not UNKNOWN and not callable(getattr(value, name, len)):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)


class _ByExample(Tracer):
    """Evaluates the example along with the symbols."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        root: nn.Module,
        flatten: bool,
        leaves: Sequence[Any],
        form: CallForm,
        values: Sequence[Any],
        skeleton: nn.Module,
        training: bool | None,
    ) -> None:
        super().__init__(root, flatten, leaves, {})
        self.form, self.values, self.skeleton, self.mode = form, list(values), skeleton, training
        self.evaluating = False
        """True while an operation of the example runs."""

    def value(self, proxy: fx.Proxy) -> Any:
        """Returns the value of a symbol in the example."""
        return proxy.node.meta.get("example", UNKNOWN)

    def settled(self, proxy: fx.Proxy) -> Any:
        """Returns the value of a symbol, and adds a check of it to the graph."""
        value, node = self.value(proxy), proxy.node
        if node.op == "get_attr" and node.target.rpartition(".")[2] == "training":
            raise _ReadsMode
        self.create_proxy("call_function", check, (proxy, value, node.name), {})
        return value

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            self.path_of_module(m)
        except NameError:  # the code creates the module in its forward, for example a loss
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.value(obj)
        if value is UNKNOWN or isinstance(value, torch.Tensor):
            return super().to_bool(obj)
        return bool(self.settled(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self.value(obj)
        if not isinstance(value, (tuple, list)):
            return super().iter(obj)
        return iter([obj[index] for index in range(len(value))])

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ExampleProxy(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *positional: Any, **options: Any
    ) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *positional, **options)
        if "example" not in proxy.node.meta:
            proxy.node.meta["example"] = self.evaluated(kind, target, proxy.node)
        return proxy

    def evaluated(self, kind: str, target: Any, node: fx.Node) -> Any:
        """Returns the result of an operation in the example; UNKNOWN if it fails or depends on an unknown value."""
        if kind == "placeholder":
            return self.values.pop(0)
        if kind == "get_attr":
            holder, _, name = target.rpartition(".")
            attribute = getattr(self.skeleton.get_submodule(holder), name)
            return attribute.detach() if isinstance(attribute, torch.Tensor) else attribute
        if any(input_node.meta.get("example", UNKNOWN) is UNKNOWN for input_node in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda input_node: input_node.meta["example"])
        self.evaluating = True
        try:
            with torch.no_grad():
                if kind == "call_module":
                    return self.skeleton.get_submodule(target)(*args, **kwargs)
                if kind == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                return target(*args, **kwargs)
        except Exception:  # user code: the graph is valid without the value, and few values are needed
            return UNKNOWN
        finally:
            self.evaluating = False

    @contextlib.contextmanager
    def makers(self) -> Iterator[None]:
        """Makes functions that create tensors from sizes accept symbols, in the context."""
        from ...base._torch import dynamo

        # Dynamo's import builds tables of torch's functions, which must not contain the patched ones.
        assert dynamo is not None
        with contextlib.ExitStack() as stack:
            for name in MAKERS:
                stack.enter_context(mock.patch.object(torch, name, self._maker(getattr(torch, name), name != "finfo")))
            yield

    def _maker(self, function: Callable[..., Any], makes_tensors: bool) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            symbolic = any(isinstance(leaf, fx.Proxy) for leaf in tree_flatten((args, kwargs))[0])
            # A tensor without symbols would be a constant of the graph, on the device of the trace.
            if self.evaluating or not (symbolic or makes_tensors):
                return function(*args, **kwargs)
            return self.create_proxy("call_function", function, args, kwargs)

        return make

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and type(a) is not dict and dataclasses.is_dataclass(a):  # outputs of models
            return self.create_proxy("call_function", type(a), (), dict(a)).node
        return super().create_arg(a)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        for path, module in self.top.named_modules():
            if path == "" or not self.is_leaf_module(module, path):
                target = f"{path}.training" if path else "training"
                mode: Any = self.mode
                if mode is None:
                    mode = self.create_proxy("get_attr", target, (), {})
                module.__dict__["training"] = mode
            for name in rates_of(module):
                module.__dict__[name] = self.create_proxy("get_attr", join(path, name), (), {})
        leaves = [
            self.create_proxy("placeholder", name.replace("[", "_").replace("]", ""), (), {})
            if isinstance(leaf, Input)
            else leaf
            for name, leaf in zip(self.form.names, self.form.leaves)
        ]
        named_arguments = tree_unflatten(leaves, self.form.spec)
        args, kwargs = call_of_form(type(self.top), named_arguments, self.form.positional)
        return (lambda top: root_fn(top, *args, **kwargs)), [self.top]


def as_call(inputs: Any) -> Example:
    """Converts example inputs to positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def example_of(sch: ScheduledModule) -> Example | None:
    """Returns the arguments of a module in the call of the nearest module above it with example inputs.

    None without example inputs, or if the module is not called. The module above is run up to the call: a copy without
    weights if its code does not read values, otherwise the module itself.
    """
    examples = sch.tree.examples
    for path in with_ancestors(sch.path):
        if path in examples:
            if path == sch.path:
                return examples[path]
            relative_path = sch.path.removeprefix(path).removeprefix(".")
            example = _call_of(sch.tree.module.get_submodule(path), relative_path, examples[path])
            if example is not None:
                examples[sch.path] = example
            return example
    return None


class _Reached(BaseException):
    """Unwinds a forward at the recorded call. It is not an error, hence not an Exception."""


def _call_of(module: nn.Module, target: str, example: Example) -> Example | None:
    """Returns the arguments of a submodule when the module is called with `example`; None if it is not called."""
    meta_example = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, example)
    # Default positions count from 0, so that no sample has several sequences; transformers would read values to detect them.
    packs = nullcontext() if "position_ids" in example[1] else values_unread()
    try:
        with packs:
            return _run(meta_copy(module), target, meta_example)
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
    ):  # the code reads values, which the meta device does not have
        if any(param.is_meta for param in module.parameters()):
            return None
        return _run(module, target, example)


def _run(module: nn.Module, target: str, example: Example) -> Example | None:
    calls: list[Example] = []

    def note(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Reached

    handle = module.get_submodule(target).register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(module, training=False):
            module(*example[0], **example[1])
    except _Reached:
        pass
    finally:
        handle.remove()
    return calls[0] if calls else None
