"""Training setup: settings that all configurations of a search share."""

from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import UsageError, unknown
from ..knobs.meaning import BUCKET_MIB, FORMATS
from ..knobs.strategy import OFFLOADS
from ..models.parallel import PIPELINES
from .facts.derived import modules_of

OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "sgd-momentum": 1, "sgd": 0, "adafactor": 0}
"""Number of states of a parameter in each optimizer, each of the size of the master weights."""
PRECISIONS = tuple(FORMATS)
_DTYPES = ("fp32", "bf16", "fp16")
ATTENTION_KERNELS = ("flash1", "flash2", "flash3")
"""FlashAttention, FlashAttention-2 (PyTorch's scaled_dot_product_attention), and 3 or cuDNN's (Transformer Engine)."""
LOSSES = ("plain", "parallel", "compiled", "fused", "chunked")
"""Implementations of cross-entropy: `plain` by operators, which upcast the logits; `parallel` in fp32 over parts of the
vocabulary, in place; `compiled` by operators that a compiler fuses, over 16-bit logits beside their gradient; `fused` by one
kernel over 16-bit logits, which its gradient replaces; `chunked` together with the head, a chunk of tokens at a time, so that
logits are never stored."""
PRODUCTS = ("fp16", "fp8", "mxfp8", "nvfp4")
"""Number formats of products beyond those of precisions: 8 bits with a scale a tensor or row, 8 bits with one for each 32
numbers, 4 bits with one for each 16."""


