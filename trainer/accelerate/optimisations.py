"""Converts strategies in ATorch's format, lists of named optimisations, to knobs.

An entry is a name, `(name, configuration)` or `(name, configuration, tunable)`, as ATorch's `auto_accelerate` takes
and saves them. The search chooses the values of tunable knobs. Optimisations that are not in the list are off.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import UsageError, unknown
from ...knobs.strategy import STANDARD

NEUTRAL: Mapping[str, Any] = {
    name: STANDARD[name].neutral
    for name in (
        "tp", "pp", "zero", "hsdp", "sequence_parallel", "checkpoint_ratio", "precision", "kernels", "fusion", "offload",
    )
}  # fmt: skip
"""Values of the knobs without any optimisation."""
AXES = {"tensor": "tp", "data": "dp", "zero": "dp", "sequence": "sp", "pipeline": "pp", "pipe": "pp"}
"""Knob of each axis of `parallel_mode`."""
PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32"}
SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
"""ZeRO stage of each sharding strategy of FSDP."""


@dataclass(kw_only=True)
class Followed:
    """Knobs that follow from a list of optimisations."""

    devices: int
    knobs: dict[str, Any] = field(default_factory=lambda: dict(NEUTRAL))
    """Values of knobs; those left to the search are missing."""
    notes: list[str] = field(default_factory=list)
    """Settings that are not carried over, one sentence each."""


def follow(strategy: Sequence[Any], devices: int) -> Followed:
    """Converts a list of optimisations to knobs.

    Raises:
        UsageError: an entry is malformed, has an unknown name, or has a configuration that its optimisation does not
            take.
    """
    followed = Followed(devices=devices)
    entries = [_entry(entry) for entry in strategy]
    # Degrees come first: optimisations without their own degree use them.
    for name, config, tunable in sorted(entries, key=lambda entry: entry[0] != "parallel_mode"):
        previous = dict(followed.knobs)
        OPTIMISATIONS[name](followed, config)
        if tunable:
            for knob in [knob for knob in followed.knobs if followed.knobs[knob] != previous.get(knob)]:
                del followed.knobs[knob]
    return followed


def _entry(entry: Any) -> tuple[str, Any, bool]:
    fields = (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, (list, tuple)) else ()
    if not 1 <= len(fields) <= 3 or not isinstance(fields[0], str):
        raise UsageError(
            "an entry of a strategy must be a name, (name, configuration) or (name, configuration, tunable), but got "
            f"{str(entry)[:80]!r}"
        )
    if fields[0] not in OPTIMISATIONS:
        raise UsageError(unknown("optimisation", fields[0], OPTIMISATIONS))
    name, config, tunable = (*fields, None, False)[:2] + (bool(fields[2]) if len(fields) == 3 else False,)
    return name, config, tunable


def _parallel_mode(followed: Followed, config: Any) -> None:
    if config is None:
        return  # replicas on all devices, the default
    axes = config[0] if isinstance(config, (list, tuple)) and config and isinstance(config[0], (list, tuple)) else None
    if axes is None or not all(isinstance(axis_size, (list, tuple)) and len(axis_size) == 2 for axis_size in axes):
        raise UsageError(
            f"parallel_mode takes ([(axis, size), ...], None), such as ([('data', 4), ('tensor', 2)], None), but got {config!r}"
        )
    degrees: dict[str, int] = {}
    for axis, size in axes:
        if axis not in AXES:
            raise UsageError(unknown("axis of parallel_mode", axis, AXES))
        degrees[AXES[axis]] = degrees.get(AXES[axis], 1) * int(size)
    total = math.prod(degrees.values())
    if total != followed.devices:
        axes_text = " x ".join(f"{axis} {size}" for axis, size in axes)
        raise UsageError(f"parallel_mode is for {total} devices ({axes_text}), but there are {followed.devices}")
    followed.knobs |= {"tp": 1, "pp": 1, "dp": 1, **degrees}


def _setting_knob(name: str, knob: str, value: Any) -> Callable[[Followed, Any], None]:
    """Returns the converter of an optimisation that is a single value of a knob."""

    def apply(followed: Followed, config: Any) -> None:
        followed.knobs[knob] = value
        _note_dropped(followed, name, config)

    return apply


def _fsdp(followed: Followed, config: Any) -> None:
    settings = dict(config) if isinstance(config, Mapping) else {}
    strategy = str(getattr(settings.get("sharding_strategy"), "name", settings.pop("sharding_strategy", "FULL_SHARD")))
    settings.pop("sharding_strategy", None)
    strategy = strategy.rpartition(".")[2].upper()
    if strategy not in SHARDING:
        raise UsageError(unknown("sharding_strategy of fsdp", strategy, SHARDING))
    followed.knobs["zero"] = SHARDING[strategy] if followed.devices > 1 else 0
    if settings.pop("cpu_offload", None):
        followed.knobs["offload"] = "optimizer"
        followed.notes.append(
            "fsdp: cpu_offload keeps the optimizer's state in host memory (offload=optimizer), not the weights"
        )
    # Here it wraps the repeated blocks of the model.
    settings = {
        name: value
        for name, value in settings.items()
        if name not in ("atorch_wrap_cls", "auto_wrap_policy", "sync_module_states")
    }
    _note_dropped(followed, "fsdp", settings)


def _zero(stage: int) -> Callable[[Followed, Any], None]:
    def apply(followed: Followed, config: Any) -> None:
        followed.knobs["zero"] = stage if followed.devices > 1 else 0
        _note_dropped(followed, f"zero{stage}", config)

    return apply


def _amp(name: str, usual: str) -> Callable[[Followed, Any], None]:
    def apply(followed: Followed, config: Any) -> None:
        settings = dict(config) if isinstance(config, Mapping) else {"dtype": config} if config is not None else {}
        dtype = str(settings.pop("dtype", usual)).removeprefix("torch.")
        if dtype not in PRECISIONS:
            raise UsageError(unknown(f"dtype of {name}", dtype, PRECISIONS))
        followed.knobs["precision"] = PRECISIONS[dtype]
        settings.pop("enabled", None)
        settings.pop("opt_level", None)
        _note_dropped(followed, name, settings)

    return apply


def _half(followed: Followed, config: Any) -> None:
    kind = str(config if config is not None else "fp16").removeprefix("torch.")
    if kind not in PRECISIONS or PRECISIONS[kind] == "fp32":
        raise UsageError(unknown("format of half", kind, ("fp16", "bf16")))
    followed.knobs["precision"] = "bf16_pure" if PRECISIONS[kind] == "bf16" else "fp16"
    if PRECISIONS[kind] == "fp16":
        followed.notes.append(
            "half: weights stay in float32, as float16 has no room for small updates; products are in float16"
        )


def _degree(name: str, knob: str) -> Callable[[Followed, Any], None]:
    def apply(followed: Followed, config: Any) -> None:
        settings = dict(config) if isinstance(config, Mapping) else {}
        size = config if isinstance(config, int) and not isinstance(config, bool) else None
        for key in (f"{knob}_size", "size", "degree"):
            size = settings.pop(key, size)
        if size is None and followed.knobs[knob] == 1 and "dp" not in followed.knobs:
            size = followed.devices  # a single axis covers all devices
        if size is not None:
            if followed.devices % size:
                raise UsageError(f"{name} over {size} devices does not divide the {followed.devices} that there are")
            followed.knobs[knob] = size
        _note_dropped(followed, name, settings)

    return apply


def _checkpoint(followed: Followed, config: Any) -> None:
    followed.knobs["checkpoint_ratio"] = 1.0
    ratio = config.get("ratio") if isinstance(config, Mapping) else None
    if ratio is not None:
        followed.knobs["checkpoint_ratio"] = float(ratio)
    elif config:
        followed.notes.append(
            "checkpoint: every repeated block of the model is recomputed, not only the classes that its configuration names"
        )


def _note_dropped(followed: Followed, name: str, config: Any) -> None:
    """Adds a note about settings of an optimisation that are not carried over."""
    if not config:
        return
    dropped = ", ".join(map(str, config)) if isinstance(config, Mapping) else str(config)
    followed.notes.append(f"{name}: {dropped} of its configuration has no counterpart here and is not carried over")


OPTIMISATIONS: Mapping[str, Callable[[Followed, Any], None]] = {
    "parallel_mode": _parallel_mode,
    "module_replace": _setting_knob("module_replace", "kernels", True),
    "fsdp": _fsdp,
    "fsdp2": _fsdp,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "ddp": _zero(0),
    "amp_native": _amp("amp_native", "fp16"),
    "amp_apex": _amp("amp_apex", "fp16"),
    "amp_apex_o1": _amp("amp_apex_o1", "fp16"),
    "amp_apex_o2": _amp("amp_apex_o2", "fp16"),
    "half": _half,
    "fp8": _setting_knob("fp8", "precision", "fp8"),
    "tensor_parallel": _degree("tensor_parallel", "tp"),
    "pipeline_parallel": _degree("pipeline_parallel", "pp"),
    "sequence_parallel": _setting_knob("sequence_parallel", "sequence_parallel", True),
    "checkpoint": _checkpoint,
    "compile": _setting_knob("compile", "fusion", True),
}
"""Converters by ATorch's names."""
