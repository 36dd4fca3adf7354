"""fused_gelu: a GELU by tanh that is written out becomes PyTorch's kernel."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...base.errors import ScheduleError
from ..graph.editing import replace_subgraph
from ..graph.pattern import match, operation, trace_pattern
from ..graph.subgraph import Subgraph, traced_below
from ..primitive import primitive
from ..tree import ScheduledModule


@primitive
def fused_gelu(sch: ScheduledModule) -> None:
    """Computes each GELU by tanh that is written out as one kernel, in the traced modules at and below this one.

    A written-out GELU is the formula itself, or a module of transformers that computes it (`NewGELUActivation`).

    Raises:
        ScheduleError: nothing is traced; there is no such GELU; what `replace` refuses.
    """
    places = traced_below(sch)
    if not places:
        raise ScheduleError(f"fused_gelu on '{sch.name}': trace it first, or a module below it")
    found = [each for place in places for each in _found(*place)]
    if not found:
        raise ScheduleError(f"fused_gelu on '{sch.name}': no GELU by tanh is written out in what is traced there")
    for each in found:
        replace_subgraph(sch, gelu_tanh, [each], "gelu_tanh", together=False)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's GELU by tanh, element by element."""
    return F.gelu(x, approximate="tanh")


def written_out(x: Any) -> Any:
    """The GELU by tanh as transformers writes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _found(path: str, module: nn.Module, layer: Any) -> Iterator[Subgraph]:
    pattern = trace_pattern(written_out)
    (x,) = (node for node in pattern.nodes if node.op == "placeholder")
    inner = [node for node in pattern.nodes if node.op not in ("placeholder", "output")]
    for binding, (output,) in match(layer.graph, module, pattern):
        yield Subgraph(path, module, layer, tuple(binding[node] for node in inner), (binding[x],), (output,), None)
    for node in layer.graph.nodes:
        what = operation(node, module) if node.op == "call_module" else None
        if what is None or what.name != "gelu" or what.options.get("approximate") != "tanh":
            continue
        child = module.get_submodule(node.target)
        if not isinstance(child, nn.GELU) and type(child).__name__ != "GELUTanh":  # these are PyTorch's kernel
            yield Subgraph(path, module, layer, (node,), (what.args[0],), (node,), None)
