"""Nothing of a file is dropped without a word, and a trainer is named only by what only it has."""

import dataclasses
import json
from fnmatch import fnmatchcase

import pytest
from redline.base.errors import UsageError
from redline.estimator.decisive import without
from redline.frameworks import read
from redline.frameworks.framework import harmless_settings, is_harmless, other_trainers, plain
from redline.frameworks.registry import FRAMEWORKS, find_framework


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_setting_that_nothing_reads_is_listed(name):
    found = find_framework(name).reading(
        {"frobnicate_layers": 3, "frobnicate_heads": False, "seed": 7, "empty": None}, "x"
    )
    assert found.facts["unread"] == {"frobnicate_layers": 3, "frobnicate_heads": False}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_no_setting_of_a_knob_is_held_to_be_harmless(name):
    framework = find_framework(name)
    names = {key for settings in framework.knobs.values() for key in settings.keys}
    names |= {
        key
        for settings in framework.knobs.values()
        for alternative in settings.alternatives
        for pairs in alternative.values()
        for key in pairs
    }
    names |= {*framework.seq_len}
    patterns = harmless_settings(name)
    assert not [key for key in names if any(fnmatchcase(plain(key), pattern) for pattern in patterns)]


COSTLY = (
    "use_peft", "load_in_4bit", "quantization_bit", "use_apollo", "use_galore", "use_badam", "use_kt",
    "freeze_trainable_layers", "lora_modules_to_save", "unfrozen_parameters", "additional_target", "use_unsloth",
    "cpu_offloading", "mtp_num_layers", "fp8", "activation_offloading", "use_dora", "relora", "fp8_param_gather",
    "adapter_name_or_path", "lora_rank", "galore_rank", "defaults", "zero_optimization.mics_shard_size",
    "optimizer.early_step_in_backward", "padding_free", "model.shared_embedding", "ref_model", "reward_model",
    "sliding_window", "vision_tower", "data_types.grad_accum_dtype",
)  # fmt: skip


@pytest.mark.parametrize("kind", [True, "offload", "offload_disk", "unsloth"])
def test_every_recomputation_of_axolotl_is_read(kind):
    settings = {"base_model": "gpt2", "sequence_len": 64, "gradient_checkpointing": kind}
    reader = find_framework("axolotl").reading(settings, "x")
    assert reader.knobs["checkpoint_ratio"] == 1 and "gradient_checkpointing" not in reader.facts.get("unread", ())


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_settings_of_memory_are_not_held_to_be_harmless(name):
    assert not [setting for setting in COSTLY if is_harmless(setting, harmless_settings(name))]


def test_every_training_argument_is_read_or_harmless_or_listed():
    transformers = pytest.importorskip("transformers")
    names = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    reader = find_framework("trainer").reading({name: 3 for name in names if name not in ("bf16", "fp16")}, "x")
    listed = (
        "activation_checkpointing_kwargs auto_find_batch_size use_cpu accelerator_config parallelism_config ddp_bucket_cap_mb "
        "ddp_static_graph deepspeed optim optim_target_modules full_determinism label_smoothing_factor"
    )
    no_switches = "fsdp_config use_liger_kernel gradient_checkpointing"  # which 3 is no value of
    assert set(reader.facts["unread"]) == {*listed.split(), *no_switches.split()}


@pytest.mark.parametrize(
    ("framework", "settings", "unread"),
    [
        ("llamafactory", {"finetuning_type": "full", "use_galore": True, "galore_layerwise": True}, {"galore_layerwise"}),
        ("llamafactory", {"finetuning_type": "full", "use_apollo": True, "apollo_target": "q_proj"}, {"use_apollo"}),
        ("llamafactory", {"finetuning_type": "freeze", "freeze_extra_modules": "lm_head"},
         {"finetuning_type", "freeze_extra_modules"}),
        ("llamafactory", {"finetuning_type": "full", "use_badam": True, "badam_mode": "ratio"}, {"use_badam", "badam_mode"}),
        ("llamafactory", {"finetuning_type": "full", "optim": "lomo"}, {"optim"}),
        ("llamafactory", {"finetuning_type": "full", "quantization_bit": 4}, {"quantization_bit"}),
        ("llamafactory", {"finetuning_type": "full", "stage": "rm"}, {"stage"}),
        ("llamafactory", {"finetuning_type": "full", "stage": "dpo"}, set()),
        ("trainer", {"use_peft": True, "load_in_4bit": True}, {"use_peft", "load_in_4bit"}),
        ("trainer", {"optim": "rmsprop"}, set()),
        ("trainer", {"optim": "adamw_torch_4bit"}, {"optim"}),
        ("trainer", {"eval_strategy": "steps", "per_device_train_batch_size": 1}, {"per_device_eval_batch_size"}),
        ("trainer", {"per_device_eval_batch_size": 64, "per_device_train_batch_size": 1}, set()),
        ("trl", {"num_generations": 8}, {"subcommand"}),
        ("axolotl", {"adapter": "lora", "lora_target_modules": r"nothing\d+"}, {"lora_target_modules"}),
        ("axolotl", {"plugins": ["x.Other"]}, {"plugins"}),
        ("litgpt", {"optimizer": "Mystery"}, {"optimizer"}),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
         {"fsdp_config.fsdp_auto_wrap_policy"}),
        ("deepspeed", {"zero_optimization.stage": 3, "zero_optimization.stage3_max_live_parameters": 1e9}, set()),
        ("deepspeed", {"optimizer.type": "OneBitAdam"}, {"optimizer.type"}),
        ("torchtitan", {"config": "llama3_1t"}, {"config"}),
        ("torchtitan", {"activation_checkpoint.mode": "memory_budget"}, {"activation_checkpoint.mode"}),
        ("megatron", {"recompute-granularity": "selective", "recompute-modules": "core_attn other"}, {"recompute-modules"}),
        ("megatron-bridge", {"recipe": "r"}, {"recipe"}),
    ],
)  # fmt: skip
def test_a_value_without_a_counterpart_is_not_read(framework, settings, unread):
    assert set(find_framework(framework).reading(settings, "x").facts["unread"]) == unread


