"""Traces one module to a graph: by fx, symbolically or by example, or by torch.export."""

import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import buffers_of, has_backward_hooks, has_forward_hooks, parameters_of
from ...base.errors import TraceError
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
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        args: list[Any] = [self.top]
        keywords: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.name not in self.fixed:
                value = self.create_proxy("placeholder", parameter.name, (), {})
                if parameter.kind is parameter.KEYWORD_ONLY:
                    keywords[parameter.name] = value
                else:
                    args.append(value)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                keywords[parameter.name] = self.fixed[parameter.name]
            elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                args.append(self.fixed[parameter.name])
        return (lambda *a: root_fn(*a, **keywords)), args


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
            written += [join(path, name) for name, value in new_attributes.items() if _symbolic(name, value)]
            submodule.__dict__.clear()
            submodule.__dict__.update(attributes)
        with torch.no_grad():
            for tensor, (version, value) in saved_values.items():
                if tensor._version != version:
                    tensor.copy_(value)


def _symbolic(name: str, value: Any) -> bool:
    """Returns True for a symbol in an attribute, except for the training mode and rates of dropout, which the tracer sets."""
    return isinstance(value, fx.Proxy) and name != "training" and name != "p" and "drop" not in name


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
