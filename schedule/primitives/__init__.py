"""The primitives, one file each; importing this package registers them."""

from . import (
    annotate,
    cast,
    checkpoint,
    compile,
    fork_rng,
    fuse,
    hook,
    offload,
    parallel_loss,
    replace,
    replace_all,
    shard,
    shard_data,
    sync,
)

__all__ = [
    "annotate",
    "cast",
    "checkpoint",
    "compile",
    "fork_rng",
    "fuse",
    "hook",
    "offload",
    "parallel_loss",
    "replace",
    "replace_all",
    "shard",
    "shard_data",
    "sync",
]
