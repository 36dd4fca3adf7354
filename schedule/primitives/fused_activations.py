"""fused_activations: an activation and what surrounds it, number by number, becomes one kernel."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ...base.errors import ScheduleError, unknown
from ..graph.compiled import COMPILERS, compiled
from ..graph.editing import replace_subgraph
from ..graph.pattern import match, operation, trace_pattern
from ..graph.subgraph import Subgraph, traced_below
from ..primitive import primitive
from ..tree import ScheduledModule
from .fused_attention import dropout_of

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""The activations that are known."""


@primitive
def fused_activations(
    sch: ScheduledModule, compiler: str | Callable[[Callable[..., Any]], Callable[..., Any]] = "inductor"
) -> None:
    """Computes activations and what surrounds them as one kernel each, in the traced modules at and below this one.

    What surrounds them: a bias that is added before (of a linear layer that was decomposed), the factor of a gated
    feed-forward part, dropout behind. A GELU by tanh that is written out becomes PyTorch's own. All of one kind share the
    compiled code. Dropout draws on a CPU what it drew before, on other devices with the same rate.

    Args:
        compiler: `inductor` is `torch.compile`; `none` compiles nothing; a function is given the callable and returns
            the one to call.

    Raises:
        ScheduleError: unknown compiler; nothing is traced; there is no such activation; what `replace` refuses.
    """
    label = f"fused_activations on '{sch.name}'"
    if not callable(compiler) and compiler not in COMPILERS:
        raise ScheduleError(f"{label}: {unknown('compiler', compiler, COMPILERS)}")
    places = traced_below(sch)
    if not places:
        raise ScheduleError(f"{label}: trace it first, or a module below it")
    found = [each for place in places for each in _found(*place, compiler)]
    if not found:
        raise ScheduleError(
            f"{label}: no activation that is written out, or has a bias, a factor or dropout beside it, in what is traced there"
        )
    for new, subgraph in found:
        replace_subgraph(sch, new, [subgraph], new.name, together=False)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What takes the place of an activation and what surrounds it."""

    function: str
    """Of FUNCTIONS."""
    bias: bool
    """Whether a bias is added before."""
    gated: bool
    """Whether what comes of it is multiplied with another value."""
    dropout: bool
    """Whether something is dropped behind."""
    compiler: Any
    """As in `fused_activations`."""

    @property
    def name(self) -> str:
        """What it does, as an identifier."""
        parts = ("bias", self.bias), (self.function, True), ("mul", self.gated), ("dropout", self.dropout)
        return "_".join(name for name, there in parts if there)

    def __call__(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """x: any shape; given: the bias, the factor, and dropout's rate and whether it is on, where there are such."""
        left = list(given)
        bias, factor = (left.pop(0) if there else None for there in (self.bias, self.gated))
        if not self.gated and not self.bias and not self.dropout:
            return FUNCTIONS[self.function](x)
        rate, training = left if self.dropout else (0.0, False)
        kernel = _kernel(self.compiler)
        if not training or rate == 0:
            return kernel(self.function, x, bias, factor)
        if x.device.type != "cpu":
            return kernel(self.function, x, bias, factor, rate)
        kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - rate)
        return kernel(self.function, x, bias, factor, rate, kept)


@functools.cache
def _kernel(compiler: Any) -> Callable[..., torch.Tensor]:
    return compiled(_surrounded, compiler)


def _surrounded(
    function: str,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None,
    rate: float = 0.0,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    out = FUNCTIONS[function](x if bias is None else x + bias)
    if factor is not None:
        out = out * factor
    if kept is not None:
        return out * kept * (1 / (1 - rate) if rate < 1 else 0.0)
    return F.dropout(out, rate) if rate else out


def written_out(x: Any) -> Any:
    """The GELU by tanh as transformers writes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@dataclass(slots=True)
class _Core:
    """An activation in a graph."""

    function: str
    nodes: list[fx.Node]
    x: Any
    composed: bool


def _found(path: str, module: nn.Module, layer: Any, compiler: Any) -> Iterator[tuple[Activation, Subgraph]]:
    order = {node: i for i, node in enumerate(layer.graph.nodes)}
    taken: set[fx.Node] = set()
    for core in [*_written_out(layer, module), *_single(layer, module)]:
        if not taken.isdisjoint(core.nodes):
            continue
        nodes, inputs = list(core.nodes), [core.x]
        bias = _bias(core.x, module)
        if bias is not None:
            nodes.append(core.x)
            inputs = list(bias)
        last, factor, dropout = _behind(core.nodes[-1], module)
        nodes += [each for each in last if each not in nodes]
        inputs += [factor] if factor is not None else []
        inputs += dropout or ()
        if not (core.composed or bias or factor is not None or dropout):
            continue
        taken.update(nodes)
        new = Activation(
            function=core.function,
            bias=bias is not None,
            gated=factor is not None,
            dropout=bool(dropout),
            compiler=compiler,
        )
        nodes.sort(key=order.__getitem__)
        yield new, Subgraph(path, module, layer, tuple(nodes), tuple(inputs), (nodes[-1],), None)


def _written_out(layer: Any, module: nn.Module) -> Iterator[_Core]:
    pattern = trace_pattern(written_out)
    (x,) = (node for node in pattern.nodes if node.op == "placeholder")
    inner = [node for node in pattern.nodes if node.op not in ("placeholder", "output")]
    for binding, _ in match(layer.graph, module, pattern):
        yield _Core("gelu_tanh", [binding[node] for node in inner], binding[x], True)


def _single(layer: Any, module: nn.Module) -> Iterator[_Core]:
    for node in layer.graph.nodes:
        what = operation(node, module)
        if what is None or len(what.args) != 1:
            continue
        approximate = what.options.get("approximate") == "tanh"
        name = "gelu_tanh" if what.name == "gelu" and approximate else what.name
        if name in FUNCTIONS:
            composed = (
                name == "gelu_tanh" and node.op == "call_module" and not _native(module.get_submodule(node.target))
            )
            yield _Core(name, [node], what.args[0], composed)


def _native(module: nn.Module) -> bool:
    """Whether a GELU by tanh is PyTorch's own kernel."""
    return isinstance(module, nn.GELU) or type(module).__name__ == "GELUTanh"


def _bias(x: Any, module: nn.Module) -> tuple[Any, Any] | None:
    """What a bias is added to, and the bias, where a value is such a sum and is used for nothing else."""
    what = operation(x, module) if isinstance(x, fx.Node) else None
    if what is None or what.name != "add" or len(what.args) != 2 or len(x.users) != 1:
        return None
    for one, other in (what.args, what.args[::-1]):
        if isinstance(other, fx.Node) and other.op == "get_attr" and other.target.rpartition(".")[2] == "bias":
            return one, other
    return None


def _behind(node: fx.Node, module: nn.Module) -> tuple[list[fx.Node], Any, tuple[Any, Any] | None]:
    """What follows an activation: the operations, the factor that it is multiplied with, the rate of dropout and whether
    it is on."""
    nodes, factor = list[fx.Node](), None
    while len(node.users) == 1:
        before, (node,) = node, list(node.users)
        what = operation(node, module)
        if what is None or not what.args:
            break
        if what.name == "mul" and factor is None and len(what.args) == 2:
            others = [each for each in what.args if each is not before]
            if len(others) != 1 or not isinstance(others[0], fx.Node):
                break
            factor = others[0]
            nodes.append(node)
        elif what.name == "dropout" and what.args[0] is before:
            return [*nodes, node], factor, dropout_of(node, what.options["p"])
        else:
            break
    return nodes, factor, None
