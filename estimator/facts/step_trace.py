"""What a traced step leaves: segments of the model, with what each computed, kept and moved."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool

    @classmethod
    def of(cls, value: Any) -> Any:
        """The Spec of a tensor; anything else as it is."""
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        return cls(tuple(value.shape), value.dtype, value.requires_grad)


@dataclass(slots=True)
class Product:
    """A product with a weight: `rows` x `k` times `k` x `n`."""

    weight: str
    rows: float
    k: int
    n: int
    trainable: bool
    transposed: bool
    """Whether the weight is stored n x k, as nn.Linear does."""
    split: str = "none"
    """What tensor parallelism divides of it: `column`, `row` or `none`."""
    count: int = 1
    """How many alike: a mixture's experts."""
    stacked: bool = False
    """Whether the weight is that of all of them, experts x k x n or experts x n x k."""


@dataclass(slots=True)
class AttentionCall:
    """A scaled dot-product attention, whatever the implementation."""

    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    causal: bool


@dataclass(slots=True)
class Tally:
    """Bytes, apart by what tensor parallelism does to them."""

    outside: float = 0.0
    """Between the tensor-parallel segments."""
    inside: float = 0.0
    """Between a column-split product and the row-split one behind it."""
    scores: float = 0.0
    """Of tensors of queries x keys."""

    def add(self, kind: str, amount: float) -> None:
        """Adds to the field of that name."""
        setattr(self, kind, getattr(self, kind) + amount)

    @property
    def total(self) -> float:
        """All of them."""
        return self.outside + self.inside + self.scores


@dataclass(slots=True)
class Segment:
    """A repeated block, or what runs in one module between the blocks. Bytes are of the traced batch."""

    path: str
    """Path of the module; of the innermost for what is in no block."""
    block: bool
    """Whether it is a repeated block."""
    after: int
    """How many blocks had begun when it was first entered, itself included."""
    products: list[Product] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    saved: Tally = field(default_factory=Tally)
    saved_fixed: float = 0.0
    """Kept copies of weights, such as autocast's: bytes that do not grow with the batch."""
    saved_rows: float = 0.0
    """Kept bytes of whole numbers: token ids, labels, masks."""
    traffic: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    """Bytes read and written by operators that are no products, backward."""
    traffic_fixed: float = 0.0
    """Bytes that casting weights moves, forward; they do not grow with the batch."""
    kernels: int = 0
    """Kernels of forward."""
    kernels_backward: int = 0
    """Kernels of backward."""
    boundary: float = 0.0
    """Bytes of the inputs that need a gradient."""
    boundary_width: int = 0
    """Last dimension of the widest of them."""
    transient: float = 0.0
    """Peak of live bytes in its backward beyond those at its start; gradients of parameters not counted."""
    parameters: set[str] = field(default_factory=set)
    """Names of the parameters that it reads."""
    inputs: Any = None
    """A block's `(args, kwargs)`, with a `Spec` for every tensor."""


@dataclass(slots=True)
class StepTrace:
    """What one step did, in the order of the forward pass."""

    segments: list[Segment]
    parameters: dict[str, tuple[int, ...]]
    """Shape of every parameter."""
    frozen: set[str]
    samples: int
    tail_transient: float
    """Peak of live bytes around the loss beyond what forward keeps."""
    operator: str = ""
    """Operator at which tracing stopped, with where and why; empty where it came to the end."""
    error: str = ""
