"""What other trainers do otherwise than redline: formats, what is exchanged when, kernels of their own; named facts.

An estimate for one of them has its `setup` (fields of `TrainingSetup`) and its `constants` (changes of `Constants`). Where
a file or a configuration states a thing, that counts and not what stands here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import UsageError, unknown
from .constants import Constants
from .setup import TrainingSetup


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The facts of a trainer."""

    name: str
    facts: tuple[str, ...] = ()
    """In words, for people who read an estimate."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainingSetup` that differ from redline's."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Constants that differ from redline's."""

    def training(self, **asked: Any) -> TrainingSetup:
        """The setup of a training by it; what is asked for counts before its facts."""
        return TrainingSetup(**{**self.setup, **asked})

    def constants_on(self, base: Constants) -> Constants:
        """Constants of a device as it has them."""
        return base.replace(**self.constants) if self.constants else base


_SHARDS = {"precision": "bf16_pure", "parameter_dtype": "fp32", "gradient_dtype": "fp32", "pieces": True}
_MASTER = {"precision": "bf16_pure", "master_weights": "fp32"}
_FITTED = {"compute_std": 0.07, "launch_std": 0.12, "link_std": 0.15, "stall_std": 0.25, "time_noise": 0.07,
           "network_noise": 0.14}  # fmt: skip
"""Constants that were fitted to runs of a trainer leave less to doubt."""

TRAINERS: Mapping[str, Trainer] = {
    each.name: each
    for each in (
        Trainer(name="redline"),
        Trainer(
            name="fsdp",
            facts=("fp32 shards of weights, gradients and states, gathered in bf16; residual stream in bf16",),
            setup=_SHARDS,
        ),
        Trainer(
            name="torchtitan",
            facts=(
                "FSDP2: fp32 shards of weights, gradients and states, gathered in bf16; residual stream in bf16",
                "the loss upcasts logits by operators",
            ),
            setup={**_SHARDS, "loss": "plain"},
        ),
        Trainer(name="trainer"),
        Trainer(
            name="deepspeed",
            facts=("16-bit weights and gradients beside fp32 master weights and states",),
            setup={**_MASTER, "gradient_dtype": "bf16"},
        ),
        Trainer(
            name="megatron",
            facts=("16-bit weights, fp32 gradients to which products add, master weights and states; activations go in slices "
                   "between stages; cuDNN's attention",),
            setup={**_MASTER, "gradient_dtype": "fp32", "scatter_transfers": True, "kernels": True,
                   "attention_kernel": "flash3", "loss": "parallel", "overlap_gradients": False},
            constants={**_FITTED, "launch_us": 31.0, "straggler_ms": 10.0},
        ),
        Trainer(
            name="nanotron",
            facts=("bf16 weights and gradients beside fp32 accumulators, master weights and states; plain kernels",),
            setup={**_MASTER, "gradient_dtype": "fp32", "gradient_copy": True, "attention": "flash_attention_2",
                   "balance": "cost", "reported_rank": "first"},
            constants={
                **_FITTED,
                "slack": 0.12,
                "slack_lasting": 0.1,
                "loss_factor": 2.5,
                "workspace_mib": 350.0,
                "launch_us": 32.0,
                "overlap": 0.35,
                # Its ZeRO 1 scatters gradients after the backward.
                "sharded_overlap": 0.05,
                "straggler_ms": 22.0,
                "ring_step_with_pipeline_us": 260.0,
                "stall_ms": 265.0,
                "stall_nodes": 34.0,
                "stalls_without_zero": True,
                "stall_least": 0.02,
                "stall_fatal": 0.3,
                "retry_factor": 3.0,
            },
        ),
    )
}  # fmt: skip
"""By name."""


def find_trainer(name: str) -> Trainer:
    """The facts of a trainer.

    Raises:
        UsageError: nothing is known of one of that name.
    """
    if name not in TRAINERS:
        raise UsageError(unknown("framework", name, TRAINERS))
    return TRAINERS[name]