def test_options_of_a_users_script_beside_a_known_engine_are_listed(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n")
    (tmp_path / "mine.yaml").write_text("depth: 4\n")
    of_engine = read(f"deepspeed train.py --deepspeed_config {tmp_path}/ds.json --tp_size 4 --learning_rate 1e-4")
    assert (of_engine.framework, dict(of_engine.unread)) == ("deepspeed", {"tp_size": "4"})
    of_launcher = read(
        f"accelerate launch --config_file {tmp_path}/acc.yaml t.py --use_lora --config {tmp_path}/mine.yaml"
    )
    assert of_launcher.framework == "accelerate" and set(of_launcher.unread) == {"use_lora", f"{tmp_path}/mine.yaml"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "deepspeed train.py --tp_size 4 --model_name x --num_nodes 2 --precision bf16 --out_dir y",
            "nothing in it is of one",
        ),
        (
            "deepspeed main.py --deepspeed --only_optimize_lora --per_device_train_batch_size 4",
            "settings of DeepSpeed-Chat",
        ),
        (
            "torchrun t.py --with_tracking --per_device_train_batch_size 1 --gradient_checkpointing",
            "settings of open-instruct",
        ),
        (
            "python finetune.py --base_model m --micro_batch_size 4 --val_set_size 20 --cutoff_len 512",
            "nothing in it is of one",
        ),
        ("python run_clm_no_trainer.py --per_device_train_batch_size 4", "--framework NAME names the trainer"),
        ("MODULE=llama3 ./run_train.sh", "--framework NAME names the trainer"),
        ("nemo llm pretrain --factory llama3_8b trainer.devices=8", "settings of NeMo 2"),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config llama3/8B_lora", "settings of torchtune"),
        ("composer train.py mpt-125m.yaml", "settings of LLM Foundry"),
        ("accelerate launch --num_processes 8 finetune.py --dataset_mixer_list x 1.0", "settings of open-instruct"),
    ],
)
def test_a_command_without_a_sign_of_one_trainer_is_refused(command, says):
    with pytest.raises(UsageError, match=says):
        read(command)


NEMO = (
    "trainer: {devices: 8, accelerator: gpu, precision: bf16}\nexp_manager: {name: x}\nmodel: {micro_batch_size: 4}\n"
)


def test_a_file_of_another_trainer_is_refused_by_its_name_and_read_as_what_is_asked_for(tmp_path):
    (tmp_path / "nemo.yaml").write_text(NEMO)
    with pytest.raises(UsageError, match="settings of NeMo 1, which redline check does not read; --framework NAME"):
        read(tmp_path / "nemo.yaml")
    found = read(tmp_path / "nemo.yaml", framework="lightning")
    assert (found.framework, found.devices) == ("lightning", 8) and "model.micro_batch_size" in found.unread


def test_no_sign_of_a_framework_is_one_of_another_trainer():
    signs = {sign for name in FRAMEWORKS for sign in find_framework(name).signs}
    assert not signs & {sign for others in other_trainers().values() for sign in others}
    for name in FRAMEWORKS:
        for sign in find_framework(name).signs:
            settings = dict.fromkeys(part.replace("*", "x") for part in sign.split(" & "))
            rivals = [rival for rival in FRAMEWORKS if rival not in (name, "trainer")]
            other = [rival for rival in rivals if find_framework(rival).recognised(settings)]
            assert name == "trainer" or not other, (name, sign, other)


