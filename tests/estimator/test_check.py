"""The check of another trainer's file: it fits or not, its shares add up, and its changes have the predicted effect."""

import json

import pytest
from click.testing import CliRunner
from redline.base.errors import UsageError
from redline.cli.check import check as command
from redline.estimator.check import check
from redline.frameworks import read
from redline.models.presets import preset_of
from tiers import tiered

RUN = "torchrun --nproc-per-node 8 run_clm.py --config_name gpt2 --block_size 1024 --bf16"
CHECKPOINTED = f"{RUN} --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --gradient_checkpointing"


@pytest.fixture(scope="module")
def checked():
    return check(read(CHECKPOINTED), "a100-80gb")


def test_a_training_that_fits_has_a_margin_and_shares_that_add_up(checked):
    assert checked.fits and checked.estimate.peak_memory_mib < checked.estimate.memory_limit_mib
    assert sum(checked.shares.values()) == pytest.approx(1, abs=1e-6)
    assert checked.shares["recomputation"] > 0.05 and "links within a host (data parallel)" in checked.shares
    assert checked.trainer.global_batch == 64 and checked.parameters == 124_439_808
    low, high = checked.estimate.step_ms_low, checked.estimate.step_ms_high
    assert low < checked.estimate.step_ms < high


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (CHECKPOINTED, "gradient_checkpointing=True recomputes blocks"),
        (
            "NPROC_PER_NODE=8 trl sft --model_name_or_path gpt2 --per_device_train_batch_size 4",
            "gradient_checkpointing=true, the default, recomputes blocks",
        ),
    ],
)
def test_checkpointing_with_memory_to_spare_is_named_in_the_frameworks_words(checked, given, words, monkeypatch):
    assert not any("memory to spare" in each for each in checked.findings), "a change already removes it"
    monkeypatch.setattr("redline.estimator.check.faster_configurations", lambda *given: ())
    (found,) = [each for each in check(read(given), "a100-80gb").findings if "memory to spare" in each]
    assert found.startswith(words)


def test_suggested_changes_are_faster_when_applied(checked):
    assert 1 <= len(checked.faster) <= 3
    for each in checked.faster:
        words = CHECKPOINTED.split()
        for change in each.changes:
            if f"--{change.key}" in words:
                at = words.index(f"--{change.key}")
                del words[at : at + (1 if change.key == "gradient_checkpointing" else 2)]
        again = check(read(f"{' '.join(words)} {' '.join(change.text for change in each.changes)}"), "a100-80gb")
        assert again.fits and again.trainer.global_batch == 64
        assert again.estimate.step_ms == pytest.approx(each.estimate.step_ms, rel=1e-6)
        assert checked.estimate.step_ms / again.estimate.step_ms == pytest.approx(each.gain) and each.gain > 1.02


def test_a_training_that_does_not_fit_ends_with_3_and_names_what_would():
    done = CliRunner().invoke(
        command, [f"{RUN} --per_device_train_batch_size 64", "--hardware", "a100-80gb", "--memory-limit", "8GiB", "--json"],
        standalone_mode=False,
    )  # fmt: skip
    assert done.return_value == 3, done.output
    found = json.loads(done.output)
    assert found["fits"] is False and found["margin_mib"] < 0 and found["faster"]
    assert all(each["peak_memory_mib"] < 8 * 1024 and each["gain"] is None for each in found["faster"])
    assert all(change["where"] == "the command" for each in found["faster"] for change in each["changes"])


def test_an_out_of_memory_verdict_says_whose_facts_it_assumes():
    asked = [f"{RUN} --per_device_train_batch_size 64", "--hardware", "a100-80gb", "--memory-limit", "8GiB"]
    for more, message in (
        ([], "assumed  of trainer: gradients are whole while they accumulate"),
        (
            ["--framework", "nanotron"],
            "assumed  of nanotron: weights are kept in bf16; master weights in fp32; gradients in fp32",
        ),
    ):
        done = CliRunner().invoke(command, [*asked, *more], standalone_mode=False)
        assert done.return_value == 3 and message in done.output
        found = json.loads(CliRunner().invoke(command, [*asked, *more, "--json"], standalone_mode=False).output)
        assert found["assumed_of"] == (more or ["", "trainer"])[1] and "; ".join(found["assumed"]) in done.output
    with pytest.raises(UsageError, match="unknown framework 'megatorn'"):
        check(read(CHECKPOINTED), "a100-80gb", framework="megatorn")


