"""fused_linears: linear layers that take the same value become one product."""

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ...base.errors import ScheduleError
from ..graph.editing import replace_subgraph
from ..graph.pattern import Attribute, operation
from ..graph.subgraph import Subgraph, traced_below
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def fused_linears(sch: ScheduledModule) -> None:
    """Computes linear layers that take the same value as one product, in the traced modules at and below this one.

    The projections to queries, keys and values, or the two of a gated feed-forward part. Weights stay where they are,
    under their names, and are put together when the product is computed: what is cut over ranks, tied or loaded is what
    it was. Layers with a bias and layers without are put together apart.

    Raises:
        ScheduleError: nothing is traced; no two layers take the same value; what `replace` refuses.
    """
    label = f"fused_linears on '{sch.name}'"
    groups = [group for place in _places(sch, label) for group in _groups(*place)]
    if not groups:
        raise ScheduleError(f"{label}: no two linear layers take the same value in what is traced there")
    for group in groups:
        function = biased_product if len(group[0].inputs) == 3 else product
        replace_subgraph(sch, function, group, None, together=True)


def _places(sch: ScheduledModule, label: str) -> list[tuple[str, nn.Module, Any]]:
    places = traced_below(sch)
    if not places:
        raise ScheduleError(f"{label}: trace it first, or a module below it")
    return places


def _groups(path: str, module: nn.Module, layer: Any) -> list[list[Subgraph]]:
    """The linear layers of a graph that take the same value, by this value and by whether they have a bias."""
    found: dict[tuple[fx.Node, bool], list[Subgraph]] = {}
    for node in layer.graph.nodes:
        if node.op == "call_module" and type(module.get_submodule(node.target)) is not nn.Linear:
            continue
        what = operation(node, module)
        if what is None or what.name != "linear" or not all(_held(each) for each in what.args[1:] if each is not None):
            continue
        x, weight, bias = what.args
        inputs = (x, weight) if bias is None else (x, weight, bias)
        each = Subgraph(path, module, layer, (node,), inputs, (node,), None)
        found.setdefault((x, bias is not None), []).append(each)
    # A weight that stands for several layers would be given once.
    return [group for group in found.values() if len({each.inputs[1:] for each in group}) == len(group) > 1]


def _held(value: Any) -> bool:
    return isinstance(value, Attribute) or (isinstance(value, fx.Node) and value.op == "get_attr")


def product(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Linear layers without biases on one value (..., features)."""
    return F.linear(x, torch.cat(weights)).split([len(each) for each in weights], -1)


def biased_product(x: torch.Tensor, *held: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Linear layers with biases on one value (..., features); held: a weight and its bias for each."""
    weights, biases = held[::2], held[1::2]
    return F.linear(x, torch.cat(weights), torch.cat(biases)).split([len(each) for each in weights], -1)
