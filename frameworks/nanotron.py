"""nanotron: the YAML of `run_train.py --config-file`."""

from typing import Any

from ..knobs.strategy import Strategy
from .common import read_optimizer
from .framework import Framework, KnobSettings, KnobTable, SettingsReader

_MODEL, _MODE = "model.model_config.", "parallelism.tp_mode"
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings", "hidden_act"),
)
KNOBS = KnobTable(
    KnobSettings(knob="micro_batch", keys=("tokens.micro_batch_size",)),
    KnobSettings(knob="grad_accum", keys=("tokens.batch_accumulation_per_replica",)),
    *(KnobSettings(knob=knob, keys=(f"parallelism.{knob}",)) for knob in ("tp", "pp")),
    KnobSettings(knob="cp", keys=("parallelism.context_parallel_size",)),
    KnobSettings(knob="ep", keys=("parallelism.expert_parallel_size",)),
    KnobSettings(
        knob="pipeline_schedule",
        alternatives=({"1f1b": {"parallelism.pp_engine": "1f1b"}, "gpipe": {"parallelism.pp_engine": "afab"}},),
    ),
    KnobSettings(knob="zero", alternatives=({stage: {"optimizer.zero_stage": stage} for stage in (0, 1)},)),
    KnobSettings(
        knob="checkpoint_ratio",
        alternatives=({value: {"parallelism.recompute_layer": bool(value)} for value in (0, 1)},),
    ),
    KnobSettings(
        knob="fused_optimizer",
        alternatives=({value: {"optimizer.optimizer_factory.torch_adam_is_fused": value} for value in (False, True)},),
    ),
)
"""nanotron's names of the knobs; its replicas follow from several (`write`)."""


def read(reader: SettingsReader) -> None:
    """Reads the replicas, how ranks of `tp` divide activations, and the model's sizes."""
    replicas = reader.whole("parallelism.dp")
    if replicas is not None:
        reader.knobs["dp"] = replicas * reader.knobs.get("ep", 1)
    read_optimizer(reader, "optimizer.optimizer_factory.name")
    if (mode := reader.get(_MODE)) is not None:
        reader.knobs["sequence_parallel"] = str(mode).upper() == "REDUCE_SCATTER"
    sizes = {name: reader.get(_MODEL + name) for name in _SIZES}
    if reader.flag(f"{_MODEL}is_llama_config", f"{_MODEL}is_qwen2_config") and sizes["num_hidden_layers"] is not None:
        family = "qwen2" if reader.flag(f"{_MODEL}is_qwen2_config") else "llama"
        present: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        reader.facts["architecture"] = {"model_type": family, **present}
    if reader.has(f"{_MODEL}moe_config.num_experts"):
        reader.misunderstood(f"{_MODEL}moe_config.num_experts")
        reader.note(f"{_MODEL}moe_config: the estimate is of the model without experts; give --model")


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the replicas, and how ranks of `tp` divide activations, which has no effect without them."""
    mode = {_MODE: "REDUCE_SCATTER" if strategy.sequence_parallel else "ALL_REDUCE"} if strategy.tp > 1 else {}
    return {"parallelism.dp": strategy.dp // strategy.ep, **mode}


FRAMEWORK = Framework(
    name="nanotron",
    title="nanotron",
    knobs=KNOBS,
    signs=(
        *(
            "tokens.micro_batch_size",
            "parallelism.pp_engine",
            "parallelism.tp_mode",
            "tokens.batch_accumulation_per_replica",
        ),
        *("parallelism.recompute_layer", "optimizer.zero_stage", "model.model_config.*"),
    ),
    seq_len=("tokens.sequence_length",),
    defaults={"grad_accum": 1, "precision": "bf16_pure", "zero": 0, "checkpoint_ratio": 0, "fused_optimizer": True},
    read=read,
    write=write,
    ignored={"model.dtype": "bfloat16", "optimizer.accumulate_grad_in_fp32": True},
)
