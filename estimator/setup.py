"""How a model is trained: what is the same for all configurations of a search."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.errors import UsageError, unknown
from ..knobs.meaning import BUCKET_MIB, FORMATS
from ..knobs.strategy import OFFLOADS
from ..models.parallel import PIPELINES

OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "sgd-momentum": 1, "sgd": 0, "adafactor": 0}
"""States a parameter has in each optimizer, each of the size of the master weights."""
PRECISIONS = tuple(FORMATS)
_DTYPES = ("fp32", "bf16", "fp16")
ATTENTION_KERNELS = ("flash1", "flash2", "flash3")
"""FlashAttention, FlashAttention-2 (PyTorch's scaled_dot_product_attention), and 3 or cuDNN's (Transformer Engine)."""
LOSSES = ("plain", "parallel", "fused", "chunked")
"""By operators, which upcast the logits; in fp32 over parts of the vocabulary, in place; by one kernel over 16-bit logits whose
gradient takes their place; or together with the head, a chunk of tokens at a time, so that logits are never there."""
_REPORTED = ("fullest", "first", "last")
PRODUCTS = ("fp16", "fp8", "mxfp8", "nvfp4")
"""What products may multiply besides what precisions say: 8 bits with a scale a tensor or row, with one for each 32 numbers,
4 bits with one for each 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """The conventions of a training run.

    Fields that are also knobs (`precision`, `sequence_parallel`, ...) are what a configuration without that
    knob has. Frameworks differ in the rest, so each convention is a field; None means what redline's own
    training does at the precision at hand.
    """

    devices: int = 1
    """Devices of the run; a configuration's tp * sp * pp * dp must be this."""
    seq_len: int | None = None
    """Tokens of a sequence. None: that of the workload, else a sample counts as one token."""
    global_batch: int | None = None
    """Sequences of one optimizer step. None: that of the workload, else micro_batch * dp * grad_accum."""
    memory_limit_mib: float | None = None
    """What a rank may use, MiB. None: the device's memory."""

    # What a configuration without the knob has.
    tp: int = 1
    sp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    hsdp: int = 1
    micro_batch: int = 1
    grad_accum: int | None = None
    """Micro-batches of a step; None: what the global batch comes to."""
    checkpoint_ratio: float = 0.0
    sequence_parallel: bool = False
    precision: str = "bf16"
    attention: str = "sdpa"
    fusion: bool = False
    kernels: bool = False
    offload: str = "none"
    fused_optimizer: bool = True

    # Conventions of the framework.
    optimizer: str = "adamw"
    """A name in `OPTIMIZERS`."""
    parameter_dtype: str | None = None
    """dtype of the weights the forward computes with as they are stored; None: fp32 under autocast (`bf16`,
    `fp16`), bf16 for `bf16_pure`."""
    master_weights: str | None = None
    """dtype of a further copy of the weights which the optimizer updates; `none`: the weights themselves."""
    gradient_dtype: str | None = None
    """dtype in which gradients are kept and accumulated; None: that of the parameters."""
    gradient_copy: bool = False
    """Whether backward writes gradients in the parameters' dtype before they are added to those kept in
    `gradient_dtype`, as nanotron's and Megatron's fp32 accumulators do."""
    gradients_stay: bool = False
    """Whether gradients have a buffer of their own all the time, as Megatron's have, rather than come with backward and go with
    the update."""
    optimizer_dtype: str = "fp32"
    """dtype of the optimizer's states; `bf16_pure` without master weights has them in the weights' dtype."""
    gather_dtype: str | None = None
    """dtype in which weights that replicas cut are gathered; None: that of products, as FSDP's MixedPrecision has it. Under
    autocast alone it is that of the parameters, and products cast what was gathered."""
    reduce_dtype: str | None = None
    """dtype in which gradients travel; None: that they are kept in."""
    loss: str | None = None
    """How cross-entropy is computed: a name in `LOSSES`; None: as the model's own code does."""
    parallel_loss: bool | None = None
    """Whether logits stay sharded by vocabulary under tp; None: they do."""
    pipeline: str = "1f1b"
    """One of `models.parallel.PIPELINES`."""
    virtual_stages: int = 1
    """Model chunks a rank holds, where `pipeline` has several."""
    scatter_transfers: bool = False
    """Whether tensor-parallel ranks send a slice each to the next stage, as Megatron-LM's do
    (arXiv:2104.04473, section 4.1), rather than all of them the same."""
    balance: str = "layers"
    """How layers are cut into stages: `layers`, equally many blocks each, or `cost`, the head counted too."""
    overlap_gradients: bool = True
    """Whether gradients are reduced while the last backward still runs."""
    bucket_copy: bool = False
    """Whether gradient buckets are memory beside the gradients, as torch's DistributedDataParallel has them
    unless gradients are views into them."""
    bucket_mib: float = BUCKET_MIB
    """Size of a gradient bucket, MiB."""
    recompute_attention: bool = False
    """Selective recomputation: scores of eager attention are never kept (arXiv:2205.05198)."""
    keeps_products: bool = False
    """Whether blocks that are not recomputed as a whole keep their inputs, attention and every other product, and
    recompute the rest, as torchtitan's selective checkpointing does."""
    offload_weights: bool = False
    """Whether what is offloaded is not the optimizer alone: pieces of weights and gradients are in host memory too, and come
    and go with every pass (FSDP's CPUOffload, DeepSpeed's `offload_param`)."""
    keeps_cache: bool = False
    """Whether the model returns its keys and values, as transformers' models do unless `use_cache` is off: recomputed blocks
    then keep theirs until the step ends. Its own checkpointing turns that off, a wrapper from outside does not."""
    pieces: bool = False
    """Whether replicas keep pieces of the weights beside those that are gathered, as FSDP does (in redline's own
    training they do)."""
    unsharded_gradients: bool = False
    """Whether replicas that cut gradients keep them whole while they accumulate, and reduce them once a step
    (`no_sync`, `set_requires_gradient_sync(False)`)."""
    overlap_tensor: bool = False
    """Whether tensor parallelism's collectives go on behind the products beside them (asynchronous TP)."""
    overlap_transfers: bool = False
    """Whether stages go on while they hand micro-batches over, as Megatron-LM's interleaved pipelines do."""
    overlap_gathers: bool = False
    """Whether weights that were updated in pieces are gathered behind the next forward (ZeRO 1)."""
    frozen_bits: float | None = None
    """Bits of a weight that is not trained, with its scales; None: those of the weights' dtype."""
    attention_kernel: str = "flash2"
    """Which generation of fused kernels attention has: a name in `ATTENTION_KERNELS`."""
    products: str | None = None
    """What the matrix products of blocks multiply: a name in `PRODUCTS`; None: what the precision says."""
    reported_rank: str = "fullest"
    """Whose peak memory a measurement states: the `fullest` rank's, or that of the `first` or `last` stage."""
    reserved_memory: bool = True
    """Whether the measured peak is what the allocator reserved; False: what live tensors took."""
    fixed: frozenset[str] = frozenset()
    """Knobs that configurations may have and that do not count: the setup's value does, as facts of a framework."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, kept for the record only."""

    def __post_init__(self) -> None:
        for name in ("devices", "tp", "sp", "cp", "pp", "ep", "hsdp", "micro_batch", "virtual_stages"):
            _at_least_one(name, getattr(self, name))
        for name in ("seq_len", "global_batch", "grad_accum"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"TrainingSetup: zero must be 0, 1, 2 or 3, but got {self.zero!r}")
        if not 0 <= self.checkpoint_ratio <= 1:
            raise UsageError(f"TrainingSetup: checkpoint_ratio must be from 0 to 1, but got {self.checkpoint_ratio!r}")
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("precision", PRECISIONS),
            ("pipeline", PIPELINES),
            ("offload", OFFLOADS),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"TrainingSetup: {unknown(name, getattr(self, name), known)}")
        for name in ("parameter_dtype", "gradient_dtype", "optimizer_dtype", "gather_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *_DTYPES):
                raise UsageError(f"TrainingSetup: {unknown(name, getattr(self, name), _DTYPES)}")
        if self.master_weights not in (None, "none", *_DTYPES):
            raise UsageError(f"TrainingSetup: {unknown('master_weights', self.master_weights, ('none', *_DTYPES))}")
        if self.memory_limit_mib is not None and not self.memory_limit_mib > 0:
            raise UsageError(f"TrainingSetup: memory_limit_mib must be positive, but got {self.memory_limit_mib!r}")
        if self.reported_rank not in _REPORTED:
            raise UsageError(f"TrainingSetup: {unknown('reported_rank', self.reported_rank, _REPORTED)}")
        if self.loss not in (None, *LOSSES):
            raise UsageError(f"TrainingSetup: {unknown('loss', self.loss, LOSSES)}")
        if self.attention_kernel not in ATTENTION_KERNELS:
            raise UsageError(f"TrainingSetup: {unknown('attention_kernel', self.attention_kernel, ATTENTION_KERNELS)}")
        if self.products not in (None, *PRODUCTS):
            raise UsageError(f"TrainingSetup: {unknown('products', self.products, PRODUCTS)}")
        if not self.bucket_mib > 0:
            raise UsageError(f"TrainingSetup: bucket_mib must be positive, but got {self.bucket_mib!r}")

    @property
    def in_pieces(self) -> bool:
        """Whether replicas keep pieces of the weights beside those that they gather."""
        return self.own or self.pieces

    @property
    def own(self) -> bool:
        """Whether replicas exchange what redline's own training exchanges, in its formats (`knobs/meaning.py`).
        Conventions of another framework are not that."""
        given = (self.parameter_dtype, self.gradient_dtype, self.gather_dtype, self.reduce_dtype)
        return given == (None,) * 4 and self.master_weights in (None, "none")

    def replace(self, **changes: Any) -> "TrainingSetup":
        """A copy with some fields changed."""
        return replace(self, **changes)


def _at_least_one(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"TrainingSetup: {name} must be an integer of at least 1, but got {value!r}")
