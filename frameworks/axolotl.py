"""axolotl: `axolotl train config.yml`; its options follow `train`, and those after ` -- ` are its launcher's."""

from collections.abc import Mapping
from typing import Any

from ..knobs.strategy import Strategy
from .common import read_lora, read_quantized, read_stage
from .framework import Framework, KnobSettings, KnobTable, SettingsReader
from .launcher import MICRO_BATCHES, Launcher
from .trainer import conventions as trainer_conventions, prepare, read as read_trainer

_LIGER = "liger_fused_linear_cross_entropy"
_RESHARD = "fsdp_config.reshard_after_forward"
_FSDP_CHECKPOINTING = "fsdp_config.activation_checkpointing"
_PLUGINS = {
    _LIGER: "axolotl.integrations.liger.LigerPlugin",
    "cut_cross_entropy": "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
}
"""Settings of kernels that have an effect only with a plugin."""
KNOBS = KnobTable(
    KnobSettings(knob="micro_batch", keys=("micro_batch_size",)),
    KnobSettings(knob="grad_accum", keys=("gradient_accumulation_steps",)),
    KnobSettings(
        knob="precision",
        alternatives=(
            {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {"bf16": False}},
            {"tf32": {"bf16": False, "fp16": False, "tf32": True}},
        ),
    ),
    KnobSettings(
        knob="checkpoint_ratio",
        alternatives=(
            {0: {"gradient_checkpointing": False}, 1: {"gradient_checkpointing": True}},
            *({1: {"gradient_checkpointing": value}} for value in ("offload", "offload_disk")),
            {0: {_FSDP_CHECKPOINTING: False}, 1: {_FSDP_CHECKPOINTING: True}},
        ),
    ),
    KnobSettings(knob="fusion", alternatives=({False: {"torch_compile": False}, True: {"torch_compile": True}},)),
    KnobSettings(
        knob="kernels",
        alternatives=({False: {_LIGER: False}, True: {_LIGER: True}}, {True: {"cut_cross_entropy": True}}),
    ),
    KnobSettings(
        knob="attention",
        alternatives=(
            {name: {"attn_implementation": name} for name in ("eager", "sdpa", "flash_attention_2")},
            {"flash_attention_2": {"flash_attention": True}},
            {"sdpa": {"sdp_attention": True}},
        ),
    ),
    KnobSettings(
        knob="fused_optimizer",
        alternatives=({True: {"optimizer": "adamw_torch_fused"}, False: {"optimizer": "adamw_torch"}},),
        has_other_values=True,
    ),
    KnobSettings(
        knob="zero",
        alternatives=(
            {2: {"fsdp_version": 2, _RESHARD: False}, 3: {"fsdp_version": 2, _RESHARD: True}},
            {
                2: {"fsdp_config.fsdp_sharding_strategy": "SHARD_GRAD_OP"},
                3: {"fsdp_config.fsdp_sharding_strategy": "FULL_SHARD"},
            },
        ),
    ),
    KnobSettings(
        knob="offload",
        alternatives=tuple(
            {value: {f"fsdp_config.{name}": value == "optimizer"} for value in ("none", "optimizer")}
            for name in ("offload_params", "fsdp_offload_params")
        ),
    ),
    KnobSettings(knob="tp", keys=("tensor_parallel_size",)),
    KnobSettings(knob="cp", keys=("context_parallel_size", "sequence_parallel_degree")),
    KnobSettings(knob="hsdp", keys=("dp_replicate_size",)),
)
"""axolotl's names of the knobs."""


def _prepare(reader: SettingsReader) -> None:
    if reader.whole("fsdp_version") == 2 and reader.has(_RESHARD) is False:
        reader.set(_RESHARD, True)
    # `auto` is the default: bf16 on devices of compute capability 8. `full` has bf16 in evaluations too.
    if (not reader.has("bf16") and not reader.flag("fp16")) or reader.get("bf16") == "full":
        reader.override("bf16", True)
    prepare(reader)


