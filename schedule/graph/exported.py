"""Traces by torch.export: the module and its children as one graph of operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ...base._torch import TreeSpec, has_backward_hooks, has_forward_hooks, tree_flatten, tree_map, tree_unflatten
from ...base.errors import TraceError
from ..random_state import modes_kept, rates_of
from ..tree import join
from .by_example import Example, form_of
from .trace import CallForm, Input, Traced, Unflatten, arguments, tidy
from .tracing import call_of_form, cause, check, merged


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
        inputs: arguments other than tensors that stay inputs; not supported, so it must be empty.
        scheduled: modules whose calls `build` will wrap.
        strict: True to export by TorchDynamo, which reads the code; False to run the code.

    Raises:
        TraceError: the module cannot be exported, or has scheduled modules, whose schedule would be lost in the graph.

    Source: https://pytorch.org/docs/stable/export.html
    """
    if inputs:
        raise TraceError(f"trace of '{label}': inputs of an exported graph must be tensors, but got inputs={inputs}")
    for path, submodule in module.named_modules():
        is_wrapped = "forward" in submodule.__dict__ or has_forward_hooks(submodule) or has_backward_hooks(submodule)
        if path and (is_wrapped or any(submodule is scheduled_module for scheduled_module in scheduled)):
            raise TraceError(
                f"trace of '{label}': an exported graph has no calls of modules, so the schedule of "
                f"'{path}' would be lost in it; trace first, or by tracer='fx'"
            )
    form, _ = form_of(module, label, example, ())
    values = iter([leaf for leaf in tree_flatten(arguments(module, *example))[0] if isinstance(leaf, torch.Tensor)])
    named_arguments = tree_unflatten(
        [next(values) if isinstance(leaf, Input) else leaf for leaf in form.leaves], form.spec
    )
    try:
        with modes_kept(module):
            graphs = [_graph(module, form, named_arguments, mode, strict) for mode in (True, False)]
        graph = merged(*graphs)
    except Exception as error:
        raise TraceError(f"trace of '{label}': {cause(error)}") from error
    tidy(graph)
    return Traced(graph, {}, True, form)


class _TensorsOnly(nn.Module):
    """Calls a module, with only the tensors among its arguments as inputs."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: TreeSpec) -> None:
        super().__init__()
        self.traced, self.spec = module, spec
        self.are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.leaves = [None if is_tensor else leaf for leaf, is_tensor in zip(leaves, self.are_tensors)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        remaining = list(tensors)
        leaves = [remaining.pop(0) if is_tensor else leaf for leaf, is_tensor in zip(self.leaves, self.are_tensors)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.traced.forward(*args, **kwargs)


def _below(path: str) -> str:
    """Converts a path from `_TensorsOnly` to a path from the traced module."""
    return path.removeprefix("traced").removeprefix(".")


def _graph(
    module: nn.Module, form: CallForm, named_arguments: dict[str, Any], training: bool, strict: bool
) -> fx.Graph:
    """Returns the graph of a module in training or in evaluation, with its parameters as attributes."""
    from torch.export import Dim

    for submodule in module.modules():
        submodule.training = training
    device = next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), torch.device("cpu"))

    def on_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros_like(value, device=device) if value.is_meta else value.detach().to(device)

    flat_leaves, spec = tree_flatten(call_of_form(type(module), tree_map(on_device, named_arguments), form.positional))
    tensors = [leaf for leaf in flat_leaves if isinstance(leaf, torch.Tensor)]
    # Sizes are symbols, except for those that the code compares with constants, which `_check_sizes` then checks.
    tensors_only = _TensorsOnly(module, flat_leaves, spec)
    sizes = [dict.fromkeys(range(tensor.dim()), Dim.AUTO) for tensor in tensors]
    program = torch.export.export(tensors_only, tuple(tensors), dynamic_shapes=(tuple(sizes),), strict=strict)
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise TraceError("it changes its inputs or its own buffers")
    attributes = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    inputs = [position for position, leaf in enumerate(form.leaves) if isinstance(leaf, Input)]
    input_positions = dict(zip(signature.user_inputs, inputs))
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    nodes = list(program.graph.nodes)
    # Inputs first: other nodes, including those that read parameters, must come after all placeholders.
    for node in nodes:
        if node.op == "placeholder" and node.name in input_positions:
            copies[node] = graph.placeholder(node.name)
    for node in nodes:
        if node.op == "placeholder":
            if node.name in attributes:
                copies[node] = graph.get_attr(_below(attributes[node.name]))
            elif node in copies:
                _check_sizes(graph, copies[node], node.meta["val"], form.names[input_positions[node.name]])
            elif node.users:
                raise TraceError(f"it has the constant {node.name}, a tensor that each call creates again")
        elif node.op == "output":
            results = [copies.get(leaf, leaf) for leaf in node.args[0]]
            graph.output(graph.call_function(Unflatten(program.call_spec.out_spec), tuple(results)))
        elif node.op == "get_attr":
            raise TraceError(f"it has the submodule or constant {node.target}")
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            _read_rate(module, graph, copies[node], node)
    return graph


_RATES = {"aten.dropout.default": 1, "aten.scaled_dot_product_attention.default": 4}
"""Dropout operators, and the position of their rate."""


def _read_rate(module: nn.Module, graph: fx.Graph, copied: fx.Node, node: fx.Node) -> None:
    """Makes the graph read a rate of dropout from its module when it runs."""
    rate_position = _RATES.get(str(node.target), 0)
    if (
        not rate_position
        or len(copied.args) <= rate_position
        or not isinstance(rate := copied.args[rate_position], float)
    ):
        return
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        path = _below(path)
        holder = module.get_submodule(path) if path else module
        for name in rates_of(holder):
            if getattr(holder, name) == rate:
                with graph.inserting_before(copied):
                    copied.update_arg(rate_position, graph.get_attr(join(path, name)))
                return


def _check_sizes(graph: fx.Graph, input_node: fx.Node, value: torch.Tensor, name: str) -> None:
    """Makes the graph check the sizes of an input that torch.export treated as constants."""
    for dim, size in enumerate(value.shape):
        if isinstance(size, int):
            size_node = graph.call_method("size", (input_node, dim))
            graph.call_function(check, (size_node, size, f"dimension {dim} of {name}"))
