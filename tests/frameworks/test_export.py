"""Exports: every knob is carried over or mentioned in a note, values keep their meaning, bad input is named."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import redline
import yaml
from redline.base.errors import UsageError
from redline.frameworks import chosen_trial, export_targets, form_of, render
from redline.frameworks.export import suited_target
from redline.results import Measurement, Status, Trial

FULL = {
    "tp": 2, "pp": 2, "dp": 4, "zero": 1, "sequence_parallel": True, "micro_batch": 4, "grad_accum": 2,
    "checkpoint_ratio": 0.25, "precision": "bf16", "attention": "eager", "fusion": True,
    "fused_optimizer": False, "kernels": True, "offload": "optimizer", "pipeline_schedule": "1f1b",
}  # fmt: skip
ONE_STAGE = {**FULL, "pp": 1}
"""The same for DeepSpeed, which does not combine tensor parallelism with a pipeline."""
DOCUMENT = {
    "asked": {
        "model": "llama3-8b",
        "workload": {"id": "3f2a", "spec": "llama3-8b"},
        "seq_len": 128,
        "global_batch": 32,
        "seed": 3,
        "devices": {"type": "cuda", "used": 16, "per_host": 8},
    }
}
TARGETS = sorted(export_targets())
FORMS = [(name, form) for name in TARGETS for form in export_targets()[name].forms]


def trial(number=7, status=Status.OK, **knobs):
    """A trial with these knobs, measured on the number of devices that they require."""
    devices = knobs.get("tp", 1) * knobs.get("pp", 1) * knobs.get("dp", 1)
    ok = status is Status.OK
    measured = Measurement(
        status=status,
        reason="" if ok else "it went wrong",
        throughput=1000.0 if ok else None,
        unit="tokens/s",
        devices=devices,
        peak_memory_mib=512.0,
    )
    return Trial(number=number, config=knobs, sampler="tpe", measurement=measured)


def parsed(target, form=None, document=DOCUMENT, **knobs):
    """Parses a YAML or JSON export. Returns its content and its notes."""
    made = render(target, trial(**knobs), document, form=form)
    return yaml.safe_load(made.text), " ".join(made.notes)


def flags(target, environment=None, **knobs):
    """The arguments of a shell export as bash passes them, and its notes."""
    made = render(target, trial(**knobs), DOCUMENT)
    text, given = made.text, {"LAUNCH": "printf %s\\n", "MASTER_ADDR": "host-0"}
    if target == "megatron":
        text += '\nprintf "%s\\n" "${MEGATRON_ARGS[@]}"\n'
    done = subprocess.run(
        [shutil.which("bash"), "-c", text],
        env={"PATH": "/usr/bin:/bin", **given, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], " ".join(made.notes)


def value(arguments, flag):
    return arguments[arguments.index(flag) + 1]


def test_the_targets_are_those_of_the_documentation():
    page = (Path(redline.__file__).parent / "docs" / "exports.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", page.partition("\n| target |")[2].partition("\n\n")[0], re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == TARGETS


@pytest.mark.parametrize(("target", "form"), FORMS)
def test_a_knob_that_a_target_does_not_know_is_stated(target, form):
    knobs = ONE_STAGE if target == "deepspeed" else FULL
    made = render(target, trial(**knobs, loops=3), DOCUMENT, form=form)
    if target in ("yaml", "json", "env", "python"):
        assert "loops" in made.text.lower() and "3" in made.text
    else:
        assert any(note.startswith("loops=3 is not known") for note in made.notes)
        if made.comments_inside:
            assert "loops=3 is not known" in " ".join(made.text.split())


COMMAND = {
    "asked": {
        **DOCUMENT["asked"],
        "workload": {"command": "--command 'trl sft --model x' --launcher trainer", "spec": "llama3-8b"},
        "global_batch": None,
        "devices": {"type": "cuda", "used": 2, "per_host": 2},
    }
}


@pytest.mark.parametrize("target", TARGETS)
def test_the_export_of_a_command_has_its_tuned_values_or_is_refused(target):
    if target not in ("yaml", "json", "env"):
        with pytest.raises(
            UsageError, match=rf"{target} states a training .* the winner's command is in winner/command\.sh"
        ):
            render(target, trial(micro_batch=2, loops=3), COMMAND)
        return
    made = render(target, trial(micro_batch=2, loops=3), COMMAND)
    assert re.search('loops"?[:=] ?3', made.text, re.IGNORECASE) and "learning" not in made.text
    assert any("add these settings to the command that was tuned: --command 'trl sft" in line for line in made.use)


@pytest.mark.parametrize(("target", "form"), FORMS)
def test_every_note_is_in_the_text_of_a_form_with_comments(target, form):
    made = render(target, trial(**(ONE_STAGE if target == "deepspeed" else FULL)), DOCUMENT, form=form)
    if not made.comments_inside:
        assert "#" not in made.text
        return
    text = " ".join(json.dumps(made.text)[1:-1].replace("\\n", " ").replace("# ", " ").split())
    text = text.replace('\\", \\" ', " ").replace('\\"', '"').replace('\\\\"', '"')
    for note in made.notes:
        words = note.split()
        # Lines are wrapped, and JSON quotes each: only the order of the words is compared.
        place = -1
        for word in words[:4]:
            place = text.find(word.strip('"'), place + 1)
            assert place >= 0, f"{note!r} is not stated"


@pytest.mark.parametrize("target", TARGETS)
def test_any_combination_of_standard_knobs_can_be_exported(target):
    values = {
        "tp": (1, 2), "pp": (1, 2), "dp": (1, 2), "zero": (0, 1, 2, 3), "checkpoint_ratio": (0.0, 0.5, 1.0),
        "offload": ("none", "optimizer"),
    }  # fmt: skip
    count = 0
    for combination in itertools.product(*values.values()):
        knobs = dict(zip(values, combination)) | {"micro_batch": 2, "grad_accum": 4}
        if target == "deepspeed" and knobs["tp"] == knobs["pp"] == 2:
            continue
        made = render(target, trial(**knobs), DOCUMENT)
        assert made.text.endswith("\n") and made.devices == knobs["tp"] * knobs["pp"] * knobs["dp"]
        count += 1
    assert count == (144 if target == "deepspeed" else 192)


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "lightning", "trainer"])
def test_an_optimizer_that_is_not_fused_is_torch_s_choice(target):
    # With fused=False AdamW loops over the parameters, on GPUs too; the trials did not set it.
    own = {"asked": {**DOCUMENT["asked"], "workload": {"id": "3f2a", "spec": "net.py:workload"}}}
    for document in (DOCUMENT, own):
        made, noted = parsed(target, document=document, fused_optimizer=False)
        assert "fused=False" not in noted and "fused" not in made.get("optimizer", {}).get("params", {})
        noted = render(target, trial(fused_optimizer=True), document)
        assert "fused=True" in " ".join(noted.notes) or "fused" in noted.text.replace("fused_optimizer", "")


def test_on_a_cpu_a_loss_without_logits_does_not_become_kernels_of_a_gpu():
    on = {kind: {"asked": {**DOCUMENT["asked"], "devices": {"type": kind}}} for kind in ("cpu", "cuda")}
    on_a_gpu, noted = parsed("trainer", document=on["cuda"], kernels=True)
    assert on_a_gpu["use_liger_kernel"] is True and "Liger" in noted
    on_a_cpu, noted = parsed("trainer", document=on["cpu"], kernels=True)
    assert "use_liger_kernel" not in on_a_cpu
    assert "kernels=true has no counterpart here: the loss keeps all logits in memory" in noted and "Liger" not in noted
    for target in ("accelerate", "deepspeed", "lightning"):
        for kind, document in on.items():
            noted = parsed(target, document=document, kernels=True)[1]
            assert "kernels=true has no counterpart" in noted and ("Liger" in noted) == (kind == "cuda")


@pytest.mark.parametrize(
    ("target", "tensorwise", "rowwise"),
    [
        ("megatron", "--fp8-format hybrid\n  --fp8-recipe tensorwise", "Megatron has no scales of rows"),
        ("torchtitan", "with a scale a row, as it has no other", "model_compile_enabled=False)]) gives it"),
        ("trainer", "precision=fp8 is accelerate's", "precision=fp8_rowwise is accelerate's"),
        ("lightning", "from_recipe_name('tensorwise')", "from_recipe_name('rowwise')"),
        ("deepspeed", "precision=fp8 has no counterpart", "precision=fp8_rowwise has no counterpart"),
    ],
)
def test_float8_is_written_in_each_framework_s_form(target, tensorwise, rowwise):
    for precision, message in (("fp8", tensorwise), ("fp8_rowwise", rowwise)):
        made = render(target, trial(precision=precision, micro_batch=1, grad_accum=1), DOCUMENT)
        assert message in made.text + " ".join(made.notes)
        assert "bf16" in made.text or "bfloat16" in made.text


def test_exports_without_sequence_parallelism_use_fewer_devices_and_say_so():
    for target in ("accelerate", "torchtitan", "megatron", "lightning"):
        made = render(target, trial(micro_batch=1, grad_accum=1, sp=2, dp=4, zero=3), DOCUMENT)
        message = "sp=2 has no counterpart here: this file runs on 4 instead of 8 devices"
        assert any(message in each for each in made.notes)
        assert f"On 4 of 8 devices, since {target} has no sequences cut over ranks: tp 1 x " in made.text
    made, notes = parsed("deepspeed", micro_batch=1, grad_accum=1, sp=2, dp=4, zero=3)
    assert made["sequence_parallel_size"] == 2 and made["train_batch_size"] == 4
    assert "UlyssesSPAttentionHF.register_with_transformers(..., sequence_parallel_size=2" in notes
    assert "On 8 devices: tp 1 x sp 2 x pp 1 x dp 4" in made["_comment"]


def test_ring_attention_is_written_for_frameworks_that_have_it_and_noted_for_others():
    knobs = {"micro_batch": 1, "grad_accum": 1, "cp": 2, "dp": 4, "zero": 3}
    megatron, torchtitan = (render(target, trial(**knobs), DOCUMENT).text for target in ("megatron", "torchtitan"))
    assert "--context-parallel-size 2" in megatron and "On 8 devices: tp 1 x cp 2 x pp 1 x dp 4" in megatron
    assert "--parallelism.context_parallel_degree 2" in torchtitan
    assert "--parallelism.data_parallel_shard_degree 4" in torchtitan
    alone = render("torchtitan", trial(micro_batch=1, grad_accum=4, cp=2, dp=1, zero=0), DOCUMENT)
    assert any("cp=2 beside zero=0: torchtitan shards over the ranks of a ring" in each for each in alone.notes)
    for target in ("accelerate", "lightning", "deepspeed"):
        made = render(target, trial(**knobs), DOCUMENT)
        assert any(
            "cp=2 has no counterpart here: this file runs on 4 instead of 8 devices" in each for each in made.notes
        )
        assert any(
            "2 times the tokens and activations; megatron, torchtitan and python cut them" in each
            for each in made.notes
        )


def test_accelerate_says_that_it_has_no_pipeline():
    made, notes = parsed("accelerate", **FULL)
    assert made["num_processes"] == 8
    assert "pp=2 has no counterpart here: this file runs on 8 instead of 16 devices" in notes
    assert made["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 4,
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 1,
    }


def test_products_in_tf32_are_switched_on_where_a_file_can_and_named_elsewhere():
    made, _ = parsed("trainer", precision="tf32", micro_batch=4, grad_accum=1)
    assert made["tf32"] is True and "bf16" not in made and "fp16" not in made
    for target in ("accelerate", "deepspeed", "lightning", "megatron", "torchtitan"):
        made = render(target, trial(precision="tf32", micro_batch=4, grad_accum=1), DOCUMENT)
        assert "set_float32_matmul_precision('high')" in made.text + " ".join(made.notes), target
        assert "bf16" not in made.text.replace("grad-reduce-in-bf16", ""), target


@pytest.mark.parametrize(
    ("ratio", "expected", "stated"),
    [
        (0.0, (None, None), False),
        (0.25, (True, {"every_n_layers": 4}), False),
        (0.5, (True, {"every_n_layers": 2}), False),
        (0.75, (True, None), True),
        (1.0, (True, None), False),
    ],
)
def test_the_trainer_checkpoints_a_share_where_it_can(ratio, expected, stated):
    made, notes = parsed("trainer", micro_batch=1, grad_accum=1, checkpoint_ratio=ratio)
    found = made.get("activation_checkpointing"), made.get("activation_checkpointing_kwargs")
    assert found == expected
    assert ("became all blocks" in notes) is stated


def test_deepspeed_offloads_the_optimizer_only_with_zero():
    made, _ = parsed("deepspeed", micro_batch=1, grad_accum=1, offload="optimizer")
    assert made["zero_optimization"]["stage"] == 1
    assert made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    made, notes = parsed("deepspeed", micro_batch=1, grad_accum=1, dp=2, zero=0, offload="optimizer")
    assert made["zero_optimization"]["stage"] == 1 and "offload=optimizer needs ZeRO" in notes


def test_deepspeeds_pipelines_take_stage_one():
    made, notes = parsed("deepspeed", micro_batch=1, grad_accum=4, pp=2, dp=2, zero=3)
    assert made["zero_optimization"]["stage"] == 1 and made["pipeline"] == {"stages": 2}
    assert "zero=3" in notes


def test_several_stages_a_rank_are_carried_over_or_stated():
    environment = {"MODULE": "m", "CONFIG": "c"}
    named = {"interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"}
    for kind, word in named.items():
        knobs = {"pp": 2, "virtual_stages": 2, "pipeline_schedule": kind}
        given, _ = flags("torchtitan", environment=environment, **knobs)
        assert value(given, "--parallelism.pipeline_parallel_schedule") == word
        # torchtitan's default is two stages a rank.
        assert "--parallelism.pipeline_parallel_layers_per_stage" not in given
        for target in ("deepspeed", "megatron"):
            notes = render(target, trial(**knobs), DOCUMENT).notes
            stated = f"pipeline_schedule={kind} with virtual_stages=2 has no counterpart here"
            known = target == "megatron" and kind == "interleaved"
            assert any(note.startswith(stated) for note in notes) is not known
        notes = render("accelerate", trial(**knobs), DOCUMENT).notes
        assert not any("not known to the export" in note for note in notes)
        given, _ = flags("megatron", **knobs)
        assert ("--num-virtual-stages-per-pipeline-rank" in given) is (kind != "zbv")
    document = {"asked": {**DOCUMENT["asked"], "shape": {"layers": 30}}}
    four = {"pp": 2, "virtual_stages": 4, "pipeline_schedule": "interleaved"}
    # 30 layers, the embedding and the head, in 8 stages.
    text = render("torchtitan", trial(**four), document).text
    assert "--parallelism.pipeline_parallel_layers_per_stage 4" in text
    document["asked"]["shape"] = {"layers": 31}
    notes = render("torchtitan", trial(**four), document).notes
    assert "virtual_stages=4: torchtitan makes two stages a rank of these layers" in notes
    notes = render("torchtitan", trial(pp=2, pipeline_schedule="zero_bubble"), DOCUMENT).notes
    assert any(note.startswith("virtual_stages=1: torchtitan makes two stages") for note in notes)


@pytest.mark.parametrize("target", TARGETS)
def test_adapters_are_carried_over_or_stated(target):
    lora = "r=16,alpha=32,target=q_proj+v_proj"
    workload = {"id": "3f2a", "spec": "llama3-8b", "lora": lora}
    made = render(target, trial(micro_batch=2), {"asked": {**DOCUMENT["asked"], "workload": workload}})
    if target in ("yaml", "json", "env", "python"):
        assert lora in made.text
        return
    (note,) = [note for note in made.notes if note.startswith(f"lora={lora}: ")]
    if target in ("accelerate", "trainer", "deepspeed"):
        call = "peft.LoraConfig(r=16, lora_alpha=32, target_modules=['q_proj', 'v_proj'])"
        assert call in note
        peft = pytest.importorskip("peft")
        assert eval(call, {"peft": peft}).target_modules == {"q_proj", "v_proj"}


def test_env_is_read_back_by_a_shell():
    made = render("env", trial(**FULL), DOCUMENT)
    script = made.text + 'echo "$REDLINE_MICRO_BATCH $REDLINE_FUSION $REDLINE_CHECKPOINT_RATIO $REDLINE_DEVICES"'
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out == "4 true 0.25 16\n"


@pytest.mark.parametrize(("target", "form"), FORMS)
def test_hostile_names_stay_data(target, form, tmp_path):
    name = "x'\"$(touch pwned)\nimport os; os.mkdir('pwned') #<config>"
    document = {"asked": {**DOCUMENT["asked"], "model": name, "workload": {"spec": name}}}
    knobs = {"micro_batch": 2, "grad_accum": 1, "attention": name}
    made = render(target, trial(**knobs), document, form=form)
    if form in ("yaml", "json"):
        assert isinstance(yaml.safe_load(made.text), dict)
    elif form == "python":
        space = {}
        exec(compile(made.text.split("import argparse")[0], "x", "exec"), space)
        _head, _, tail = made.text.partition("\nMODEL = ")
        exec(compile("MODEL = " + tail.partition("\n\n\ndef main")[0], "x", "exec"), space)
        assert space["MODEL"] == name and space["CONFIG"]["attention"] == name
    else:
        subprocess.run(
            ["bash", "-c", made.text],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "LAUNCH": "true"},
            check=False,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim", "experts", "intermediate"]
)
def test_sizes_of_a_model_are_quoted_for_a_shell(name, tmp_path):
    sizes = dict.fromkeys(("layers", "hidden", "heads", "intermediate", "vocabulary", "head_dim", "kv_lora_rank"), 8)
    document = {"asked": {**DOCUMENT["asked"], "shape": {"family": "deepseek_v3", **sizes, name: "1 $(touch pwned)"}}}
    made = render("megatron", trial(micro_batch=2, grad_accum=1), document)
    assert "pwned" in made.text
    text = made.text + 'printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    env = {"PATH": "/usr/bin:/bin"}
    out = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert "1 $(touch pwned)" in out.splitlines() and list(tmp_path.iterdir()) == []


def test_without_run_yaml_what_the_table_knows_is_exported():
    made, notes = parsed("deepspeed", document=None, micro_batch=4, grad_accum=2, dp=2)
    assert made["train_batch_size"] == 16
    made, notes = parsed("trainer", document=None, precision="bf16")
    assert "per_device_train_batch_size" not in made and "the batch is not known" in notes


def test_the_batch_follows_from_the_global_batch_where_a_knob_is_missing():
    made, _ = parsed("trainer", micro_batch=4)
    assert made["gradient_accumulation_steps"] == 8
    made, _ = parsed("trainer", grad_accum=4)
    assert made["per_device_train_batch_size"] == 8
    with pytest.raises(UsageError, match="32, is not a multiple of dp x micro_batch, 1 x 5"):
        parsed("trainer", micro_batch=5)


@pytest.mark.parametrize("target", ["trainer", "deepspeed", "lightning", "megatron", "torchtitan", "json"])
def test_without_a_global_batch_nothing_is_accumulated_and_a_note_says_so(target):
    document = {**DOCUMENT, "asked": {k: v for k, v in DOCUMENT["asked"].items() if k != "global_batch"}}
    made = render(target, trial(micro_batch=4), document)
    assert "the run does not state its global batch" in " ".join(made.notes)
    body = [line for line in made.text.splitlines() if not line.lstrip().startswith(("#", "//"))]
    assert not any(re.search(r"(batch|accum)\S*\W+(null|None)\b", line) for line in body), made.text


@pytest.mark.parametrize(("knob", "bad"), [("tp", 0), ("micro_batch", 1.5), ("dp", True), ("pp", "two")])
def test_sizes_that_are_no_sizes_are_refused(knob, bad):
    bad_trial = Trial(number=1, config={knob: bad}, measurement=None)
    with pytest.raises(UsageError, match=f"trial 1: {knob} must be a whole number"):
        render("trainer", bad_trial, DOCUMENT)


def test_unknown_targets_and_forms_come_with_the_nearest():
    with pytest.raises(UsageError, match="unknown export target 'acelerate'; did you mean 'accelerate'"):
        render("acelerate", trial(micro_batch=1), DOCUMENT)
    with pytest.raises(UsageError, match="deepspeed: unknown form 'yaml'"):
        render("deepspeed", trial(micro_batch=1), DOCUMENT, form="yaml")


def test_python_needs_a_model():
    with pytest.raises(UsageError, match="tuned a callable"):
        render("python", trial(micro_batch=1, grad_accum=1), {"asked": {"workload": {"callable": "f"}}})


def test_the_suffix_of_a_file_chooses_the_form():
    assert form_of("trainer", "a/args.JSON") == "json"
    assert form_of("trainer", "args.yaml") == "yaml"
    assert form_of("trainer", "args.txt") is None and form_of("none", "a.json") is None


def test_the_winner_or_any_trial_is_chosen():
    trials = [trial(0, micro_batch=1), trial(1, Status.OOM, micro_batch=2)]
    assert chosen_trial(trials, None).number == 0
    assert chosen_trial(trials, 0).number == 0
    with pytest.raises(UsageError, match="there is no trial 2; the run has 0 to 1"):
        chosen_trial(trials, 2)
    with pytest.raises(UsageError, match="no winner to export: none of 1 trials succeeded"):
        chosen_trial(trials[1:], None)


SIMULATED = {"asked": {**DOCUMENT["asked"], "simulated": True}}
ANOTHER = "trains differently from fp32 or bf16"
CASES = {
    "simulated": (SIMULATED, {}, "predicted, simulated: nothing was run"),
    "bf16_pure": (DOCUMENT, {"precision": "bf16_pure"}, f"{ANOTHER}: there are no fp32 master weights"),
    "fp8": (DOCUMENT, {"precision": "fp8"}, f"{ANOTHER}: matrix products are computed in 8 bits"),
    "oom": (DOCUMENT, {"status": Status.OOM}, "trial 7 did not run to its end, it ended as oom (it went"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("target", "form"), FORMS)
def test_every_header_says_what_is_not_what_it_seems(target, form, case):
    document, knobs, message = CASES[case]
    made = render(target, trial(**{"micro_batch": 1, "grad_accum": 1, **knobs}), document, form=form)
    assert any(message in note for note in made.notes)
    if made.comments_inside:
        head = made.text.partition("You must set these yourself")[0]
        assert message in " ".join(
            head.replace('"', " ").replace("\n", " ").replace("#", " ").replace(",  ", " ").split()
        )
    plain_one = render(target, trial(micro_batch=1, grad_accum=1), DOCUMENT, form=form)
    assert not any(each in plain_one.text + " ".join(plain_one.notes) for each in ("simulated", "trains differently"))


GROUPS = {"dp": 8, "zero": 3, "hsdp": 2, "micro_batch": 1, "grad_accum": 2}


def test_groups_of_replicas_are_written_where_there_are_such_and_stated_where_not():
    given, notes = flags("torchtitan", **GROUPS)
    pairs = dict(itertools.pairwise(given))
    assert pairs["--parallelism.data_parallel_replicate_degree"] == "2"
    assert pairs["--parallelism.data_parallel_shard_degree"] == "4"
    assert "hsdp=2: torchtitan sums gradients between hosts with every micro-batch" in notes
    made, notes = parsed("accelerate", **GROUPS)
    assert made["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 1,
    }
    assert "hsdp" not in notes and "tp=" not in notes
    given, _ = flags("megatron", **GROUPS)
    assert given[given.index("--num-distributed-optimizer-instances") + 1] == "2"
    assert "ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)" in parsed("trainer", **GROUPS)[1]
    for target, instead in (("lightning", "a mesh of your own"), ("deepspeed", "hpZ keeps a copy of the weights")):
        notes = parsed(target, **GROUPS)[1]
        assert "hsdp=2 has no counterpart here: pieces are cut over all 8 replicas" in notes and instead in notes
    assert yaml.safe_load(render("yaml", trial(**GROUPS), DOCUMENT).text)["configuration"]["hsdp"] == 2


def test_deepspeed_refuses_tp_beside_pp():
    with pytest.raises(UsageError, match="DeepSpeed cannot run tp=2 with pp=2 from a file"):
        render("deepspeed", trial(tp=2, pp=2, micro_batch=1, grad_accum=2), DOCUMENT)
    assert parsed("deepspeed", tp=2, micro_batch=1, grad_accum=2)[0]["tensor_parallel"] == {"autotp_size": 2}


PLAIN = ("yaml", "json", "env")
"""Targets with the configuration itself."""


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in ("python", *PLAIN)])
def test_blocks_that_are_treated_unlike_each_other_are_refused_where_that_cannot_be_stated(target):
    plain = {"dp": 4, "zero": 1, "micro_batch": 4, "grad_accum": 2}
    with pytest.raises(UsageError, match=f'to {target}: strategy="0-1:ckpt 2-3:-" treats blocks unlike each other'):
        render(target, trial(**plain, strategy="0-1:ckpt 2-3:-"), DOCUMENT)
    alike = render(target, trial(**plain, strategy="0-3:ckpt"), DOCUMENT)
    assert alike.text == render(target, trial(**plain, checkpoint_ratio=1.0), DOCUMENT).text


@pytest.mark.parametrize("target", PLAIN)
def test_plain_files_have_any_configuration(target):
    knobs = {"dp": 2, "pp": 2, "micro_batch": 4, "grad_accum": 2}
    for unlike in ({"strategy": "0-1:ckpt 2-3:-"}, {"strategy": "0-3:ckpt"}, {"stage_blocks": "3,1"}):
        made = render(target, trial(**knobs, **unlike), DOCUMENT)
        ((name, value),) = unlike.items()
        if target == "env":
            script = f'{made.text}printf %s "$REDLINE_{name.upper()}"'
            found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        else:
            found = yaml.safe_load(made.text)["configuration"][name]
        assert found == value and not any(name in note for note in made.notes)


def test_a_script_of_redlines_own_takes_a_strategy_along():
    made = render("python", trial(dp=2, tp=2, micro_batch=4, grad_accum=1, strategy="0-1:tp1,ckpt 2-3:-"), DOCUMENT)
    assert "'strategy': '0-1:tp1,ckpt 2-3:-'" in made.text and "strategy" not in " ".join(made.notes)


@pytest.mark.parametrize(
    ("config", "framework", "target"),
    [
        ({"tp": 2}, "", "accelerate"),
        ({"tp": 2}, "redline", "accelerate"),
        ({"tp": 2}, "megatron", "megatron"),
        ({"pp": 2}, "", "torchtitan"),
        ({"pp": 2}, "trainer", "torchtitan"),
        ({"cp": 2}, "", "torchtitan"),
        ({"sp": 2}, "", "python"),
        ({"sp": 2}, "deepspeed", "deepspeed"),
        ({"pp": 2, "stage_blocks": "1,3"}, "", "megatron"),
    ],
)
def test_the_suited_target_runs_a_configuration_on_all_its_devices(config, framework, target):
    assert suited_target(config, framework) == target
