"""nanotron: the YAML of `run_train.py --config-file`."""

from typing import Any

from ..knobs.strategy import Strategy
from .common import read_optimizer
from .framework import SettingsReader, framework_of, knob_table

_MODEL, _MODE = "model.model_config.", "parallelism.tp_mode"
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings", "hidden_act"),
)
KNOBS = knob_table("nanotron")
"""nanotron's names of the knobs; its replicas follow from several (`write`)."""


def read(reader: SettingsReader) -> None:
    """Reads the replicas, how ranks of `tp` divide activations, and the model's sizes."""
    replicas = reader.whole("parallelism.dp")
    if replicas is not None:
        reader.knobs["dp"] = replicas * reader.knobs.get("ep", 1)
    read_optimizer(reader, "optimizer.optimizer_factory.name", "optimizer.name")
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


FRAMEWORK = framework_of("nanotron", KNOBS, read=read, write=write)