def test_gradients_stay_whole_under_fsdp_while_the_trainer_accumulates_and_not_under_deepspeed(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    fsdp, once, deepspeed = (
        check(read(f"{RUN} --per_device_train_batch_size 4 {more}"), "a100-80gb").estimate.breakdown["memory.gradients"]
        for more in (
            "--gradient_accumulation_steps 2 --fsdp full_shard",
            "--gradient_accumulation_steps 1 --fsdp full_shard",
            f"--gradient_accumulation_steps 2 --deepspeed {tmp_path / 'ds.json'}",
        )
    )
    whole = 124_439_808 * 2 / 2**20  # in the format of the reduction
    assert fsdp == pytest.approx(whole, rel=0.01)
    assert once < whole and deepspeed < whole / 2


def test_fsdp_of_accelerate_widens_weights_of_16_bits_where_mixed_precision_is_on(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    wide, narrow, whole, deepspeed = (
        check(
            read(f"{run} --per_device_train_batch_size 4 --torch_dtype bfloat16 {more}"), "a100-80gb"
        ).estimate.breakdown["memory.parameters"]
        for run, more in (
            (RUN, "--fsdp full_shard"),
            (RUN.replace(" --bf16", ""), "--fsdp full_shard"),
            (RUN, ""),
            (RUN, f"--deepspeed {tmp_path / 'ds.json'}"),
        )
    )
    one = 124_439_808 / 2**20
    assert wide == pytest.approx(4 * one / 8, rel=0.01)
    assert narrow == deepspeed == pytest.approx(2 * one / 8, rel=0.01)
    assert whole == pytest.approx(2 * one, rel=0.01)


def test_no_stages_are_advised_to_a_trainer_under_deepspeed(tmp_path):
    """DeepSpeed's pipelines take a PipelineModule, which the Trainer does not make."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    run = f"{RUN} --config_name llama3-8b --per_device_train_batch_size 1 --gradient_accumulation_steps 64"
    found = check(read(f"{run} --deepspeed {tmp_path / 'ds.json'}"), "l40s")
    assert found.faster
    keys = {change.key for each in found.faster for change in each.changes}
    assert not keys & {"pipeline.stages", "tensor_parallel.autotp_size"}


def test_tensor_parallelism_across_hosts_is_named():
    command = (
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --tensor-model-parallel-size 16 --sequence-parallel "
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --bf16"
    )
    found = check(read(command), "a100-80gb")
    assert any(each.startswith("tensor-model-parallel-size=16 reaches across hosts of 8") for each in found.findings)
    assert any(name.startswith("links between hosts (tensor parallel)") for name in found.shares)


@pytest.mark.parametrize(
    ("given", "more", "says"),
    [
        ("python run_clm.py --per_device_train_batch_size 4", {}, "give --devices N --model MODEL$"),
        (
            "accelerate launch --mixed_precision bf16 t.py",
            {},
            r"leaves facts out: give --devices N --model MODEL --fix micro_batch=N$",
        ),
        (f"{RUN} --config_name gtp2", {}, r"\(--model names another\): unknown model 'gtp2'; did you mean 'gpt2'"),
        (RUN, {"model": "gtp2"}, "^unknown model 'gtp2'; did you mean 'gpt2'"),
        ("torchrun --nproc-per-node 2 run_clm.py --bf16", {}, "give --model MODEL$"),
        (
            "accelerate launch --num_processes 4 --mixed_precision bf16 t.py",
            {"model": "gpt2"},
            "give --fix micro_batch=N",
        ),
        (f"{RUN} --per_device_train_batch_size 4", {"global_batch": 30}, "30, is not a multiple of micro_batch 4"),
        (RUN, {"hardware": "h1000"}, "h1000"),
    ],
)
def test_bad_input_is_refused(given, more, says):
    hardware = more.pop("hardware", "a100-80gb")
    with pytest.raises(UsageError, match=says):
        check(read(given), hardware, **more)


def test_hub_ids_of_presets_need_no_network():
    names = {
        "meta-llama/Meta-Llama-3-8B-Instruct": "llama3-8b",
        "meta-llama/Llama-3.3-70B-Instruct": "llama3-70b",
        "NousResearch/Llama-2-7b-hf": "llama2-7b",
        "Qwen/Qwen3-0.6B-Base": "qwen3-0.6b",
        "Qwen/Qwen3-235B-A22B-Thinking-2507": "qwen3-235b-a22b",
        "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
        "google-bert/bert-base-uncased": "bert-base",
        "openai-community/gpt2": "gpt2",
        "llama3_8b": "llama3-8b",
        "deepseek_v3-671B": "deepseek-v3",
        "deepseek_v3-16B": "deepseek-v3-16b",
    }
    assert {name: preset_of(name) for name in names} == names
    assert preset_of("deepseek_v3-236B") is None, "another size of the family"
    assert preset_of("somebody/unknown-9b") is None


MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 512 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --ffn-hidden-size 1024 --swiglu --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
)


@pytest.mark.parametrize("command", tiered([MEGATRON], [f"{RUN} --per_device_train_batch_size 4"]))
def test_a_check_needs_no_torch_if_the_model_is_cached(tmp_path, command):
    import os
    import subprocess
    import sys

    code = (
        f"import sys\nfrom redline.cli import main\n"
        f"try:\n main(['check', {command!r}, '--hardware', 'a100-80gb', '--json'])\n"
        "except SystemExit: pass\nprint('torch' in sys.modules)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    answers = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        .stdout.splitlines()
        for _ in range(2)
    ]  # fmt: skip
    assert [each[1] for each in answers] == ["True", "False"]
    assert len({each[0] for each in answers}) == 1, "what is cached answers as what is traced"


def test_a_change_is_predicted_as_its_file_is_read_again(tmp_path):
    (tmp_path / "t.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
        "[parallelism]\ntensor_parallel_degree = 1\n[activation_checkpoint]\nmode = 'full'\n"
    )
    found = check(read(tmp_path / "t.toml"), "h100", devices=8, memory_limit_mib=24 * 1024)
    for each in found.faster:
        again = found.trainer.changed(each.config)[1]
        assert each.config == again.config and each.estimate.probability_fits >= 0.8
        assert each.config["zero"] == 0 or each.config["dp"] * each.config.get("cp", 1) > 1


MIXTURE = (
    "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --bf16 --num-experts 8 "
)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--tensor-model-parallel-size 3", "tp 3 must divide the devices, 16"),
        (
            "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8",
            r"expert-model-parallel-size=8 must divide the 4 data-parallel ranks \(16 devices / pp 4\)",
        ),
    ],
)
def test_degrees_that_do_not_fit_together_are_refused_in_the_files_words(options, why):
    with pytest.raises(UsageError, match=f"^{why}$"):
        check(read(MIXTURE + options), "h100")


def test_sequence_parallelism_without_effect_is_noted_once():
    found = check(read(f"{MIXTURE} --sequence-parallel"), "h100")
    assert len([each for each in found.findings if "sequence-parallel" in each]) == 1


def test_all_linear_of_a_mixture_is_its_linear_layers(tmp_path, recwarn):
    pytest.importorskip("peft")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 128, "num_local_experts": 4,
    }))  # fmt: skip
    (tmp_path / "lora.yaml").write_text(
        f"base_model: {tmp_path}\nadapter: lora\nlora_r: 16\nlora_target_linear: true\nsequence_len: 128\nmicro_batch_size: 1\n"
        "sample_packing: true\nbf16: true\n"
    )
    found = check(read(tmp_path / "lora.yaml"), "h100", devices=2)
    assert "lora: experts whose weights are fused" in " ".join(found.findings)
    assert not [each for each in recwarn if "peft" in each.filename]


def test_the_first_lines_state_what_decides_and_where_it_is_from(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: gpt2\nper_device_train_batch_size: 2\nbf16: true\noptim: adamw_bnb_8bit\neval_strategy: 'no'\n"
        "use_galore: true\nuse_badam: false\n"
    )
    asked = [str(tmp_path / "sft.yaml"), "--hardware", "a100-80gb", "--devices", "2", "--seq-len", "512"]
    lines = CliRunner().invoke(command, asked, standalone_mode=False).output.splitlines()
    facts = {line.split()[0]: line for line in lines[1 : lines.index("")]}
    for name, words in {
        "model": "gpt2 (GPT2LMHeadModel), 124,439,808 parameters  [file]",
        "adapters": "none: all weights are trained  [default of transformers.Trainer]",
        "optimizer": "adamw_bnb_8bit as adamw, states in int8  [file]",
        "precision": "bf16: weights in fp32, gradients in fp32  [file]",
        "batch": "micro_batch 2 x grad_accum 1 x dp 2 = 4  [file]",
        "length": "512 tokens  [--seq-len]",
        "checkpointing": "none  [assumed]",
        "devices": "2 x a100-80gb  [--devices]",
    }.items():
        assert facts[name].endswith(words), facts[name]
    assert "not read       use_galore" in lines and "not read, off  use_badam" in lines
    (verdict,) = [line for line in lines if line.startswith("memory")]
    assert "fits without use_galore:" in verdict and verdict.endswith("the chance to fit is unknown")
    found = json.loads(CliRunner().invoke(command, [*asked, "--json"], standalone_mode=False).output)
    assert found["without"] == ["use_galore"] and found["probability_fits"] is None
    assert found["not_read"] == {"use_galore": "True", "use_badam": "False"}


def test_pairs_and_the_reference_model_are_counted():
    checked = {
        words: check(
            read(f"trl {words} --model_name_or_path gpt2 --per_device_train_batch_size 4"), "a100-80gb", devices=1
        )
        for words in ("sft", "dpo", "dpo --precompute_ref_log_probs true", "kto")
    }
    assert any("a reference model without gradients" in note for note in checked["kto"].findings)
    sft, dpo, stored, kto = (result.estimate for result in checked.values())
    whole = 124_439_808 * 4 / 2**20
    assert dpo.peak_memory_mib - stored.peak_memory_mib == pytest.approx(whole, rel=0.01)
    assert kto.peak_memory_mib - sft.peak_memory_mib == pytest.approx(whole, rel=0.01), "one sequence a sample"
    assert stored.breakdown["memory.activations"] > 1.9 * sft.breakdown["memory.activations"]
    assert dpo.step_ms > 1.7 * sft.step_ms and dpo.memory_limit_mib == sft.memory_limit_mib
    assert dpo.probability_fits <= stored.probability_fits


def test_a_model_that_is_one_unit_of_fsdp_has_whole_weights_and_gradients(tmp_path):
    text = (
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
        "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: %s}\n"
    )
    peaks = {}
    for policy in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        (tmp_path / "fsdp.yaml").write_text(text % policy)
        found = check(read(tmp_path / "fsdp.yaml"), "a100-80gb", model="gpt2", knobs={"micro_batch": 1}, seq_len=256)
        peaks[policy] = found.estimate.peak_memory_mib
        assert ("in one unit" in str(found.facts)) is (policy == "NO_WRAP")
        if policy == "NO_WRAP":
            changes = found.trainer.changed({**found.trainer.config, "zero": 3})[0]
            assert "fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}" in {change.text for change in changes}
    whole = 124_439_808 * 2 / 2**20
    assert peaks["NO_WRAP"] - peaks["TRANSFORMER_BASED_WRAP"] > 1.2 * whole


def test_a_change_is_surely_faster_and_has_no_idle_setting():
    from redline.estimator.predictor import GAIN

    given = f"{MEGATRON} --overlap-grad-reduce"
    found = check(read(given), "h100-80gb")
    for each in found.faster:
        knobs = {name for name in each.config if each.config[name] != found.trainer.config.get(name)} - {
            "dp",
            "grad_accum",
        }
        assert each.gain > GAIN and knobs
        for knob in knobs - {"tp", "pp", "micro_batch"}:
            fewer = {**each.config, knob: found.trainer.config.get(knob)}
            edit = found.trainer.changed({name: value for name, value in fewer.items() if value is not None})
            assert edit is None or each.changes != edit[0]


def test_a_change_that_others_bring_back_ends_the_search_for_idle_ones():
    """ZeRO follows from Megatron's distributed optimizer, and virtual stages from blocks of a chunk."""
    command = (
        "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 4096 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 2 --global-batch-size 128 --bf16 "
        "--use-distributed-optimizer --vocab-size 32000 --swiglu"
    )
    verdict = check(read(command), "h100-80gb")
    assert verdict.fits and len(verdict.faster) <= 3


def test_replicas_of_torchs_ddp_have_buckets_beside_their_gradients():
    """DistributedDataParallel allocates buckets for all gradients (torch/nn/parallel/distributed.py, gradient_as_bucket_view)."""
    gradients = 124_439_808 * 4 / 2**20
    many, one = (
        check(read(CHECKPOINTED.replace("node 8", f"node {count}")), "a100-80gb").estimate.breakdown for count in (8, 1)
    )
    assert many["memory.gradients"] == pytest.approx(gradients, rel=0.01)
    assert many["memory.buffers"] - one["memory.buffers"] == pytest.approx(gradients, rel=0.01)


def test_weights_beside_adapters_have_the_format_in_which_they_are_loaded():
    run = "trl sft --model_name_or_path gpt2 --use_peft --lora_target_modules c_attn --per_device_train_batch_size 1"
    wide, kept, narrow, head, quantized, both = (
        check(read(f"{run} --max_length 256 {more}"), "a100-80gb", devices=1).estimate.breakdown
        for more in (
            "",
            "--gradient_checkpointing false",
            "--dtype bfloat16",
            "--dtype bfloat16 --lora_modules_to_save lm_head",
            "--load_in_4bit --dtype bfloat16",
            "--load_in_4bit",
        )
    )
    million = 124_439_808 / 2**20
    assert wide["memory.parameters"] == pytest.approx(4 * million, rel=0.02)
    assert narrow["memory.parameters"] == pytest.approx(2 * million, rel=0.02)
    # Products of blocks that are not recomputed keep weights that autocast has cast.
    matrices = 12 * 768**2 * 12 * 2 / 2**20
    copies = kept["memory.weight copies"] - wide["memory.weight copies"]
    assert copies > 0.9 * matrices and wide["memory.weight copies"] < 0.1 * matrices
    # A copy of the head's weight, its gradient and two states, in 16 bits; the size is that of the tied embeddings.
    assert head["memory.further"] == pytest.approx(50257 * 768 * 8 / 2**20, rel=0.03)
    assert quantized["memory.further"] == pytest.approx(50257 * 768 * (2 - 4.5 / 8) / 2**20, rel=0.05)
    assert both["memory.further"] - quantized["memory.further"] == pytest.approx(50257 * 768 * 2 / 2**20, rel=0.05)


def test_peft_keeps_adapters_in_fp32_and_copies_in_the_format_of_the_weights():
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).to(torch.bfloat16)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"])
    )
    trained = {name: parameter.dtype for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    formats = {dtype for name, dtype in trained.items() if "lora_" in name}
    assert formats == {torch.float32}, "as estimated"
    assert {dtype for name, dtype in trained.items() if "modules_to_save" in name} == {torch.bfloat16}


def test_the_formats_of_adapters_are_stated():
    found = check(
        read(
            "trl sft --model_name_or_path gpt2 --use_peft --dtype bfloat16 --per_device_train_batch_size 1 --max_length 256"
        ),
        "a100-80gb",
        devices=1,
    )
    (precision,) = [fact.value for fact in found.facts if fact.name == "precision"]
    assert precision == "bf16: adapters in fp32, other weights in 16 bits, gradients in fp32"


def test_embeddings_that_axolotl_keeps_in_fp32_are_counted(tmp_path):
    text = "base_model: gpt2\nsequence_len: 256\nmicro_batch_size: 1\noptimizer: adamw_torch\nbf16: true\n"
    peaks = []
    for attention in ("", "flash_attention: true\n"):
        (tmp_path / "a.yml").write_text(text + attention)
        peaks.append(check(read(tmp_path / "a.yml"), "a100-80gb", devices=1).estimate.breakdown["memory.further"])
    # Twice the bytes of weights, gradients and two states.
    assert peaks[0] == pytest.approx((50257 + 1024) * 768 * 8 / 2**20, rel=0.01) and not peaks[1]


def test_fused_layers_beside_a_loss_of_whole_logits_are_stated():
    command = "llamafactory-cli train model_name_or_path=gpt2 stage=dpo finetuning_type=full bf16=true cutoff_len=256"
    found = check(read(f"{command} enable_liger_kernel=true"), "a100-80gb", devices=1)
    assert [fact.value for fact in found.facts if fact.name == "loss"] == ["logits in fp32"]
    assert found.trainer.config["kernels"] is True
    # The reference model is loaded in 16 bits.
    assert found.estimate.breakdown["memory.further"] == pytest.approx(124_439_808 * 2 / 2**20, rel=0.01)


def test_a_stage_that_a_file_of_trl_leaves_open_is_asked_for(tmp_path):
    (tmp_path / "orpo.yaml").write_text(
        "model_name_or_path: gpt2\nper_device_train_batch_size: 1\nbeta: 0.05\nmax_prompt_length: 128\nbf16: true\n"
    )
    with pytest.raises(
        UsageError, match=r"the stage, sft, dpo, .*orpo, cpo\): give the command trl STAGE --config FILE$"
    ):
        check(read(tmp_path / "orpo.yaml"), "a100-80gb", devices=1)
    assert check(read(f"trl orpo --config {tmp_path}/orpo.yaml"), "a100-80gb", devices=1).trainer.sequences == 2