def read(reader: SettingsReader) -> None:
    """Reads FSDP like the Trainer, the adapters, and the formats of the weights."""
    read_trainer(reader)
    if (shard := reader.whole("dp_shard_size")) is not None:
        reader.knobs["dp"] = shard * reader.knobs.get("hsdp", 1)
    if (adapter := reader.get("adapter")) is not None:
        modules = reader.get("lora_target_modules")
        target = "all" if reader.flag("lora_target_linear") else modules
        alpha, dropout = reader.whole("lora_alpha"), reader.get("lora_dropout")
        read_lora(reader, reader.whole("lora_r") or 8, target, alpha, dropout, "lora_target_modules")
        if adapter == "qlora":
            reader.override("load_in_4bit", True)
        elif adapter != "lora":
            reader.misunderstood("adapter")
        read_quantized(reader, "load_in_4bit")
        read_quantized(reader, "load_in_8bit")
    elif reader.flag("load_in_4bit") or reader.flag("load_in_8bit"):
        reader.note(
            "axolotl trains no quantized weights: load_in_4bit and load_in_8bit without an adapter are refused or ignored"
        )
    read_stage(reader, "rl", reference=adapter is None)
    _read_plugins(reader)
    if str(reader.get("gradient_checkpointing")).startswith("offload"):
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
    """Kernels of a plugin that the file does not name are not there."""
    listed = reader.get("plugins")
    plugins = [str(plugin) for plugin in (listed if isinstance(listed, list) else [listed] if listed else [])]
    for setting, plugin in _PLUGINS.items():
        if reader.flag(setting) and not any(plugin.rpartition(".")[2] == name.rpartition(".")[2] for name in plugins):
            reader.note(f"{setting} has no effect without plugins: [{plugin}]")
            reader.knobs["kernels"] = False
    # A plugin switches on what its settings say; without one, cut cross-entropy is on.
    handled = {plugin.rpartition(".")[2] for plugin in _PLUGINS.values()}
    if any(name.rpartition(".")[2] not in handled for name in plugins):
        reader.misunderstood("plugins")


def _conventions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Weights are loaded in the format of the products, without a copy in float32; gradients as the Trainer has them."""
    return {**({"precision": "bf16_pure"} if config.get("precision") == "bf16" else {}), **trainer_conventions(config)}


def write(strategy: Strategy, reader: SettingsReader) -> dict[str, Any]:
    """Writes the replicas, if the file has them, and the plugin of the kernels."""
    settings: dict[str, Any] = {}
    if reader.has("dp_shard_size"):
        settings["dp_shard_size"] = strategy.dp // strategy.hsdp
    if strategy.kernels and not reader.flag("cut_cross_entropy"):
        listed = reader.get("plugins") or []
        plugins = [str(plugin) for plugin in (listed if isinstance(listed, list) else [listed])]
        settings["plugins"] = plugins if _PLUGINS[_LIGER] in plugins else [*plugins, _PLUGINS[_LIGER]]
    return settings


LAUNCHER = Launcher(
    name="axolotl",
    after="train",
    knobs={"micro_batch": MICRO_BATCHES, "precision": ("fp32", "bf16"), "checkpoint_ratio": (0, 1)},
    options=KNOBS.options(
        "--{} {}",
        {
            "micro_batch": None,
            "grad_accum": None,
            "precision": ("fp32", "bf16"),
            "checkpoint_ratio": None,
            "fusion": None,
        },
        hyphens=True,
    ),
    accepts={"precision": ("fp32", "bf16")},
    short="--max-steps 1000",
    bounds="--output-dir {trial_dir} --val-set-size 0",
    # Its checks refuse the evaluation's options without a validation set.
    undone=(
        *("--eval-steps VALUE", "--evals-per-epoch VALUE", "--eval-strategy VALUE", "--hub-model-id VALUE"),
        *("--wandb-project VALUE", "--resume-from-checkpoint VALUE", "--load-best-model-at-end"),
    ),
)
FRAMEWORK = Framework(
    name="axolotl",
    title="axolotl",
    knobs=KNOBS,
    signs=(
        *(
            "base_model & sequence_len",
            "base_model & datasets",
            "sample_packing & micro_batch_size",
            "lora_target_linear",
        ),
        *("dataset_prepared_path", "pad_to_sequence_len", "base_model & pretraining_dataset", "base_model & adapter"),
    ),
    programs=("axolotl", "axolotl.cli.train"),
    model=("base_model", "base_model_config"),
    seq_len=("sequence_len",),
    defaults={"micro_batch": 1, "grad_accum": 1, "precision": "fp32", "checkpoint_ratio": 0, "fused_optimizer": True},
    conventions=_conventions,
    prepare=_prepare,
    read=read,
    write=write,
)
