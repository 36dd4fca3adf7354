"""Traces by torch.export: everything below the module in one graph of operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import TreeSpec, has_backward_hooks, has_forward_hooks, tree_flatten, tree_map, tree_unflatten
from ...base.errors import TraceError
from ..quiet import modes_kept, rates_of
from ..tree import join
from .by_example import Example, call_of_form, form_of
from .modes import check, merged
from .operations import Unflatten
from .trace import CallForm, Input, Traced, arguments, tidy
from .tracing import cause


def trace_exported(
    module: nn.Module,
    label: str,
    inputs: Sequence[str],
    example: Example,
    scheduled: Sequence[nn.Module],
    strict: bool,
) -> Traced:
    """Returns a module's forward as a graph of operators, including children, by `torch.export.export`.

    Args:
        inputs: arguments other than tensors that stay inputs; must be empty.
        scheduled: modules whose calls `build` will wrap.
        strict: True if TorchDynamo reads the code, False if it is run.

    Raises:
        TraceError: it cannot be exported, or something below it is scheduled, which would be lost in the graph.

    Source: https://pytorch.org/docs/stable/export.html
    """
    if inputs:
        raise TraceError(f"trace of '{label}': an exported graph has tensors as inputs alone, but got inputs={inputs}")
    for path, each in module.named_modules():
        around = "forward" in each.__dict__ or has_forward_hooks(each) or has_backward_hooks(each)
        if path and (around or any(each is other for other in scheduled)):
            raise TraceError(
                f"trace of '{label}': an exported graph has no calls of modules, so the schedule of "
                f"'{path}' would be lost in it; trace first, or by tracer='fx'"
            )
    form, _ = form_of(module, label, example, ())
    values = iter([each for each in tree_flatten(arguments(module, *example))[0] if isinstance(each, torch.Tensor)])
    given = tree_unflatten([next(values) if isinstance(each, Input) else each for each in form.leaves], form.spec)
    try:
        with modes_kept(module):
            graphs = [_graph(module, form, given, mode, strict) for mode in (True, False)]
        graph = merged(*graphs)
    except Exception as error:
        raise TraceError(f"trace of '{label}': {cause(error)}") from error
    tidy(graph)
    return Traced(graph, {}, True, form)


class _OfTensors(nn.Module):
    """A call of a module with only tensors as arguments."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: TreeSpec) -> None:
        super().__init__()
        self.traced, self.spec = module, spec
        self.entering = [isinstance(each, torch.Tensor) for each in leaves]
        self.leaves = [None if enters else each for each, enters in zip(leaves, self.entering)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        left = list(tensors)
        places = [left.pop(0) if here else each for each, here in zip(self.leaves, self.entering)]
        args, kwargs = tree_unflatten(places, self.spec)
        return self.traced.forward(*args, **kwargs)


def _below(path: str) -> str:
    """Path from the module, given one from the call of it."""
    return path.removeprefix("traced").removeprefix(".")


def _graph(module: nn.Module, form: CallForm, given: dict[str, Any], training: bool, strict: bool) -> fx.Graph:
    """Graph of a module in training or in evaluation, with its parameters as attributes."""
    from torch.export import Dim

    for each in module.modules():
        each.training = training
    device = next((each.device for each in [*module.parameters(), *module.buffers()]), torch.device("cpu"))

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros_like(value, device=device) if value.is_meta else value.detach().to(device)

    flat, spec = tree_flatten(call_of_form(type(module), tree_map(place, given), form.positional))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    alone = _OfTensors(module, flat, spec)
    sizes = [dict.fromkeys(range(each.dim()), Dim.AUTO) for each in tensors]
    program = torch.export.export(alone, tuple(tensors), dynamic_shapes=(tuple(sizes),), strict=strict)
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise TraceError("it changes what it is given, or its own buffers")
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    entering = dict(zip(signature.user_inputs, (i for i, each in enumerate(form.leaves) if isinstance(each, Input))))
    graph, mapped = fx.Graph(), dict[fx.Node, Any]()
    nodes = list(program.graph.nodes)
    for node in nodes:
        if node.op == "placeholder" and node.name in entering:
            mapped[node] = graph.placeholder(node.name)
    for node in nodes:
        if node.op == "placeholder":
            if node.name in held:
                mapped[node] = graph.get_attr(_below(held[node.name]))
            elif node in mapped:
                _settled(graph, mapped[node], node.meta["val"], form.names[entering[node.name]])
            elif node.users:
                raise TraceError(f"it has the constant {node.name}, a tensor that is made again in each call")
        elif node.op == "output":
            results = [mapped.get(each, each) for each in node.args[0]]
            graph.output(graph.call_function(Unflatten(program.call_spec.out_spec), tuple(results)))
        elif node.op == "get_attr":
            raise TraceError(f"it has the submodule or constant {node.target}")
        else:
            mapped[node] = graph.node_copy(node, mapped.__getitem__)
            _read_rate(module, graph, mapped[node], node)
    return graph


_RATES = {"aten.dropout.default": 1, "aten.scaled_dot_product_attention.default": 4}
"""Dropout operators, and the position of their rate."""


def _read_rate(module: nn.Module, graph: fx.Graph, made: fx.Node, node: fx.Node) -> None:
    """Makes the graph read a rate of dropout from its module when it runs."""
    place = _RATES.get(str(node.target), 0)
    if not place or len(made.args) <= place or not isinstance(rate := made.args[place], float):
        return
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        path = _below(path)
        holder = module.get_submodule(path) if path else module
        for name in rates_of(holder):
            if getattr(holder, name) == rate:
                with graph.inserting_before(made):
                    made.update_arg(place, graph.get_attr(join(path, name)))
                return


def _settled(graph: fx.Graph, entered: fx.Node, value: torch.Tensor, name: str) -> None:
    """Makes the graph check the sizes of an input that torch.export treated as constants."""
    for i, size in enumerate(value.shape):
        if isinstance(size, int):
            found = graph.call_method("size", (entered, i))
            graph.call_function(check, (found, size, f"dimension {i} of {name}"))
