"""Primitives that replace written-out code by fused operations: attention, GELU, loss."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ...base.errors import ScheduleError
from ..forward import Inner, Layer, add_layer, layers_of
from ..fused_logits import FusedLogits, Product
from ..graph.called import check_called
from ..graph.editing import replace_subgraph
from ..graph.pattern import Attribute, match, operation, trace_pattern
from ..graph.subgraph import Subgraph, traced_below
from ..parallel.exchange import syncs_of
from ..tree import ScheduledModule, primitive

CASTS = ("to", "type", "type_as", "float")
"""Operations that only change the number format."""
MASKS = ("add", "where", "masked_fill")
"""Operations that mask scores or add a bias."""
CARRIED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(CASTS, (0,)),
    "add": (0, 1),
    "mul": (0, 1),
    "div": (0,),
    "where": (1,),
    "masked_fill": (0,),
}
"""Operations allowed on scores, and the positions of the scores in their arguments."""
Step = tuple[str, fx.Node, tuple[Any, ...]]
"""An operation on scores: its name, its node, and its other arguments."""


@primitive
def fused_attention(sch: ScheduledModule) -> None:
    """Replaces written-out attention by one operation, in the traced modules at and below this one.

    A product, a scale, masks and biases, softmax, dropout and a second product become PyTorch's
    `scaled_dot_product_attention`, which need not materialise the scores. If it does (with dropout on a CPU) it draws
    the same dropout masks; other kernels draw others.

    Raises:
        ScheduleError: nothing is traced; no such attention is found; its weights have other uses, which the message
            names (modules of transformers return them: trace the block above with `flatten=True`); or `replace` refuses.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    label = f"fused_attention on '{sch.name}'"
    traced_modules = traced_below(sch)
    if not traced_modules:
        raise ScheduleError(f"{label}: trace it first, or a module below it")
    reasons: list[str] = []
    attentions = [
        attention for traced_module in traced_modules for attention in _written_out_attentions(*traced_module, reasons)
    ]
    if not attentions:
        reason = "; ".join(dict.fromkeys(reasons)) or "there is no softmax between two products in the traced modules"
        raise ScheduleError(f"{label}: {reason}")
    for attention in attentions:
        for node in attention.scores:
            # Code that reads the dtype or device of the scores reads those of the queries instead.
            for user in _format_readers(node):
                user.replace_input_with(node, attention.subgraph.inputs[0])
        replace_subgraph(sch, attention.replacement, [attention.subgraph], "attention", together=False)


@dataclass(frozen=True)
class Attention:
    """Replacement for written-out attention."""

    scaling: str
    """Operation on scores with the scale: `mul`, `div` or `none`."""
    masks: tuple[str, ...]
    """Later operations on scores, each of MASKS."""

    def __call__(
        self,
        query: torch.Tensor,
        transposed: torch.Tensor,
        value: torch.Tensor,
        rate: float,
        training: bool,
        scale: Any,
        *mask_arguments: Any,
    ) -> torch.Tensor:
        """Returns the attention's output, (..., length, width).

        Args:
            query: (..., length, width).
            transposed: transposed keys, (..., width, length).
            value: (..., length, width).
            rate: rate of dropout.
            scale: a number.
            mask_arguments: one or two values for each of `masks`.
        """
        factor = 1.0 if self.scaling == "none" else scale if self.scaling == "mul" else 1 / scale
        if isinstance(factor, torch.Tensor):  # `scale` of torch's attention must be a number
            query, factor = query * factor, 1.0
        output = F.scaled_dot_product_attention(
            query,
            transposed.transpose(-1, -2),
            value.to(query.dtype),
            attn_mask=self._bias(query, mask_arguments),
            dropout_p=rate if training else 0.0,
            scale=factor,
        )
        return output.to(value.dtype)

    def _bias(self, query: torch.Tensor, mask_arguments: tuple[Any, ...]) -> torch.Tensor | None:
        """Returns the sum of all masks and biases, which is added to the scores."""
        remaining = list(mask_arguments)
        total: torch.Tensor | None = None
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        for kind in self.masks:
            term = remaining.pop(0)
            if kind == "where":
                term = torch.where(term, zero, remaining.pop(0))
            elif kind == "masked_fill":
                term = zero.masked_fill(term, remaining.pop(0))
            total = term if total is None else total + term
        return None if total is None else total.to(query.dtype)


