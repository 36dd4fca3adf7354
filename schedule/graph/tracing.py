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
        TraceError: a graph cannot express the forward; names the operation and the line.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    unknown_inputs = set(inputs) - {p.name for p in parameters}
    if unknown_inputs:
        raise TraceError(f"trace of '{label}': inputs must be parameters of its forward, but has {unknown_inputs}")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fixed: dict[str, Any] = {
        p.name: {} if p.kind is p.VAR_KEYWORD else () if p.kind is p.VAR_POSITIONAL else p.default
        for p in parameters
        if p.kind in variadic or (p.default is not p.empty and p.name not in inputs)
    }
    tracer = Tracer(module, flatten, leaves, fixed)
    try:
        with state_kept(module) as written:
            graph = tracer.trace(module)
    except Exception as error:
        advice = "; examples= of a call tell what symbols cannot" if "examples" not in str(error) else ""
        raise TraceError(f"trace of '{label}': {cause(error)}{advice}") from error
    refuse_written(label, written)
    tidy(graph)
    return Traced(graph, fixed, flatten)


class Tracer(fx.Tracer):
    def __init__(self, root: nn.Module, flatten: bool, leaves: Sequence[Any], fixed: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())
        self.top, self.flatten, self.leaves, self.fixed = root, flatten, leaves, fixed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not self.flatten or "forward" in m.__dict__ or _hooked(m):
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
        for p in parameters:
            if p.name not in self.fixed:
                value = self.create_proxy("placeholder", p.name, (), {})
                if p.kind is p.KEYWORD_ONLY:
                    keywords[p.name] = value
                else:
                    args.append(value)
            elif p.kind is p.KEYWORD_ONLY:
                keywords[p.name] = self.fixed[p.name]
            elif p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                args.append(self.fixed[p.name])
        return (lambda *a: root_fn(*a, **keywords)), args


@contextmanager
def state_kept(module: nn.Module) -> Iterator[list[str]]:
    """Restores what a traced forward writes into its module.

    Yields:
        A list that contains the paths of written tensors after the context.
    """
    written: list[str] = []
    modules = dict(module.named_modules())
    before = {
        path: (dict(each.__dict__), dict(buffers_of(each)), dict(parameters_of(each))) for path, each in modules.items()
    }
    values = {
        each: (each._version, each.detach().clone()) for _, buffers, _ in before.values() for each in buffers.values()
        if each is not None
    }  # fmt: skip
    try:
        yield written
    finally:
        for path, (attributes, buffers, parameters) in before.items():
            each = modules[path]
            for held, original in ((buffers_of(each), buffers), (parameters_of(each), parameters)):
                changed = {n for n in {*held, *original} if held.get(n) is not original.get(n)}
                changed |= {
                    n for n, t in original.items() if t is not None and t in values and t._version != values[t][0]
                }
                written += [join(path, name) for name in sorted(changed)]
                held.clear()
                held.update(original)
            new = {n: v for n, v in each.__dict__.items() if attributes.get(n) is not v}
            written += [join(path, name) for name, value in new.items() if _symbolic(name, value)]
            each.__dict__.clear()
            each.__dict__.update(attributes)
        with torch.no_grad():
            for tensor, (version, value) in values.items():
                if tensor._version != version:
                    tensor.copy_(value)


def _symbolic(name: str, value: Any) -> bool:
    """True for a value that the code left in an attribute other than a tensor of the module; the tracer sets the mode
    and rates.
    """
    return isinstance(value, fx.Proxy) and name != "training" and name != "p" and "drop" not in name


def refuse_written(label: str, written: Sequence[str]) -> None:
    """Refuses a graph of a forward that writes tensors of its module.

    Raises:
        TraceError: it does.
    """
    if written:
        raise TraceError(
            f"trace of '{label}': its forward writes {', '.join(dict.fromkeys(written))}, which a graph would do when it is "
            "traced and not when it runs; keep that in a child module, which leaves= leaves a call"
        )


def _hooked(module: nn.Module) -> bool:
    return has_forward_hooks(module) or has_backward_hooks(module)


def cause(error: Exception) -> str:
    """Operation and line of model code that caused an error in tracing."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _HERE)) and not frame.filename.startswith("<")
    ]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not frames:
        return reason
    last = frames[-1]
    path = last.filename.rpartition("site-packages/")[2]
    return f"'{last.line}' at {path}:{last.lineno} in {last.name}: {reason}"
