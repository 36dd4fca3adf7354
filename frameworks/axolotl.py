"""axolotl: `axolotl train config.yml`; its options follow `train`, and those after ` -- ` are its launcher's."""

from collections.abc import Mapping
from typing import Any

from ..knobs.strategy import Strategy
from .common import read_copied, read_lora, read_quantized, read_stage
from .framework import SettingsReader, framework_of, knob_table
from .trainer import conventions as trainer_conventions, prepare, read as read_trainer

_LIGER = "liger_fused_linear_cross_entropy"
_RESHARD = "fsdp_config.reshard_after_forward"
_RESHARD_PREFIXED = "fsdp_config.fsdp_reshard_after_forward"
_PLUGINS = {
    _LIGER: "axolotl.integrations.liger.LigerPlugin",
    "cut_cross_entropy": "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
}
"""Settings of kernels that have an effect only with a plugin."""
KNOBS = knob_table("axolotl")
"""axolotl's names of the knobs."""


def _prepare(reader: SettingsReader) -> None:
    reader.set("fsdp_version", reader.whole("fsdp_config.fsdp_version", "fsdp_config.version"))
    if reader.whole("fsdp_version") == 2 and not reader.has(_RESHARD) and not reader.has(_RESHARD_PREFIXED):
        reader.set(_RESHARD, True)
    # `auto` is the default: bf16 on devices of compute capability 8. `full` has bf16 in evaluations too.
    if (not reader.has("bf16") and not reader.flag("fp16")) or reader.get("bf16") == "full":
        reader.override("bf16", True)
    reader.set("eval_batch_size", reader.whole("micro_batch_size") or 1)
    if reader.get("eval_steps", "evals_per_epoch") is not None:
        reader.set("eval_strategy", "steps")
    if not reader.flag("torch_compile"):  # axolotl passes them on beside it only
        reader.override("torch_compile_mode", None)
        reader.override("torch_compile_backend", None)
    prepare(reader)


def read(reader: SettingsReader) -> None:
    """Reads FSDP like the Trainer, the adapters, and the formats of the weights."""
    read_trainer(reader)
    if (shard := reader.whole("dp_shard_size")) is not None:
        # Experts are shared by further replicas, which are not estimated as such.
        experts = reader.whole("expert_parallel_size") or 1
        reader.knobs["dp"] = shard * reader.knobs.get("hsdp", 1) * experts
        reader.ignore("expert_parallel_size", 1)
    loaded = reader.facts["loaded_dtype"] = "bf16" if reader.knobs.get("precision") in ("bf16", "fp16") else "fp32"
    if (adapter := reader.get("adapter")) is not None:
        modules = reader.get("lora_target_modules")
        target = "all" if reader.flag("lora_target_linear") else modules
        if not target and not reader.has("lora_target_parameters"):
            reader.note(
                "peft refuses an adapter without lora_target_modules or lora_target_linear: its choice is assumed"
            )
        alpha, dropout = reader.whole("lora_alpha"), reader.get("lora_dropout")
        read_lora(reader, reader.whole("lora_r") or 8, target, alpha, dropout, "lora_target_modules")
        if adapter == "qlora":
            reader.override("load_in_4bit", True)
        elif adapter != "lora":
            reader.misunderstood("adapter")
        read_quantized(reader, "load_in_4bit")
        read_quantized(reader, "load_in_8bit")
        if reader.flag("peft_autocast_adapter_dtype") is False:
            reader.facts["adapter_dtype"] = loaded
        read_copied(reader, "lora_modules_to_save", loaded)
    elif reader.flag("load_in_4bit") or reader.flag("load_in_8bit"):
        reader.note(
            "axolotl trains no quantized weights: load_in_4bit and load_in_8bit without an adapter are refused or ignored"
        )
    # Without an adapter and FSDP, embeddings, head and norms become fp32, and return to 16 bits for FlashAttention alone
    # (loaders/model.py, `_configure_embedding_dtypes`).
    narrows = str(reader.knobs.get("attention", "sdpa")) not in ("sdpa", "eager") or reader.flag("cut_cross_entropy")
    reader.facts["wide_ends"] = not (adapter or narrows or reader.knobs.get("zero"))
    _read_plugins(reader)
    if reader.has("rl") and reader.knobs.get("kernels"):  # labels, which its fused losses need, are not passed on
        reader.knobs["kernels"] = any(map(reader.flag, ("liger_rms_norm", "liger_glu_activation")))
    reference = adapter is None and not reader.flag("precompute_ref_log_probs")
    read_stage(reader, "rl", reference=reference, fuses_loss=reader.flag("dpo_use_liger_kernel") or False)
    if reader.has("rl") and reader.flag("dpo_use_liger_kernel"):
        reader.conventions["loss"] = "chunked"
    if str(reader.get("gradient_checkpointing")).startswith(("offload", "unsloth")):
        reader.note(
            f"gradient_checkpointing = {reader.get('gradient_checkpointing')}: kept activations are taken to stay on the device"
        )
    pads = reader.flag("pad_to_sequence_len")
    if reader.flag("sample_packing"):
        reader.note(
            "the estimate is for full samples of sequence_len, as sample_packing makes; without it they are padded or short"
        )
    elif not pads:
        reader.note(
            "samples may be shorter than sequence_len (no sample_packing, no padding): the estimate is of full ones"
        )


def _read_plugins(reader: SettingsReader) -> None:
    """Reads fused losses, which their plugins have: Liger's if it is switched on, cut cross-entropy unless it is off."""
    listed = reader.get("plugins") or []
    names = {str(plugin).rpartition(".")[2] for plugin in (listed if isinstance(listed, list) else [listed])}
    known_plugins = {setting: plugin.rpartition(".")[2] for setting, plugin in _PLUGINS.items()}
    reader.knobs.pop("kernels", None)
    for setting, name in known_plugins.items():
        if reader.flag(setting) and name not in names:
            reader.note(f"{setting} has no effect without plugins: [{_PLUGINS[setting]}]")
        if name in names and (reader.flag(setting) or (setting != _LIGER and reader.flag(setting) is None)):
            reader.knobs["kernels"] = True
    if names - {*known_plugins.values()}:
        reader.misunderstood("plugins")


def _conventions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Weights are loaded in the format of the products, without a copy in float32; gradients as the Trainer has them."""
    return {**({"precision": "bf16_pure"} if config.get("precision") == "bf16" else {}), **trainer_conventions(config)}


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the replicas, if the file has them, and the plugin of the kernels."""
    settings: dict[str, Any] = {}
    if strategy.kernels and reader.has("rl") and not reader.flag(_LIGER):
        raise LookupError("kernels")  # its fused losses have no effect beside rl
    if reader.has("dp_shard_size"):
        settings["dp_shard_size"] = strategy.dp // strategy.hsdp
    if strategy.kernels and not reader.flag("cut_cross_entropy"):
        listed = reader.get("plugins") or []
        plugins = [str(plugin) for plugin in (listed if isinstance(listed, list) else [listed])]
        settings["plugins"] = plugins if _PLUGINS[_LIGER] in plugins else [*plugins, _PLUGINS[_LIGER]]
    return settings


FRAMEWORK = framework_of("axolotl", KNOBS, conventions=_conventions, prepare=_prepare, read=read, write=write)