@dataclass(frozen=True, kw_only=True)
class _WrittenOutAttention:
    """Attention in a graph that is written out as separate operations."""

    subgraph: Subgraph
    """All of its operations, with the inputs of `Attention`."""
    scores: list[fx.Node]
    """Values of the scores before the softmax."""
    replacement: Attention


def _written_out_attentions(
    path: str, module: nn.Module, layer: Any, reasons: list[str]
) -> Iterator[_WrittenOutAttention]:
    order = {node: position for position, node in enumerate(layer.graph.nodes)}
    for node in layer.graph.nodes:
        softmax = operation(node, module)
        if softmax is None or softmax.name != "softmax" or softmax.options.get("dim") not in (-1, 3):
            continue
        score_steps = _score_steps(softmax.args[0], module)
        if score_steps is None:
            continue
        weight_steps = _weight_steps(node, module)
        if isinstance(weight_steps, str):
            reasons.append(f"the weights of attention in '{path or 'the root'}' {weight_steps}")
            continue
        nodes_after, rate, training, value = weight_steps
        names = [name for name, _, _ in score_steps[1:] if name not in CASTS]
        scalings = [name for name in names if name in ("mul", "div")]
        if names[: len(scalings)] != scalings or len(scalings) > 1:
            reasons.append(
                f"the scores of attention in '{path or 'the root'}' are not scaled exactly once before masks"
            )
            continue
        scale = [arguments for name, _, arguments in score_steps if name in ("mul", "div")]
        masks = [(name, arguments) for name, _, arguments in score_steps if name in MASKS]
        masking = (argument for _, arguments in masks for argument in arguments)
        inputs = (*score_steps[0][2], value, rate, training, scale[0][0] if scale else 1.0, *masking)
        nodes = sorted([*(step_node for _, step_node, _ in score_steps), node, *nodes_after], key=order.__getitem__)
        yield _WrittenOutAttention(
            subgraph=Subgraph(path, module, layer, tuple(nodes), inputs, (nodes_after[-1],)),
            scores=[step_node for _, step_node, _ in score_steps],
            replacement=Attention(scalings[0] if scalings else "none", tuple(name for name, _ in masks)),
        )


def _score_steps(value: Any, module: nn.Module) -> list[Step] | None:
    """Returns the operations from the product of queries and keys to a value; None if `value` is not such scores."""
    op = operation(value, module) if isinstance(value, fx.Node) else None
    # Scores with another use must exist, so that the fused operation cannot replace them.
    if op is None or len(value.users) - len(_format_readers(value)) != 1:
        return None
    if op.name == "matmul":
        return [(op.name, value, tuple(op.args))] if _ranks(op.args) else None
    for position in CARRIED.get(op.name, ()):
        inner = _score_steps(op.args[position], module) if len(op.args) > position else None
        other_arguments = tuple(op.args[:position] + op.args[position + 1 :])
        if inner is not None and (op.name not in ("mul", "div") or _is_number(other_arguments[0])):
            return [*inner, (op.name, value, other_arguments)]
    return None


def _weight_steps(softmax: fx.Node, module: nn.Module) -> tuple[list[fx.Node], Any, Any, Any] | str:
    """Returns the operations from a softmax to the product with values, dropout's rate and switch, and the values.

    If the weights have other uses, a description of these is returned instead.
    """
    node, nodes, rate, training = softmax, list[fx.Node](), 0.0, False
    while True:
        users = list(node.users)
        if len(users) != 1:
            names = ", ".join(user.name for user in users)
            return f"are used by {names}; trace the module above with flatten=True, where they are not used"
        previous, node = node, users[0]
        op = operation(node, module)
        if op is None or op.name not in (*CASTS, "dropout", "matmul") or op.args[0] is not previous:
            return f"go into {node.name}"
        nodes.append(node)
        if op.name == "matmul":
            return nodes, rate, training, op.args[1]
        if op.name == "dropout":
            rate, training = dropout_of(node, op.options["p"])


def dropout_of(node: fx.Node, rate: Any) -> tuple[Any, Any]:
    """Returns the rate and the switch of a dropout in a graph, as evaluated when the graph runs."""
    if node.op == "call_module":
        return Attribute(f"{node.target}.p"), Attribute(f"{node.target}.training")
    return rate, node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)


def _format_readers(node: fx.Node) -> list[fx.Node]:
    """Returns the users of a value that only read its dtype or device."""
    return [user for user in node.users if user.target is getattr and user.args[1] in ("dtype", "device")]


