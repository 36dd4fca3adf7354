"""Formats of adapters and of the weights beside them, and the stage of TRL, as files and commands state them."""

import json

import pytest
from redline.frameworks import read
from redline.frameworks.registry import find_framework

WIDE, NARROW = ({"precision": "bf16_pure", "parameter_dtype": dtype} for dtype in ("fp32", "bf16"))
ENGINE = {"parameter_dtype": None, "master_weights": "fp32", "gradient_dtype": "bf16", "frozen_bits": None}
TRL_LORA = "trl sft --model_name_or_path m --use_peft"
LORA = "base_model: m\nsequence_len: 64\nadapter: lora\nlora_target_linear: true\nbf16: true\n"


@pytest.mark.parametrize(
    ("given", "conventions"),
    [
        ("llamafactory-cli train stage=sft bf16=true", WIDE),
        ("llamafactory-cli train stage=sft pure_bf16=true", WIDE),
        ("llamafactory-cli train stage=sft finetuning_type=full bf16=true", {"precision": None}),
        ("llamafactory-cli train stage=sft bf16=true deepspeed=ds.json", ENGINE),
        (TRL_LORA, {"precision": None, "parameter_dtype": "fp32", "frozen_bits": 32}),
        (f"{TRL_LORA} --dtype bfloat16", WIDE),
        (f"{TRL_LORA} --dtype auto", WIDE),
        (f"{TRL_LORA} --dtype bfloat16 --load_in_4bit", NARROW | {"frozen_bits": 4.5}),
        (f"{TRL_LORA} --load_in_4bit", {"precision": None, "parameter_dtype": "bf16", "frozen_bits": 4.5}),
        (f"{TRL_LORA} --dtype bfloat16 --accelerate_config zero3", ENGINE),
        (f"accelerate launch --config_file accelerate.yaml scripts/sft.py {TRL_LORA[8:]}", ENGINE),
        (f"{TRL_LORA} --dtype bfloat16 --accelerate_config fsdp2", WIDE | {"pieces": True}),
        ("axolotl train lora.yml", WIDE),
        ("axolotl train lora.yml --peft-autocast-adapter-dtype false", NARROW),
        ("axolotl train lora.yml --bf16 false --tf32 true", {"precision": None, "frozen_bits": 32}),
        ("litgpt finetune_lora m --precision bf16-true", NARROW),
        ("litgpt finetune_lora m --precision bf16-mixed --devices 1", {"parameter_dtype": "fp32", "frozen_bits": 32}),
    ],
)
def test_adapters_and_the_weights_beside_them_have_their_trainers_formats(given, conventions, tmp_path, monkeypatch):
    """peft keeps adapters in fp32 (`autocast_adapter_dtype`); TRL casts those beside quantized weights to bf16, DeepSpeed all."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: 1.0}\n"
    )
    (tmp_path / "lora.yml").write_text(LORA)
    trainer = read(given)
    found = trainer.conventions
    assert {name: found.get(name) for name in conventions} == conventions
    again = trainer.conventions_with(trainer.config)
    assert {name: again.get(name) for name in conventions} == conventions


@pytest.mark.parametrize(
    ("framework", "settings", "copies", "unread"),
    [
        ("trl", {"use_peft": True, "lora_modules_to_save": ["lm_head"]}, {"head": "fp32"}, set()),
        (
            "trl",
            {"use_peft": True, "load_in_4bit": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]},
            {"embedding": "bf16", "head": "bf16"},
            set(),
        ),
        ("llamafactory", {"additional_target": "embed_tokens,lm_head"}, {"embedding": "fp32", "head": "fp32"}, set()),
        ("llamafactory", {"additional_target": "v_head"}, {}, {"additional_target"}),
        (
            "axolotl",
            {"adapter": "lora", "lora_target_linear": True, "bf16": True, "lora_modules_to_save": ["lm_head"]},
            {"head": "bf16"},
            set(),
        ),
    ],
)
def test_modules_that_are_trained_beside_adapters_are_read(framework, settings, copies, unread):
    reader = find_framework(framework).reading(settings, "x")
    assert reader.facts["copied_ends"] == copies and set(reader.facts["unread"]) - {"subcommand"} == unread


@pytest.mark.parametrize(
    ("target", "is_refused"), [("lm_head q_proj", True), ("all-linear", False), ("q_proj v_proj", False)]
)
def test_an_adapter_on_the_head_is_refused_by_trl(target, is_refused):
    notes = read(f"{TRL_LORA} --lora_target_modules {target}").notes
    assert any("refuses an adapter on lm_head" in note for note in notes) is is_refused


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({"beta": 0.1, "loss_type": "sigmoid"}, "dpo"),
        ({"beta": 0.1, "loss_type": ["sigmoid", "sft"]}, "dpo"),
        ({"beta": 0.1, "desirable_weight": 1.0}, "kto"),
        ({"beta": 0.1, "loss_type": "kto"}, "kto"),
        ({"beta": 0.04, "use_vllm": True}, "grpo"),
        ({"simpo_gamma": 0.5, "loss_type": "simpo"}, "simpo"),
        ({"packing": False}, "sft"),
        ({"max_seq_length": 64}, "sft"),
        ({"center_rewards_coefficient": 0.01}, "reward"),
        ({"beta": 0.1, "max_prompt_length": 64}, None),
        ({"precompute_ref_log_probs": True}, None),
        ({"max_length": 64, "use_peft": True}, None),
    ],
)
def test_the_stage_of_a_trl_file_is_asked_for_where_several_have_its_settings(settings, stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(
        json.dumps({"model_name_or_path": "m", "per_device_train_batch_size": 1, **settings})
    )
    found = read("t.yaml", framework="trl")
    assert bool(found.unset) is (stage is None) and all("trl STAGE --config FILE" in option for option in found.unset)
    for kind in ("dpo", "orpo", "sft"):
        command = read(f"trl {kind} --config t.yaml")
        assert not command.unset and command.sequences == (1 if kind == "sft" else 2)
    if stage is not None:
        assert any(f"trl {stage}" in note for note in found.notes) or stage == "sft"


@pytest.mark.parametrize(
    ("script", "stage"),
    [
        ("run_dpo.py", "trl dpo"),
        ("train_kto_lora.py", "trl kto"),
        ("dpo_online.py", "trl dpo"),
        ("online_dpo.py", "trl online"),
    ],
)
def test_the_stage_of_a_script_of_trl_is_a_word_of_its_name(script, stage):
    notes = read(f"python {script} --model_name_or_path m --use_peft --max_prompt_length 64").notes
    assert any(note.startswith(stage) for note in notes)
    assert read("python train.py --model_name_or_path m --use_peft --beta 0.1").unset
