"""Records one training step on fake tensors, by segments of the model."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from ...base._torch import schema_of
from .model_facts import Attention
from .step_trace import Product, Segment, Spec, StepTrace, tensors_of

if TYPE_CHECKING:
    import torch
    from torch import nn

Split = Callable[[Product, bool, int], str]
"""`split(product, True if attention ran before in its segment, width of the residual stream)`."""


class Recorder:
    """Records a step by segments of the model."""

    def __init__(self, model: "nn.Module", blocks: set[str], split: Split, samples: int, seq_len: int | None) -> None:
        self._model, self._blocks, self._split = model, blocks, split
        self._samples, self._seq_len = samples, seq_len
        self.segments: list[Segment] = []
        self._open: dict[str, Segment] = {}
        self._paths: list[str] = [""]
        self._in_block: list[Segment] = []
        self._begun = 0
        self._inside = False
        self._attended = self._in_attention = False
        self._width = 0
        self._operator = ""
        self._error = ""
        self._backward = False
        self._backward_region: Segment | None = None
        self._start_live = 0.0
        self._live = self._tail_peak = self._forward_end = 0.0
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._saved: set[int] = set()
        self._weights: dict[int, str] = {}
        self._copies: set[int] = set()
        self._keep: list[torch.UntypedStorage] = []
        self._shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self._trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in model.named_parameters():
            storage = parameter.untyped_storage()
            self._weights.setdefault(id(storage), name)
            self._keep.append(storage)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_kept)
        for buffer in model.buffers():
            storage = buffer.untyped_storage()
            self._saved.add(id(storage))
            self._keep.append(storage)
        self.operators = _operators(self)

    # Position in the model.

    def hooks(self) -> ExitStack:
        """Tracks entering and leaving modules while it is open."""
        stack = ExitStack()
        for path, module in self._model.named_modules():
            entering = module.register_forward_pre_hook(self._entering(path), with_kwargs=True)
            leaving = module.register_forward_hook(self._leaving(path), always_call=False)
            stack.callback(entering.remove)
            stack.callback(leaving.remove)
        return stack

    def _entering(self, path: str) -> Callable[..., None]:
        from ...base._torch import tree_map

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            self._paths.append(path)
            if path in self._blocks and not self._in_block:
                self._begun += 1
                segment = self._region(path, block=True)
                self._in_block.append(segment)
                self._inside = self._attended = False
                self._measure_boundary(segment, (*args, *kwargs.values()))
                segment.inputs = tree_map(Spec.of, (args, kwargs))

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(module: Any, args: Any, output: Any) -> None:
            self._paths.pop()
            if self._in_block and self._in_block[-1].path == path:
                segment = self._in_block.pop()
                self._inside = False
                for tensor in tensors_of(output):
                    if tensor.requires_grad and tensor.is_floating_point():
                        tensor.register_hook(lambda grad, segment=segment: self._enter_backward(segment))

        return leave

    def _measure_boundary(self, segment: Segment, values: Any) -> None:
        self._width = 0
        for tensor in tensors_of(values):
            if tensor.requires_grad:
                segment.boundary += tensor.numel() * tensor.element_size()
                self._width = max(self._width, tensor.shape[-1] if tensor.dim() else 0)

    def _region(self, path: str, block: bool) -> Segment:
        # Operators of a container between two blocks are separate from those behind the last.
        key = path if block else f"{path}@{self._begun}"
        if key not in self._open:
            self._open[key] = Segment(path=path, block=block, after=self._begun)
            self.segments.append(self._open[key])
        return self._open[key]

    def _here(self) -> Segment:
        if self._backward:
            return self._backward_region or self.segments[-1]
        if self._in_block:
            return self._in_block[-1]
        return self._region(self._paths[-1], block=False)

    def _enter_backward(self, segment: Segment) -> None:
        self._backward_region = segment
        self._start_live = self._live

    def turn(self) -> None:
        """Records the end of forward."""
        self._forward_end = self._start_live = self._live
        # The loss's peak may be in forward: that of the tail since the last block ended.
        self._backward = True
        self._inside = False

    # Saved tensors.

    def saving(self) -> AbstractContextManager[Any]:
        """Records tensors that are saved for backward while it is open."""
        import torch

        def pack(tensor: "torch.Tensor") -> "torch.Tensor":
            self._save(tensor)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def _save(self, tensor: "torch.Tensor") -> None:
        import torch

        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._saved or (key in self._weights and key not in self._copies):
            return
        self._track(storage)
        self._saved.add(key)
        segment, size = self._here(), storage.nbytes()
        if key in self._copies:
            segment.saved_fixed += size
        elif not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
            segment.saved_rows += size
        else:
            segment.saved.add(self._kind(tensor), size)

    def _kind(self, tensor: "torch.Tensor") -> str:
        if self._is_scores(tensor):
            return "scores"
        return "inside" if self._inside else "outside"

    def _is_scores(self, tensor: "torch.Tensor") -> bool:
        shape, length = tensor.shape, self._seq_len
        if not length or len(shape) < 3 or not shape[-1] == shape[-2] == length:
            return False
        # Hidden states are (batch, sequence, hidden), and hidden may equal the sequence length.
        return len(shape) > 3 or shape[0] > self._samples

    # Live bytes.

    def _track(self, storage: "torch.UntypedStorage") -> None:
        key = id(storage)
        if key in self._sizes or (key in self._weights and key not in self._copies):
            return
        size = storage.nbytes()
        self._sizes[key] = (weakref.ref(storage, lambda _: self._freed(key)), size)
        self._live += size
        if self._backward:
            if self._backward_region is not None:
                segment = self._backward_region
                segment.transient = max(segment.transient, self._live - self._start_live)
            else:
                self._tail_peak = max(self._tail_peak, self._live)
        elif not self._in_block:
            # Outside blocks, only the last part, the head and the loss, has the peak.
            self._tail_peak = max(self._tail_peak, self._live)

    def _freed(self, key: int) -> None:
        _, size = self._sizes.pop(key)
        self._live -= size
        self._saved.discard(key)
        self._copies.discard(key)
        self._weights.pop(key, None)

    def _gradient_is_kept(self, parameter: "torch.Tensor") -> None:
        storage = parameter.grad.untyped_storage()
        tracked = self._sizes.pop(id(storage), None)
        if tracked is not None:
            self._live -= tracked[1]
        self._keep.append(storage)

    # Operators.

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs and records an operator."""
        self._operator = str(func)
        output = func(*args, **kwargs)
        self._saw(func, args, kwargs, output)
        return output

    def _saw(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        import torch

        inputs, outputs = tensors_of((args, kwargs)), tensors_of(output)
        if not outputs:  # reads a property
            return
        stores = {id(tensor.untyped_storage()) for tensor in inputs}
        is_view = bool(outputs) and all(id(tensor.untyped_storage()) in stores for tensor in outputs)
        if is_view and not schema_of(func).is_mutable:
            return
        aten = torch.ops.aten
        segment = self._here()
        for tensor in outputs:
            self._track(tensor.untyped_storage())
        if not inputs or schema_of(func).name in _ALLOCATIONS:
            return
        for tensor in inputs:
            name = self._weights.get(id(tensor.untyped_storage()))
            if name is not None and not self._backward:
                segment.parameters.add(name)
                if func is aten._to_copy.default:
                    key = id(outputs[0].untyped_storage())
                    self._copies.add(key)
                    self._weights[key] = name
        if not self._backward:
            segment.kernels += 1
        if func in _PRODUCTS(aten):
            if not self._backward:
                self._product(func, args, outputs, segment)
            return
        moved = {
            id(tensor): (tensor, float(tensor.numel() * tensor.element_size()))
            for tensor in (*inputs, *outputs)
            # Only some rows of an embedding table are read; the weights of norms are negligible.
            if id(tensor.untyped_storage()) not in self._weights and func is not aten.embedding_dense_backward.default
        }
        if func is aten._to_copy.default and self._of_a_weight(inputs[0]):
            if not self._backward:
                segment.traffic_fixed += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
            return
        tally = segment.backward if self._backward else segment.traffic
        for tensor, size in moved.values():
            tally.add(self._kind(tensor), size)

    def _of_a_weight(self, tensor: "torch.Tensor") -> bool:
        """True for a weight and, in backward, for a tensor with the shape of one, as its gradient has."""
        if not self._backward:
            return id(tensor.untyped_storage()) in self._weights
        return tensor.dim() == 2 and tuple(tensor.shape) in self._shapes

    def _product(self, func: Any, args: Any, outputs: "list[torch.Tensor]", segment: Segment) -> None:
        import torch

        if func is torch.ops.aten.convolution.default:
            weight = args[1]
            rows = outputs[0].numel() // max(outputs[0].shape[1], 1)
            self._count_product(weight, rows, weight[0].numel(), weight.shape[0], True, segment)
            return
        left_operand, right_operand = [tensor for tensor in args if isinstance(tensor, torch.Tensor)][-2:]
        k, n = right_operand.shape[-2], right_operand.shape[-1]
        rows = left_operand.numel() // max(k, 1)
        for weight, transposed in (
            (right_operand, right_operand.dim() == 2 and right_operand.stride(0) == 1),
            (left_operand, False),
        ):
            if id(weight.untyped_storage()) in self._weights:
                self._count_product(weight, rows, k, n, transposed, segment)
                return
        if k == 1:  # an outer product: rotary angles
            return
        if left_operand.dim() == 3 and self._seq_len and left_operand.shape[-2] == n == self._seq_len:
            heads = max(1, left_operand.shape[0] // self._samples)
            self._attend(Attention(heads=heads, kv_heads=heads, head_dim=k, causal=False), segment)
        elif left_operand.dim() == 3 and self._seq_len and left_operand.shape[-2] == k == self._seq_len:
            pass  # scores times values, the other half of the same attention
        else:
            segment.products.append(Product("", rows, k, n, False, False))

    def _count_product(
        self, weight: "torch.Tensor", rows: float, k: int, n: int, transposed: bool, segment: Segment, count: int = 1,
        stacked: bool = False,
    ) -> None:  # fmt: skip
        name = self._weights[id(weight.untyped_storage())]
        segment.parameters.add(name)
        product = Product(name, rows, k, n, name in self._trainable, transposed, count=count, stacked=stacked)
        product.split = self._split(product, self._attended, self._width)
        segment.products.append(product)
        self._inside = product.split == "column"
        if product.split == "row":
            self._attended = False

    def _attend(self, call: Attention, segment: Segment) -> None:
        if not self._in_attention:
            segment.attention.append(call)
        self._attended = True

    def attending(
        self,
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        causal: bool,
        run: "Callable[[], torch.Tensor]",
    ) -> "torch.Tensor":
        """Runs an attention that is one function; its inner operators count as that one."""
        heads = query.shape[-3] if query.dim() > 2 else 1
        kv_heads = key.shape[-3] if key.dim() > 2 else 1
        head_dim = (query.shape[-1] + value.shape[-1]) // 2
        call = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal)
        self._attend(call, self._here())
        self._in_attention = True
        try:
            return run()
        finally:
            self._in_attention = False

    def grouped(self, rows: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Records a product of (r, k) rows, sorted by expert, with (experts, k, n) weights; rows are averaged over experts."""
        experts, k, n = weights.shape
        segment = self._here()
        segment.kernels += 1
        transposed = weights.stride(1) == 1
        self._count_product(weights, rows.shape[0] / experts, k, n, transposed, segment, count=experts, stacked=True)

    # End of the step.

    def failed(self, error: BaseException) -> None:
        """Handles an error that stopped the step.

        Raises:
            WorkloadError: the workload caused it.
        """
        from ...base.errors import RedlineError

        if isinstance(error, RedlineError):
            raise error
        module_path = next((path for path in reversed(self._paths) if path), "the model")
        message = " ".join(str(error).split())[:200]
        self._error = f"{type(error).__name__}: {message}"
        name = _operator_in(message) or self._operator or "before the first operator"
        self._operator = f"{name} in {module_path}" if not self._backward else f"{name} in backward"

    def recorded(self, segments: list[Segment] | None = None) -> StepTrace:
        """The recorded step, with `segments` in place of its own."""
        parameters = dict(self._model.named_parameters())
        return StepTrace(
            segments=self.segments if segments is None else segments,
            parameters={name: tuple(parameter.shape) for name, parameter in parameters.items()},
            frozen={name for name, parameter in parameters.items() if not parameter.requires_grad},
            samples=self._samples,
            tail_transient=max(0.0, self._tail_peak - self._forward_end),
            operator=self._operator if self._error else "",
            error=self._error,
        )


def _operator_in(message: str) -> str | None:
    import re

    match = re.search(r"(aten|torch|prims|_c10d_functional|\w+)(::|\.)(\w+)(\.\w+)?", message)
    return match.group() if match and match.group(1) in ("aten", "prims") else None


def _PRODUCTS(aten: Any) -> Any:
    return (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
    )


_ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "scalar_tensor")
)
"""Operators that launch no kernel."""


def _operators(recorder: Recorder) -> Any:
    from ...base._torch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return recorder.run(func, args, kwargs or {})

    return Operators()