def test_settings_of_the_file_are_told_from_the_frameworks_defaults():
    found = read("trl sft --model_name_or_path gpt2 --per_device_train_batch_size 2")
    assert "micro_batch" in found.stated and not {"micro_batch", "model"} & found.defaults
    assert {"precision", "checkpoint_ratio", "seq_len", "grad_accum"} <= found.defaults
    titan = read("python -m torchtitan.train --module llama3 --config llama3_8b --training.seq_len 4096")
    assert {"micro_batch", "zero", "checkpoint_ratio"} <= titan.defaults and "seq_len" not in titan.defaults


def test_an_impossible_value_of_a_knob_is_not_read():
    found = find_framework("axolotl").reading({"base_model": "x", "micro_batch_size": "two"}, "x")
    assert found.facts["unread"] == {"micro_batch_size": "two"}


@pytest.mark.parametrize(
    ("name", "settings", "unread"),
    [
        ("torchtitan", {"parallelism.pipeline_parallel_schedule": "DualPipeV"}, True),
        ("torchtitan", {"parallelism.pipeline_parallel_schedule": "1F1B"}, False),
        ("lightning", {"trainer.precision": "transformer-engine"}, True),
        ("lightning", {"trainer.strategy": "xla"}, True),
        *(("lightning", {"trainer.strategy": kind}, False) for kind in ("auto", "ddp_find_unused_parameters_true")),
        ("axolotl", {"attn_implementation": "flex_attention"}, True),
        *(("megatron", {"attention-backend": kind}, False) for kind in ("auto", "fused", "local")),
    ],
)
def test_a_value_that_no_knob_has_is_listed_whatever_the_settings_names(name, settings, unread):
    degree = {"parallelism.pipeline_parallel_degree": 2} if name == "torchtitan" else {}
    assert find_framework(name).reading(settings | degree, "x").facts["unread"] == (settings if unread else {})


@pytest.mark.parametrize(
    ("name", "settings", "listed"),
    [
        ("litgpt", {"train.max_seq_length": 8, "optimizer.class_path": "extensions.galore.GaLoreAdamW"}, "class_path"),
        ("trainer", {"optim": "galore_adamw", "bf16": True, "per_device_train_batch_size": 1}, "optim"),
        ("nanotron", {"tokens.micro_batch_size": 1, "parallelism.tp_recompute_allgather": False}, "tp_recompute"),
        ("axolotl", {"base_model": "gpt2", "expert_parallel_size": 2, "dp_shard_size": 2}, "expert_parallel"),
        ("megatron-bridge", {"ddp.grad_reduce_in_fp32": False}, "grad_reduce"),
        ("torchtitan", {"model.converters": ["quantize.linear.mx"]}, "converters"),
        ("torchtitan", {"model.converters": ["float8", "quantize.grouped_mm.float8"]}, "converters"),
    ],
)
def test_what_is_unlike_the_estimate_is_listed(name, settings, listed):
    unread = find_framework(name).reading(settings, "x").facts["unread"]
    assert len(unread) == 1 and listed in next(iter(unread))


def test_what_is_on_by_default_is_not_without_effect_if_it_is_off(tmp_path):
    optimizer = (
        "optimizer: {zero_stage: 1, accumulate_grad_in_fp32: false}\nparallelism: {dp: 2, recompute_layer: false}\n"
    )
    (tmp_path / "n.yaml").write_text(f"{optimizer}tokens: {{micro_batch_size: 1, use_x: false}}\n")
    trainer = read(tmp_path / "n.yaml")
    assert without(trainer) == ("optimizer.accumulate_grad_in_fp32=False",) and trainer.unread_off == ["tokens.use_x"]
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0}}))
    live = "zero_optimization.stage3_max_live_parameters"
    assert without(read(tmp_path / "ds.json")) == (live,), "0 is not its default, but keeps nothing"


def test_settings_that_say_what_is_estimated_are_not_listed():
    for name, settings in {
        "nanotron": {"parallelism.tp_recompute_allgather": True},
        "deepspeed": {"zero_optimization.stage": 3, "zero_optimization.max_live_parameters": 1e9},
        "megatron-bridge": {"model.recompute_granularity": "selective", "model.recompute_modules": "[core_attn,mlp]"},
        "accelerate": {"distributed_type": "FSDP", "deepspeed_config": {}},
    }.items():
        assert not find_framework(name).reading(settings, "x").facts["unread"]


def test_lengths_beside_the_one_that_is_taken_are_named():
    settings = {"model.seq_length": 8192, "dataset.sequence_length": 4096, "train.micro_batch_size": 1}
    reader = find_framework("megatron-bridge").reading(settings, "x")
    assert reader.facts["seq_len"] == 8192 and not reader.facts["unread"]
    assert any("dataset.sequence_length: not read beside" in note for note in reader.notes)
