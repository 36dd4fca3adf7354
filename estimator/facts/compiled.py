"""Effects of compiling the repeated blocks: fewer kept activations, memory passes and kernels.

Each kind of block is compiled with fake tensors up to code generation: torch.compile splits forward from backward by a minimum
cut over kept tensors, and its two graphs are counted
(https://docs.pytorch.org/functorch/stable/generated/functorch.compile.min_cut_rematerialization_partition.html).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ...base._transformers import quiet
from ...models import Workload
from ...models.architecture import Architecture
from ...models.skeleton import skeleton
from .device_operators import as_autocast
from .model_facts import ModelFacts, Part
from .step_trace import Product, Segment, Spec, StepTrace, Tally, tensors_of
from .tracing import Layout, autocast, fake_model, give_formats, give_tensors, traced_config

if TYPE_CHECKING:
    import torch

    Graphs = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
    """Those of forward and backward."""


def fused(facts: ModelFacts, workload: Workload, seen: StepTrace, layout: Layout, precision: str) -> ModelFacts:
    """The facts with the repeated blocks compiled, from those without.

    If a block cannot be compiled, or there is none, the facts are unchanged and a note states it.
    """
    import torch

    from ...base._torch import FakeTensorMode

    if not layout.blocks:
        return replace(facts, notes=(*facts.notes, "fusion: no repeated block to look at; as without it"))
    config = traced_config(workload, precision, facts.attention)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    segments = {segment.path: segment for segment in seen.segments if segment.block}
    paths, notes, parts = list(layout.blocks), list(facts.notes), []
    with torch.random.fork_rng(devices=[]), quiet():
        # Only the compiled blocks of transformers' models need tensors.
        bare = isinstance(workload.model, Architecture)
        model = (skeleton(workload, config) if bare else fake_model(workload, config, fake)).train()
        for part in facts.parts:
            if part.role == "block":
                path = _one_of(part, paths, segments)
                paths.remove(path)
                block = model.get_submodule(path)
                with fake:
                    if bare:
                        give_tensors(block)
                    give_formats(block, workload, precision)
                    graphs = _compile(block, segments[path].inputs, precision)
                if isinstance(graphs, str):
                    notes.append(f"fusion: {path} cannot be compiled without values ({graphs}); as without it")
                else:
                    part = _counted(part, graphs, segments[path].products, seen.samples, workload.seq_len or 1)
            parts.append(part)
    return replace(facts, parts=tuple(parts), notes=tuple(notes))


def _one_of(part: Part, paths: list[str], segments: Mapping[str, Segment]) -> str:
    """The middle one of the blocks that have the part's products, since the first may differ from the rest."""
    wanted = {(product.k, product.n) for product in part.matmuls}
    same_products = [
        path
        for path in paths
        if path in segments and {(product.k, product.n) for product in segments[path].products} == wanted
    ]
    return (same_products or paths)[len(same_products or paths) // 2]


def _compile(block: "torch.nn.Module", inputs: Any, precision: str) -> "Graphs | str":
    """The graphs of forward and backward, or the reason for their absence."""
    import torch
    from functorch.compile import make_boxed_func

    from ...base._torch import aot_autograd, dynamo, min_cut_rematerialization_partition, select_decomp_table, tree_map

    graphs: dict[str, torch.fx.GraphModule] = {}

    def keep(name: str) -> Callable[..., Any]:
        def take(module: torch.fx.GraphModule, example: Any) -> Any:
            graphs[name] = module
            return make_boxed_func(module.forward)

        return take

    args, kwargs = tree_map(_empty, inputs, is_leaf=lambda value: isinstance(value, Spec))
    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with _opaque_attention(), autocast(precision), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators outside the graph; checked below
        try:
            dynamo.reset()
            output = torch.compile(block, backend=backend, dynamic=False, fullgraph=True)(*args, **kwargs)
            total = sum(tensor.float().sum() for tensor in tensors_of(output) if tensor.requires_grad)
            total.backward()
        except (dynamo.exc.TorchDynamoException, RuntimeError, AssertionError, TypeError, LookupError) as error:
            return " ".join(str(error).split())[:160] or type(error).__name__
        finally:
            dynamo.reset()
    if len(graphs) < 2:
        return "it is more than one graph"
    return graphs["forward"], graphs["backward"]


def _empty(value: Any) -> Any:
    import torch

    if not isinstance(value, Spec):
        return value
    return torch.empty(value.shape, dtype=value.dtype).requires_grad_(value.requires_grad)


@contextmanager
def _opaque_attention() -> Iterator[None]:
    """Scaled dot-product attention as one operator that the partitioner does not decompose."""
    from torch.nn import functional

    _attention_op()
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _attend(
    query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor", attn_mask: "torch.Tensor | None" = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> "torch.Tensor":  # fmt: skip
    import torch

    return torch.ops.redline.attention(*as_autocast(query, key, value))[0]


@cache
def _attention_op() -> Any:
    import torch

    @torch.library.custom_op("redline::attention", mutates_args=())
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("stands for attention in traces only")

    @attention.register_fake
    def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return (
            query.new_empty((*query.shape[:-1], value.shape[-1])),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        )

    @torch.library.custom_op("redline::attention_backward", mutates_args=())
    def backward(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        logsumexp: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        raise NotImplementedError("stands for attention in traces only")

    @backward.register_fake
    def _(grad: Any, query: Any, key: Any, value: Any, output: Any, logsumexp: Any) -> Any:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    def differentiate(ctx: Any, grad: Any, _: Any) -> Any:
        return torch.ops.redline.attention_backward(grad, *ctx.saved_tensors)

    attention.register_autograd(differentiate, setup_context=setup)
    return attention


def _counted(part: Part, graphs: "Graphs", products: list[Product], samples: int, length: int) -> Part:
    """A part with its block compiled."""
    forward, backward = (
        _Counter(graph, its_products, samples, length) for graph, its_products in zip(graphs, (products, []))
    )
    heads = part.attention.heads if part.attention else 0
    traffic = forward.moved.per_token(samples, length, heads)
    inputs = [node.name for node in graphs[1].graph.nodes if node.op == "placeholder"]
    saved, saved_fixed = forward.saved(sum(not name.startswith("tangents") for name in inputs))
    return replace(
        part,
        saved=saved.per_token(samples, length, heads),
        saved_fixed=saved_fixed,
        traffic=traffic,
        traffic_backward=traffic.scaled(backward.moved.total / forward.moved.total if forward.moved.total else 2.0),
        traffic_fixed=forward.traffic_fixed,
        kernels=float(forward.kernels),
    )


class _Counter:
    """Counts one graph as inductor would run it: products and attention are separate kernels, and everything between is fused, so
    a tensor passes through memory only at the inputs and outputs of such a kernel."""

    def __init__(self, module: "torch.fx.GraphModule", products: list[Product], samples: int, length: int) -> None:
        self._samples, self._length = samples, length
        self._nodes = list(module.graph.nodes)
        self._output = next(node for node in self._nodes if node.op == "output")
        self._inside: dict[torch.fx.Node, bool] = {}
        self._weight: dict[torch.fx.Node, bool] = {}
        self.moved = Tally()
        """Bytes read and written between products."""
        self.traffic_fixed = 0.0
        self.kernels = 0
        self._follow(list(products))

    def _follow(self, products: list[Product]) -> None:
        for node in self._nodes:
            if node.op == "placeholder":
                self._weight[node] = not self._is_activation(node)
                self._inside[node] = False
                continue
            if node.op != "call_function":
                continue
            sources = list(node.all_input_nodes)
            self._weight[node] = bool(sources) and all(self._weight.get(source, False) for source in sources)
            self._inside[node] = any(self._inside.get(source, False) for source in sources)
            if _is_product(node) and any(self._weight.get(source) for source in sources):
                split = self._split_of(node, products)
                if split is not None:
                    self._inside[node] = split == "column"
            self._account(node, sources)

    def _split_of(self, node: "torch.fx.Node", products: list[Product]) -> str | None:
        value = _value(node)
        for index, product in enumerate(products):
            if value is not None and value.shape[-1] == product.n:
                return products.pop(index).split
        return None

    def _account(self, node: "torch.fx.Node", sources: "list[torch.fx.Node]") -> None:
        value = _value(node)
        if _is_view(node) or value is None:
            return
        if _is_extern(node):
            self.kernels += 1
            return
        if self._weight[node]:
            if any(_is_extern(user) or _is_view(user) for user in node.users):
                self.traffic_fixed += _bytes(value) + sum(_bytes(_value(source)) for source in sources)
            return
        leaves = any(_is_extern(user) or user is self._output for user in _users(node))
        if leaves:
            self.kernels += 1
            self._move(node, value)
        for root in {_root(source) for source in sources}:
            if (root.op == "placeholder" or _is_extern(root)) and not self._weight.get(root, False):
                first_user = next(user for user in root.users)
                if first_user is node or _root(first_user) is root:
                    self._move(root, _value(root))

    def _move(self, node: "torch.fx.Node", value: "torch.Tensor | None") -> None:
        if value is not None:
            self.moved.add(self._kind(node, value), _bytes(value))

    def _kind(self, node: "torch.fx.Node", value: "torch.Tensor") -> str:
        shape = value.shape
        is_square = len(shape) >= 3 and shape[-1] == shape[-2] == self._length
        if is_square and (len(shape) > 3 or shape[0] > self._samples):
            return "scores"
        return "inside" if self._inside.get(node, False) else "outside"

    def _is_activation(self, node: "torch.fx.Node") -> bool:
        value = _value(node)
        if value is None or value.dim() == 0:
            return False
        # Tables of rotary angles are computed once, not by a block; incoming gradients are activations.
        return value.shape[0] in (self._samples, self._samples * self._length) and value.dim() > 1

    def saved(self, count: int) -> tuple[Tally, float]:
        """Bytes that forward keeps, the last `count` of its outputs: without weights, and those of weights."""
        saved, fixed = Tally(), 0.0
        outputs = [output for output in self._output.args[0] if output is not None]
        for node in dict.fromkeys(outputs[len(outputs) - count :]):
            value = _value(node)
            if value is None:
                continue
            root = _root(node)
            if not self._weight.get(node, False) and not self._weight.get(root, False):
                saved.add(self._kind(node, value), _bytes(value))
            elif root.op != "placeholder":
                fixed += _bytes(value)
        return saved, fixed


_VIEWS = (
    "view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "alias",
    "detach",
    "select", "split", "split_with_sizes", "_unsafe_view", "as_strided",
)  # fmt: skip


def _name(node: "torch.fx.Node") -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _is_view(node: "torch.fx.Node") -> bool:
    return node.op == "call_function" and _name(node) in (*_VIEWS, "getitem")


def _is_product(node: "torch.fx.Node") -> bool:
    return node.op == "call_function" and _name(node) in ("mm", "addmm", "bmm", "baddbmm")


def _is_extern(node: "torch.fx.Node") -> bool:
    return node.op == "call_function" and (
        _is_product(node) or _name(node) in ("convolution", "attention", "attention_backward")
    )


def _root(node: "torch.fx.Node") -> "torch.fx.Node":
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _users(node: "torch.fx.Node") -> "list[torch.fx.Node]":
    """Nodes that read a tensor, through views."""
    readers = []
    for user in node.users:
        readers += _users(user) if _is_view(user) else [user]
    return readers


def _value(node: "torch.fx.Node") -> "torch.Tensor | None":
    import torch

    value = node.meta.get("val") if hasattr(node, "meta") else None
    return value if isinstance(value, torch.Tensor) else None


def _bytes(value: "torch.Tensor | None") -> float:
    return float(value.numel() * value.element_size()) if value is not None else 0.0
