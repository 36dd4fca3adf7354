"""Named facts of other trainers that differ from redline's: formats, exchanges, their own kernels. They are in `trainers.yaml`.

An estimate for a trainer uses its `setup` (fields of `TrainingSetup`) and its `constants` (changes of `Constants`). Settings of a
file or a configuration take precedence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

from ..base.errors import UsageError, unknown
from ..base.reading import parse_yaml
from ..frameworks.registry import find_framework
from ..knobs.strategy import STANDARD
from ..models.architecture import PLAIN_DECODERS
from .constants import Constants
from .facts.model_facts import Shape
from .hardware import Hardware
from .setup import TrainingSetup


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The facts of a trainer."""

    name: str
    reads: str | None = None
    """The framework of `redline.frameworks` with the same conventions."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `TrainingSetup` that differ from redline's."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Constants that differ from redline's."""
    builds: bool = False
    """True if it builds models from its own modules rather than transformers'."""
    earlier: Mapping[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """Fields of `TrainingSetup` that differ before a version, by that version; the latest first."""

    def of_version(self, version: str) -> "Trainer":
        """The facts of a version such as `25.09`.

        Raises:
            UsageError: it is not a version, or the trainer's facts have none.
        """
        parts = version.split(".")
        if not self.earlier or not all(part.isdigit() for part in parts):
            versions = ", ".join(f"{major}.{minor:02}" for major, minor in self.earlier) or "none"
            raise UsageError(
                f"framework {self.name}@{version}: a version has numbers, such as 25.11; facts change with {versions}"
            )
        number = (int(parts[0]), int(parts[1]) if len(parts) > 1 else 0)
        changes = [facts for first, facts in self.earlier.items() if number < first]
        return replace(self, own=reduce(lambda own, facts: {**own, **facts}, changes, dict(self.own)))

    def assuming(self, facts: Mapping[str, Any]) -> "Trainer":
        """The trainer with these fields of `TrainingSetup` instead of its own.

        Raises:
            UsageError: a fact is unknown or a knob, or has an impossible value.
        """
        names = {field.name: field.type for field in fields(TrainingSetup) if field.name not in {*STANDARD, *_ASKED}}
        for name, value in facts.items():
            if name not in names:
                raise UsageError(f"--assume: {unknown('fact', name, names)}")
            if names[name] in ("bool", bool) and not isinstance(value, bool):
                raise UsageError(f"--assume {name}: must be true or false, but got {value!r}")
        assuming = replace(self, own={**self.own, **facts})
        assuming.training()  # checks the values
        return assuming

    @property
    def setup(self) -> dict[str, Any]:
        """Fields of `TrainingSetup` that differ from redline's, for a training in bf16."""
        conventions = find_framework(self.reads).conventions({"precision": "bf16"}) if self.reads else {}
        return {**conventions, **self.own}

    @property
    def facts(self) -> tuple[str, ...]:
        """Its facts in words, for users who read an estimate."""
        return assumed(self.setup)

    def training(self, **settings: Any) -> TrainingSetup:
        """The setup of a training with it; arguments take precedence over its facts."""
        return TrainingSetup(**{**self.setup, **settings})

    def planned(self, hardware: Hardware, **settings: Any) -> TrainingSetup:
        """The setup of plans for it on some hardware: knobs that its facts determine are ignored. Products are fp16 if the
        hardware lacks bf16."""
        facts = self.setup
        if facts and "bf16" not in hardware.tflops and "fp16" in hardware.tflops:
            facts = {**facts, "products": "fp16"}
        settled = frozenset(STANDARD) & facts.keys()
        return TrainingSetup(
            **{**facts, **{name: settings[name] for name in settings if name not in settled}, "fixed": settled}
        )

    def constants_on(self, base: Constants) -> Constants:
        """Constants of a device with the trainer's changes."""
        return base.replace(**self.constants) if self.constants else base


_ASKED = ("devices", "seq_len", "global_batch", "memory_limit_mib", "fixed", "pipeline")
"""Fields of `TrainingSetup` that requests set, or that are knobs by another name."""
_FITTED = {"compute_std": 0.07, "launch_std": 0.12, "link_std": 0.15, "stall_std": 0.25, "time_noise": 0.07,
           "network_noise": 0.14}  # fmt: skip
"""Smaller uncertainty of constants that were fitted to runs of a trainer."""


def _read() -> dict[str, Trainer]:
    """The trainers of `trainers.yaml`, by name."""
    trainers = {}
    for name, row in parse_yaml(Path(__file__).with_name("trainers.yaml").read_bytes()).items():
        constants = {**(_FITTED if row.pop("fitted", False) else {}), **row.pop("constants", {})}
        earlier = {}
        for version, facts in row.pop("earlier", {}).items():
            major, minor = version.split(".")
            earlier[int(major), int(minor)] = facts
        trainers[name] = Trainer(name=name, constants=constants, earlier=earlier, **row)
    return trainers


TRAINERS: Mapping[str, Trainer] = _read()
"""The trainers by name."""


OWN = "weights, gradients and states of the optimizer in the formats that the knob `precision` says"
"""Assumption about redline's own training."""


def find_trainer(name: str) -> Trainer:
    """The facts of a trainer, `NAME` or `NAME@VERSION`; without a version those of the latest.

    Raises:
        UsageError: no trainer has that name, or it has no versions.
    """
    name, at, version = name.partition("@")
    if name not in TRAINERS:
        raise UsageError(unknown("framework", name, TRAINERS))
    return TRAINERS[name].of_version(version) if at else TRAINERS[name]


def built(shape: Mapping[str, Any] | None, trainer: Trainer) -> Shape | None:
    """The model as a trainer's own modules build it, from its shape as returned by `redline.models.architecture.shape_of`; None
    if transformers' modules run, or the shape is neither Llama's nor GPT-2's."""
    return numbers_of(shape) if trainer.builds else None


def numbers_of(shape: Mapping[str, Any] | None) -> Shape | None:
    """Shape numbers of a shape in run.yaml's terms; None if its family is neither Llama's nor GPT-2's."""
    if shape is None or shape.get("family") not in PLAIN_DECODERS:
        return None
    llama = shape["family"] != "gpt2"
    sizes = {name: shape[name] for name in ("layers", "hidden", "heads", "intermediate", "vocabulary")}
    names = (
        *("kv_heads", "head_dim", "experts", "experts_per_token", "expert_intermediate", "dense_layers"),
        *("kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim"),
    )
    further = {name: shape[name] for name in names if llama and shape.get(name)}
    if shape.get("shared_experts") and "expert_intermediate" in further:
        further["shared_intermediate"] = shape["shared_experts"] * further["expert_intermediate"]
    return Shape(
        name=shape["family"],
        tied=bool(shape.get("tied")),
        gated=llama,
        biases=not llama,
        positions=0 if llama else shape["positions"],
        dropout=bool(shape.get("dropout")),
        **sizes,
        **further,
    )


def under_facts(setup: TrainingSetup, hardware: Hardware, constants: Constants) -> dict[str, Any]:
    """Constants that facts of a setup change: the balance of experts, retries, and the kernels' generation."""
    changes: dict[str, Any] = {}
    if setup.balanced_experts:
        changes["expert_spread"] = 0.0
    if not setup.retries:
        changes["retry_factor"] = 1.0
    if has_early_kernels(setup, hardware):
        changes["matmul_efficiency"] = constants.matmul_efficiency * constants.early_kernels
    return changes


def has_early_kernels(setup: TrainingSetup, hardware: Hardware) -> bool:
    """True on Blackwell, unless libraries are known to be later: formats with block scales, B300 and
    GB300 came with later ones."""
    chip = hardware.chip
    if not chip.startswith(("b2", "b3", "gb")):
        return False
    if setup.early_kernels is None:
        return setup.products not in ("mxfp8", "nvfp4") and chip in ("b200", "gb200")
    return setup.early_kernels


_READ_AS = {"megatron-bridge": "megatron"}
"""Frameworks whose files state what differs from a trainer."""


def trainer_of(framework: str) -> Trainer:
    """The facts of a framework of `redline.frameworks`, or of the one that it builds on; the Trainer's if unknown."""
    return TRAINERS.get(_READ_AS.get(framework, framework), TRAINERS["trainer"])


_ASSUMED: tuple[tuple[str, Any, str], ...] = (
    ("parameter_dtype", None, "trained weights are kept in {}"),
    ("master_weights", None, "master weights in {}"),
    ("gradient_dtype", None, "gradients in {}"),
    ("pieces", True, "replicas keep pieces of the weights and gather them in 16 bits"),
    ("gradient_copy", True, "backward writes gradients of its own before they are added"),
    ("keeps_products", True, "blocks keep attention and every other product, and recompute the rest"),
    ("recompute_modules", None, "blocks recompute {}"),
    ("unsharded_gradients", True, "gradients are whole while they accumulate"),
    ("gradients_stay", True, "gradients have a buffer that is always there"),
    ("gather_dtype", None, "weights are gathered in {}"),
    ("keeps_cache", True, "recomputed blocks hand out keys and values, which stay until the step ends"),
    ("offload_weights", True, "what is offloaded are pieces of weights and gradients too"),
    ("offload_activations", True, "activations are in host memory from forward to backward"),
    (
        "deepspeed_update",
        True,
        "gradients are flattened and widened at the update, offloaded ones summed in host memory",
    ),
    ("optimizer_dtype", None, "states of the optimizer in {}"),
    ("overlap_experts", True, "exchanges between experts overlap with products"),
    ("balanced_experts", True, "all experts get equally many rows"),
    ("early_kernels", True, "kernels for Blackwell are those of libraries before November 2025"),
    ("flushed_samples", None, "pipelines drain after {} samples of a replica"),
    ("bucket_copy", True, "replicas that are not sharded have gradient buckets beside the gradients"),
    ("reserved_memory", False, "the peak is of what is allocated, not of what the allocator reserved"),
    ("loss", "plain", "the loss upcasts logits by operators"),
    ("loss", "parallel", "the loss keeps fp32 logits, a part of the vocabulary on each rank"),
    ("loss", "compiled", "the loss is compiled: 16-bit logits and their gradient"),
    ("loss", "fused", "the loss is one kernel over 16-bit logits"),
    ("loss", "chunked", "the loss never forms the logits"),
    ("products", None, "products of blocks in {}"),
)
"""Fields of `TrainingSetup`, the value at which a sentence is shown (None: any that is set), and the sentence."""


def assumed(setup: Mapping[str, Any]) -> tuple[str, ...]:
    """Effects of conventions on memory, in words; without conventions, those of redline's own training."""
    if not setup:
        return (OWN,)
    in_bf16 = setup.get("precision") == "bf16_pure" and not setup.get("parameter_dtype")
    notes = ["weights are kept in bf16"] if in_bf16 else []
    for name, shown, sentence in _ASSUMED:
        value = setup.get(name)
        is_set = value not in (None, "none", "") and (name, value) != ("optimizer_dtype", "fp32")
        if is_set if shown is None else value == shown:
            notes.append(sentence.format(str(value).replace("+", ", ")))
    return tuple(notes)