def _ranks(factors: list[Any]) -> bool:
    """True if the factors of a product may be queries and keys: their numbers of dimensions, if known, are equal."""
    examples = [factor.meta.get("example") for factor in factors if isinstance(factor, fx.Node)]
    return len({example.dim() for example in examples if isinstance(example, torch.Tensor)}) <= 1


def _is_number(value: Any) -> bool:
    if isinstance(value, fx.Node):
        value = value.meta.get("example")
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


@primitive
def fused_gelu(sch: ScheduledModule) -> None:
    """Replaces each written-out tanh GELU by one kernel, in the traced modules at and below this one.

    A written-out GELU is the formula itself, or a module of transformers that computes it (`NewGELUActivation`).

    Raises:
        ScheduleError: nothing is traced; there is no such GELU; or `replace` refuses.
    """
    traced_modules = traced_below(sch)
    if not traced_modules:
        raise ScheduleError(f"fused_gelu on '{sch.name}': trace it first, or a module below it")
    gelus = [gelu for traced_module in traced_modules for gelu in _gelus(*traced_module)]
    if not gelus:
        raise ScheduleError(f"fused_gelu on '{sch.name}': no tanh GELU is written out in the traced modules")
    for gelu in gelus:
        replace_subgraph(sch, gelu_tanh, [gelu], "gelu_tanh", together=False)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's tanh GELU."""
    return F.gelu(x, approximate="tanh")


def written_out(x: Any) -> Any:
    """The tanh GELU as written in transformers."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelus(path: str, module: nn.Module, layer: Any) -> Iterator[Subgraph]:
    pattern = trace_pattern(written_out)
    (x,) = (node for node in pattern.nodes if node.op == "placeholder")
    inner = [node for node in pattern.nodes if node.op not in ("placeholder", "output")]
    for binding, (output,) in match(layer.graph, module, pattern):
        yield Subgraph(path, module, layer, tuple(binding[node] for node in inner), (binding[x],), (output,))
    for node in layer.graph.nodes:
        activation = operation(node, module) if node.op == "call_module" else None
        if activation is None or activation.name != "gelu" or activation.options.get("approximate") != "tanh":
            continue
        child = module.get_submodule(node.target)
        if not isinstance(child, nn.GELU) and type(child).__name__ != "GELUTanh":  # these already use PyTorch's kernel
            yield Subgraph(path, module, layer, (node,), (activation.args[0],), (node,))


@primitive
def fused_loss(sch: ScheduledModule) -> None:
    """Computes the cross-entropy of this module's logits from its input, chunk by chunk, without materialising the
    logits.

    For a language-model head, an `nn.Linear`, unsharded or cut over the vocabulary with `parallel_loss`. The model's own
    loss code does not change: `torch.nn.functional.cross_entropy` of these logits computes those of a few tokens at a
    time, and the gradients in the same pass. Any other use materialises the logits as usual.

    Raises:
        ScheduleError: the module is not an `nn.Linear`; its loss is fused already; or ranks exchange its output.
    """
    label, module = f"fused_loss on '{sch.name}'", sch.module
    if type(module) is not nn.Linear:
        raise ScheduleError(f"{label}: the head must be an nn.Linear, but is a {type(module).__name__}")
    if layers_of(module, FusedLoss):
        raise ScheduleError(f"{label}: the loss is fused already")
    if any(sync.mode in ("fwd_post", "bwd_pre") for sync in syncs_of(module)):
        raise ScheduleError(f"{label}: ranks exchange its logits, which materialises them; use parallel_loss")
    check_called(sch, "fused_loss")
    add_layer(module, FusedLoss())


def formed_for(module: nn.Module) -> dict[str, bool]:
    """Returns the functions called with the logits of a head with `fused_loss`: True if these were materialised for it."""
    return layers_of(module, FusedLoss)[0].formed_for


class FusedLoss(Layer):
    """Returns unmaterialised logits in place of the module's output."""

    order = 20
    alters = True

    def __init__(self) -> None:
        self.formed_for: dict[str, bool] = {}
        """Names of functions that were called with the logits: True if the logits were materialised for the call."""

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["input"]
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        if dtype == torch.float16:
            raise ScheduleError(
                "fused_loss: gradients are computed before the loss is scaled, as float16 requires; use bf16"
            )
        product = Product(module.weight, module.bias, dtype, None, module.weight.shape[0], self.formed_for)
        return FusedLogits.of(hidden, product)
