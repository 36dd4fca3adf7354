"""Trace of a step: segments of the model, with the operators, kept bytes and memory traffic of each."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .model_facts import Attention, PerToken

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool

    @classmethod
    def of(cls, value: Any) -> Any:
        """The Spec of a tensor; other values are returned unchanged."""
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        return cls(tuple(value.shape), value.dtype, value.requires_grad)


def tensors_of(value: Any) -> "list[torch.Tensor]":
    """The tensors in nested lists, tuples and mappings."""
    import torch

    from ...base._torch import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclass(slots=True)
class Product:
    """A product with a weight: `rows` x `k` times `k` x `n`."""

    weight: str
    rows: float
    k: int
    n: int
    trainable: bool
    transposed: bool
    """True if the weight is stored n x k, as in nn.Linear."""
    split: str = "none"
    """Dimension that tensor parallelism divides: `column`, `row` or `none`."""
    count: int = 1
    """Number of identical products: a mixture's experts."""
    stacked: bool = False
    """True if one weight contains all of them, experts x k x n or experts x n x k."""


@dataclass(slots=True)
class Tally:
    """Bytes by their division under tensor parallelism."""

    outside: float = 0.0
    """Between the tensor-parallel segments."""
    inside: float = 0.0
    """Between a column-split product and the row-split one after it."""
    scores: float = 0.0
    """Tensors of queries x keys."""

    def add(self, kind: str, amount: float) -> None:
        """Adds to the field `kind`."""
        setattr(self, kind, getattr(self, kind) + amount)

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return self.outside + self.inside + self.scores

    def per_token(self, samples: int, length: int, heads: int) -> PerToken:
        """Bytes a token of a batch of `samples` of `length` tokens; scores are those of a head, query and key."""
        tokens, pairs = samples * length, samples * length**2 * heads
        return PerToken(
            sequence=self.outside / tokens,
            sharded=self.inside / tokens + (0.0 if pairs else self.scores / tokens),
            scores=self.scores / pairs if pairs else 0.0,
        )


@dataclass(slots=True)
class Segment:
    """A repeated block, or the operators of one module between the blocks. Bytes are of the traced batch."""

    path: str
    """Path of the module; the innermost one for operators outside blocks."""
    block: bool
    """True for a repeated block."""
    after: int
    """Number of blocks that had begun when it was first entered, itself included."""
    products: list[Product] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    saved: Tally = field(default_factory=Tally)
    saved_fixed: float = 0.0
    """Kept copies of weights, such as autocast's: bytes that do not grow with the batch."""
    saved_rows: float = 0.0
    """Kept bytes of integers: token ids, labels, masks."""
    traffic: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    """Bytes read and written by operators other than products, backward."""
    traffic_fixed: float = 0.0
    """Bytes that casting weights moves, forward; they do not grow with the batch."""
    kernels: int = 0
    """Kernels of forward."""
    boundary: float = 0.0
    """Bytes of the inputs that need a gradient."""
    transient: float = 0.0
    """Peak of live bytes in its backward beyond those at its start, without gradients of parameters."""
    parameters: set[str] = field(default_factory=set)
    """Names of the parameters that it reads."""
    inputs: Any = None
    """A block's `(args, kwargs)`, with a `Spec` for every tensor."""


@dataclass(slots=True)
class StepTrace:
    """Trace of one step, in the order of the forward pass."""

    segments: list[Segment]
    parameters: dict[str, tuple[int, ...]]
    """Shape of every parameter."""
    frozen: set[str]
    samples: int
    tail_transient: float
    """Peak of live bytes around the loss beyond the tensors that forward keeps."""
    operator: str = ""
    """Operator at which tracing stopped, with position and reason; empty if it completed."""
    error: str = ""
