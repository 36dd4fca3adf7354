"""The primitives, one file each; `Schedule` has them as methods."""

from .annotate import annotate
from .cast import cast
from .checkpoint import checkpoint
from .compile import compile
from .cut_pipeline_stage import cut_pipeline_stage
from .cut_sequence import cut_sequence
from .decompose import decompose
from .find import find
from .float8 import float8
from .fork_rng import fork_rng
from .fuse import fuse
from .fused_attention import fused_attention
from .fused_gelu import fused_gelu
from .fused_loss import fused_loss
from .hook import hook
from .offload import offload
from .parallel_loss import parallel_loss
from .pipeline import pipeline
from .replace import replace
from .replace_all import replace_all
from .shard import shard
from .shard_data import shard_data
from .sync import sync
from .trace import trace

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
    "offload",
    "parallel_loss",
    "pipeline",
    "replace",
    "replace_all",
    "shard",
    "shard_data",
    "sync",
    "trace",
]
