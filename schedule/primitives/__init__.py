"""The primitives, grouped by kind; methods of `Schedule`."""

from .checkpoint import checkpoint
from .data_parallel import cut_sequence, offload, shard_data
from .experts import limit_experts, shard_experts
from .formats import cast, float8
from .fused import fused_attention, fused_gelu, fused_loss
from .graphs import decompose, find, fuse, trace
from .modules import annotate, compile, hook, replace, replace_all
from .pipelines import cut_pipeline_stage, pipeline
from .tensor_parallel import fork_rng, parallel_loss, shard, share_samples, sync

__all__ = [
    "annotate",
    "cast",
    "checkpoint",
    "compile",
    "cut_pipeline_stage",
    "cut_sequence",
    "decompose",
    "find",
    "float8",
    "fork_rng",
    "fuse",
    "fused_attention",
    "fused_gelu",
    "fused_loss",
    "hook",
    "limit_experts",
    "offload",
    "parallel_loss",
    "pipeline",
    "replace",
    "replace_all",
    "shard",
    "shard_data",
    "shard_experts",
    "share_samples",
    "sync",
    "trace",
]