_COUNTS = (
    "devices", "tp", "sp", "cp", "pp", "ep", "hsdp", "micro_batch", "virtual_stages", "seq_len", "global_batch", "grad_accum",
)  # fmt: skip
_NAMES = {
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "pipeline": PIPELINES,
    "offload": OFFLOADS,
    **dict.fromkeys(("parameter_dtype", "gradient_dtype", "gather_dtype", "reduce_dtype"), _DTYPES),
    "optimizer_dtype": (*_DTYPES, "int8"),
    "master_weights": ("none", *_DTYPES),
    "reported_rank": ("fullest", "first", "last"),
    "loss": LOSSES,
    "attention_kernel": ATTENTION_KERNELS,
    "products": PRODUCTS,
}
"""Values of the fields that are names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """The conventions of a training run.

    Fields that are also knobs (`precision`, `sequence_parallel`, ...) are the values of configurations without that knob.
    Frameworks differ in the rest, so each convention is a field; None means the convention of redline's own training at the
    precision in use.
    """

    devices: int = 1
    """Devices of the run; a configuration's tp * sp * pp * dp must equal this."""
    seq_len: int | None = None
    """Tokens of a sequence. None: that of the workload, else a sample counts as one token."""
    global_batch: int | None = None
    """Sequences of one optimizer step. None: that of the workload, else micro_batch * dp * grad_accum."""
    memory_limit_mib: float | None = None
    """Memory that a rank may use, MiB. None: the device's memory."""

    # Values of configurations without the knob.
    tp: int = 1
    sp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    capacity_factor: float = 0.0
    zero: int = 0
    hsdp: int = 1
    micro_batch: int = 1
    grad_accum: int | None = None
    """Micro-batches of a step; None: derived from the global batch."""
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
    """dtype of the stored weights that the forward computes with; None: fp32 under autocast (`bf16`, `fp16`), bf16 for
    `bf16_pure`."""
    master_weights: str | None = None
    """dtype of a further copy of the weights which the optimizer updates; `none`: it updates the weights themselves."""
    gradient_dtype: str | None = None
    """dtype in which gradients are kept and accumulated; None: that of the parameters."""
    gradient_copy: bool = False
    """True if backward writes gradients in the parameters' dtype before they are added to those kept in `gradient_dtype`, as
    nanotron's and Megatron's fp32 accumulators do."""
    gradients_stay: bool = False
    """True if gradients have a permanent buffer, as in Megatron, rather than being created by backward and freed by the
    update."""
    optimizer_dtype: str = "fp32"
    """dtype of the optimizer's states, `int8` for blocks with a scale each (Dettmers et al., arXiv:2110.02861); `bf16_pure`
    without master weights has them in the weights' dtype."""
    state_share: float = 1.0
    """Share of the optimizer's states that is kept, as where gradients are projected to a low rank (GaLore, arXiv:2403.03507)."""
    gather_dtype: str | None = None
    """dtype in which weights that replicas shard are gathered; None: that of products, as with FSDP's MixedPrecision. Under
    autocast alone it is that of the parameters, and products cast the gathered weights."""
    reduce_dtype: str | None = None
    """dtype in which gradients are reduced; None: that in which they are kept."""
    loss: str | None = None
    """Implementation of cross-entropy: a name in `LOSSES`; None: that of the model's own code."""
    parallel_loss: bool | None = None
    """True if logits stay sharded by vocabulary under tp; None: True."""
    pipeline: str = "1f1b"
    """One of `models.parallel.PIPELINES`."""
    virtual_stages: int = 1
    """Model chunks a rank holds, where `pipeline` has several."""
    scatter_transfers: bool = False
    """True if each tensor-parallel rank sends one slice to the next stage, as in Megatron-LM (arXiv:2104.04473, section 4.1),
    rather than all of them the same tensor."""
    flushed_samples: int | None = None
    """Samples of a replica after which its pipeline drains; None: those of a step."""
    balance: str = "layers"
    """Division of layers into stages: `layers`, equally many blocks each, or `cost`, the head counted too."""
    overlap_gradients: bool = True
    """True if gradients are reduced while the last backward still runs."""
    bucket_copy: bool = False
    """True if gradient buckets take memory in addition to the gradients, as in torch's DistributedDataParallel unless gradients
    are views into them."""
    bucket_mib: float = BUCKET_MIB
    """Size of a gradient bucket, MiB."""
    recompute_attention: bool = False
    """Selective recomputation: scores of eager attention are never kept (arXiv:2205.05198)."""
    recompute_modules: str | None = None
    """Modules that blocks recompute in backward, such as `moe_act+layernorm`: names of Megatron-LM's `--recompute-modules`
    (`estimator/facts/derived.py`). Only of models that are counted from their shape."""
    keeps_products: bool = False
    """True if blocks that are not recomputed as a whole keep their inputs, attention and every other product, and recompute the
    rest, as torchtitan's selective checkpointing does."""
    offload_weights: bool = False
    """True if not only the optimizer is offloaded: pieces of weights and gradients are in host memory too, and are transferred in
    every pass (FSDP's CPUOffload, DeepSpeed's `offload_param`)."""
    offload_activations: bool = False
    """True if activations are kept in host memory from forward to backward, as by torchtune's `enable_activation_offloading` and
    Megatron-LM's `--cpu-offloading`."""
    pinned_memory: bool = True
    """True if copies to and from host memory are from pinned memory; others are slower (`Constants.pageable_share`)."""
    deepspeed_update: bool = False
    """True if the update is DeepSpeed's: gradients are flattened and widened for it, and those of an offloaded optimizer are sent
    after every micro-batch and summed in host memory."""
    keeps_cache: bool = False
    """True if the model returns its keys and values, as transformers' models do unless `use_cache` is off: recomputed blocks then
    keep theirs until the step ends. The model's own checkpointing turns that off, an external wrapper does not."""
    pieces: bool = False
    """True if replicas keep pieces of the weights in addition to the gathered ones, as FSDP does (in redline's own training they
    do)."""
    unsharded_gradients: bool = False
    """True if replicas that shard gradients keep them whole while they accumulate, and reduce them once a step (`no_sync`,
    `set_requires_gradient_sync(False)`)."""
    rows_once_a_node: bool = False
    """True if a token is sent once to each node with some of its experts and distributed there, as by DeepEP's kernels, rather
    than once to each of its experts."""
    overlap_experts: bool = False
    """True if the exchange of rows between experts overlaps with products of another micro-batch, as by Megatron-LM's
    `--overlap-moe-expert-parallel-comm` or DualPipe."""
    balanced_experts: bool = False
    """True if all experts get equally many rows, as by Megatron-LM's `--moe-router-force-load-balancing`, with which recipes are
    measured."""
    further_mib: float = 0.0
    """Memory of every rank that no other field describes, such as a second model, MiB."""
    retries: bool = True
    """True if the allocator may have to free and allocate again on a nearly full device; False with expandable segments."""
    early_kernels: bool | None = None
    """True if kernels for Blackwell are those of libraries before November 2025, which were slower (`Constants.early_kernels`).
    None: True on B200 and GB200 in bf16 and fp8."""
    separate_experts: bool = False
    """True if the host launches each expert's product by itself, as in Transformer Engine's GroupedLinear, rather than one
    grouped product of all."""
    overlap_tensor: bool = False
    """True if tensor parallelism's collectives overlap with products (asynchronous TP)."""
    overlap_transfers: bool = False
    """True if stages compute while they hand over micro-batches, as Megatron-LM's interleaved pipelines do."""
    overlap_gathers: bool = False
    """True if weights that were updated in pieces are gathered during the next forward (ZeRO 1)."""
    frozen_bits: float | None = None
    """Bits of a frozen weight, with its scales; None: those of the weights' dtype."""
    attention_kernel: str | None = None
    """Generation of the fused attention kernels: a name in `ATTENTION_KERNELS`; None: that of the implementation of a traced
    model, otherwise `flash2`."""
    products: str | None = None
    """Number format of the matrix products of blocks: a name in `PRODUCTS`; None: that of the precision."""
    reported_rank: str = "fullest"
    """Rank whose peak memory a measurement reports: the `fullest` rank, or that of the `first` or `last` stage."""
    reserved_memory: bool = True
    """True if the measured peak is the allocator's reserved memory; False: that of live tensors."""
    fixed: frozenset[str] = frozenset()
    """Knobs that configurations may have but that are ignored: the setup's value counts, as a fact of a framework."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"TrainingSetup: {name} must be an integer of at least 1, but got {value!r}")
        for name, valid, rule in (
            ("zero", self.zero in (0, 1, 2, 3), "0, 1, 2 or 3"),
            ("capacity_factor", self.capacity_factor >= 0, "from 0 on"),
            ("checkpoint_ratio", 0 <= self.checkpoint_ratio <= 1, "from 0 to 1"),
            ("memory_limit_mib", self.memory_limit_mib is None or self.memory_limit_mib > 0, "positive"),
            ("state_share", 0 < self.state_share <= 1, "above 0, at most 1"),
            ("bucket_mib", self.bucket_mib > 0, "positive"),
        ):
            if not valid:
                raise UsageError(f"TrainingSetup: {name} must be {rule}, but got {getattr(self, name)!r}")
        for name, values in _NAMES.items():
            if (value := getattr(self, name)) is not None and value not in values:
                raise UsageError(f"TrainingSetup: {unknown(name, value, values)}")
        modules_of(self.recompute_modules)

    @property
    def in_pieces(self) -> bool:
        """True if replicas keep pieces of the weights in addition to the gathered ones."""
        return self.own or self.pieces

    @property
    def own(self) -> bool:
        """True if replicas exchange the same data in the same formats as redline's own training (`knobs/meaning.py`), rather than
        by the conventions of another framework."""
        dtypes = (self.parameter_dtype, self.gradient_dtype, self.gather_dtype, self.reduce_dtype)
        return dtypes == (None,) * 4 and self.master_weights in (None, "none")

    def replace(self, **changes: Any) -> "TrainingSetup":
        """A copy with some fields changed."""
        return replace(self, **changes)
