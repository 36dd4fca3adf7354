import importlib.util
import sysconfig
from math import prod

import pytest
from redline.base import device as devices
from redline.base.errors import SpaceError
from redline.models import Workload, parallel, workload
from redline.models.families import Support
from redline.models.spaces import (
    default_space,
    fix_knob,
    lossy_beyond,
    lossy_of_space,
    micro_batches,
    ratios,
    set_values,
)
from redline.space import Space


@pytest.fixture
def compiler(monkeypatch):
    def there(is_there=True):
        monkeypatch.setattr(devices, "fusion_obstacle", lambda device: None if is_there else "none")
        monkeypatch.setattr("redline.models.spaces.fusion_obstacle", devices.fusion_obstacle)

    there()
    return there


def values(space):
    return {knob.name: knob.values for knob in space.knobs if not knob.derived}


def test_a_cpu_has_its_knobs_and_no_others(cpu, compiler):
    assert values(default_space(workload("gpt2-tiny"), cpu)) == {
        "micro_batch": (1, 2, 4, 8, 16, 32),
        "checkpoint_ratio": (0.0, 0.25, 0.5, 0.75, 1.0),
        "precision": ("fp32",),
        "attention": ("sdpa", "eager"),
        "fusion": (False, True),
        "kernels": (False, True),
        "fused_optimizer": (False, True),
    }


def test_a_gpu_has_its_knobs_and_no_others(cuda, compiler):
    space = default_space(workload("gpt2"), cuda((9, 0)))
    assert values(space)["precision"] == ("bf16",)
    assert values(space)["attention"] == ("sdpa",)
    space.override("precision", ["fp32", "tf32", "bf16"])
    space.override("attention", ["eager", "sdpa"])
    assert "fp8" not in values(space)["precision"] and "dp" not in values(space)
    # The time of a small model is that of launching kernels, of which casts are many.
    assert values(default_space(workload("gpt2-tiny"), cuda((9, 0))))["precision"] == ("tf32", "bf16")
    assert values(default_space(workload("gpt2"), cuda((7, 0))))["precision"] == ("fp32", "fp16")


def test_lossy_values_are_there_only_where_they_are_asked_for(cpu, cuda, compiler):
    gpu, made = cuda((9, 0)), workload("gpt2")
    allowed = default_space(made, gpu, allow=("lossy",))
    assert values(allowed)["precision"] == ("bf16", "bf16_pure")
    assert lossy_of_space(allowed) == {"precision": ["bf16_pure"]}
    assert allowed.default()["precision"] == "bf16" and "lossy" in allowed["precision"].help
    asked = default_space(made, gpu)
    assert lossy_of_space(asked) == {} and lossy_beyond(asked) == ["precision=bf16_pure"]
    asked.override("precision", ["bf16", "bf16_pure"])
    assert lossy_of_space(asked) == {"precision": ["bf16_pure"]} and lossy_beyond(asked) == []
    # This model cannot train in fp8, so the space does not offer it.
    with pytest.raises(SpaceError, match="fp8"):
        allowed.fix("precision", "fp8")


def test_slow_values_may_be_requested_and_missing_ones_are_refused(cpu, compiler):
    space = default_space(workload("gpt2-tiny"), cpu)
    space.override("precision", ["fp32", "bf16"])
    assert space["precision"].values == ("fp32", "bf16")
    space.fix("checkpoint_ratio", 1 / 6)
    with pytest.raises(SpaceError, match="fp16"):
        space.fix("precision", "fp16")
    with pytest.raises(SpaceError, match="flash"):
        space.fix("attention", "flash_attention_2")
    with pytest.raises(SpaceError, match=r"checkpoint_ratio.*0\.3"):
        space.fix("checkpoint_ratio", 0.3)
    with pytest.raises(SpaceError, match="micro_batch"):
        space.fix("micro_batch", 5)


def test_flash_attention_needs_half_precision(cuda, compiler, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "flash_attn" else found(name))
    space = default_space(workload("gpt2"), cuda())
    assert "flash_attention_2" in values(space)["attention"]
    assert space.config(attention="flash_attention_2", precision="bf16")
    space.override("precision", ["fp32", "bf16"])
    with pytest.raises(SpaceError, match=r"flash attention has no float32"):
        space.config(attention="flash_attention_2", precision="fp32")


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-large", "gpt-neo-1.3b"])
def test_the_default_is_what_the_trainer_runs(cpu, cuda, compiler, name):
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    default = default_space(workload(name), cpu).default()
    assert default["micro_batch"] == fields["per_device_train_batch_size"].default == 8
    assert default["fused_optimizer"] is (fields["optim"].default == "adamw_torch_fused")
    assert default["precision"] == "fp32" and fields["bf16"].default is False and fields["fp16"].default is False
    # On a GPU with bf16 a user of the Trainer passes bf16=True.
    on_gpu = default_space(workload(name), cuda((9, 0))).default().to_dict()
    assert on_gpu == {**default.to_dict(), "precision": "bf16", "offload": "none"}
    assert default_space(workload(name), cuda((7, 0))).default()["precision"] == "fp32"
    assert default["checkpoint_ratio"] == 0 and not fields["gradient_checkpointing"].default
    assert default["fusion"] is fields["torch_compile"].default is False
    assert default["attention"] == ("eager" if name == "gpt-neo-1.3b" else "sdpa")


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("total", [8, 24, 32])
def test_every_configuration_does_the_same_work(cpu, compiler, total, devices):
    space = default_space(workload("gpt2-tiny", global_batch=total), cpu, devices)
    assert len(space) > 0
    for config in space.sample(min(len(space), 2000)):
        assert config["micro_batch"] * config["grad_accum"] * config.get("dp", 1) == total
        assert prod(config.get(name, 1) for name in ("tp", "sp", "cp", "pp", "dp")) == devices


def test_several_devices_have_the_parallel_knobs_that_can_matter(cpu, compiler):
    space = default_space(workload("llama-tiny", global_batch=16), cpu, 4)
    space.override("precision", ["fp32"])
    configs = list(space)
    ways = {(c["tp"], c["sp"], c["pp"], c["dp"]) for c in configs if c["cp"] == 1}
    assert {way for way in ways if way[1] == 1} == {
        (1, 1, 1, 4), (2, 1, 1, 2), (1, 1, 2, 2), (4, 1, 1, 1), (1, 1, 4, 1), (2, 1, 2, 1)
    }  # fmt: skip
    assert {way for way in ways if way[1] > 1} == {(1, 2, 1, 2), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1)}
    rings = {(c["tp"], c["sp"], c["cp"], c["pp"], c["dp"]) for c in configs if c["cp"] > 1}
    assert rings == {(1, 1, 2, 1, 2), (1, 1, 4, 1, 1), (2, 1, 2, 1, 1), (1, 2, 2, 1, 1), (1, 1, 2, 2, 1)}
    for config in configs:
        assert ("zero" in config) is (config["dp"] * config["sp"] * config["cp"] > 1)
        assert ("sequence_parallel" in config) is (config["tp"] > 1)
        assert ("pipeline_schedule" in config) is ("virtual_stages" in config) is (config["pp"] > 1)
        if config.get("pipeline_schedule") == "1f1b":
            assert config["grad_accum"] >= config["pp"]
    assert {c["zero"] for c in configs if "zero" in c} == {0, 1, 2, 3}
    assert {c["sequence_parallel"] for c in configs if c["tp"] == 2} == {False, True}


def test_every_order_of_a_pipeline_is_there_with_what_it_asks_for(cpu, compiler):
    space = default_space(workload("llama-tiny", global_batch=16), cpu, 4)
    space.override("precision", ["fp32"])
    found = {}
    for config in space:
        if config["pp"] > 1:
            found.setdefault(config["pipeline_schedule"], []).append(config)
            # 8 blocks.
            assert config["pp"] * config["virtual_stages"] <= 8
    chunks = {kind: {each["virtual_stages"] for each in configs} for kind, configs in found.items()}
    assert chunks == {
        "1f1b": {1}, "gpipe": {1}, "interleaved": {2, 3, 4}, "zero_bubble": {1, 2, 3, 4}, "zbv": {2}
    }  # fmt: skip
    for kind in ("interleaved", "zero_bubble"):
        assert all(each["grad_accum"] % each["pp"] == 0 for each in found[kind])
    assert all(each["grad_accum"] >= each["pp"] for each in found["zbv"])
    for kind in ("zero_bubble", "zbv"):
        assert {(each.get("zero", 0), each["checkpoint_ratio"], each["fusion"]) for each in found[kind]} == {
            (0, 0.0, False), (1, 0.0, False)
        }  # fmt: skip
    assert {each["zero"] for each in found["interleaved"] if "zero" in each} == {0, 1, 2, 3}


def test_degrees_that_the_model_cannot_have_are_excluded_with_the_reason(cpu, compiler):
    # 8 heads but 4 key-value heads; 8 blocks.
    space = default_space(workload("llama-tiny", global_batch=16), cpu, 16)
    reasons = {each.text: each.reason for each in space.constraints}
    assert "8 ranks must divide the 4 " in reasons["tp not in [8]"]
    assert "each of 16 stages needs a repeated block, but the model has 8" in reasons["pp not in [16]"]
    with pytest.raises(SpaceError, match="16 ranks must divide the "):
        space.fix("tp", 16)


def test_a_model_without_a_plan_says_so(cpu, compiler):
    import torch
    from torch import nn

    space = default_space(
        Workload(
            model=lambda: nn.Linear(4, 4),
            batch=lambda size, seed: (torch.ones(size, 4),),
            loss=lambda output, batch: output.mean(),
        ),
        cpu,
        2,
    )
    reasons = {each.text: each.reason for each in space.constraints}
    assert "plan" in reasons["tp not in [2]"] and "pp not in [2]" in reasons
    assert {config["dp"] for config in space} == {2}


def test_tensor_parallel_ranks_are_on_one_host(cuda, compiler):
    space = default_space(workload("llama2-7b"), cuda(count=4), 8)
    reasons = {each.text: each.reason for each in space.constraints}
    message = "ranks that share a layer must be on one host, which has {} of the {} devices"
    assert reasons["tp not in [8]"] == message.format(4, 8)
    # Six ranks on hosts of four are three and three: the second pair would be on both hosts.
    space = default_space(workload("gpt2-tiny", global_batch=24), cuda(count=4), 6)
    assert {each.reason: each.text for each in space.constraints}[message.format(3, 6)] == "tp not in [2, 6]"


def test_pieces_are_cut_within_hosts_only_where_replicas_are_on_several(cuda, compiler):
    task = workload("llama2-7b", global_batch=96)
    space = default_space(task, cuda(count=8), 32)
    assert space["hsdp"].values == (1, 2, 4) and space["hsdp"].default == 1
    found = {(each["tp"], each["pp"], each["hsdp"]) for each in space.sample(5000, seed=0) if each.get("hsdp", 1) > 1}
    # The number of groups is the number of hosts of a stage's replicas, with at least two replicas on each.
    assert found == {(tp, pp, 4 // pp) for tp in (1, 2, 4) for pp in (1, 2)}
    for knobs, reason in (
        ({"zero": 3, "hsdp": 2}, "pieces are cut within a host, of 8 devices here"),
        ({"zero": 3, "hsdp": 4, "tp": 8}, "a host has one replica"),
    ):
        with pytest.raises(SpaceError, match=reason):
            space.config(micro_batch=1, **knobs)
    assert not any("hsdp" in each for each in space.sample(500, seed=0) if each.get("zero", 0) < 2)


def test_without_several_hosts_hsdp_is_absent_with_a_reason(cpu, cuda, compiler):
    task = workload("gpt2-tiny", global_batch=96)
    for device, count, reason in (
        (cuda(count=8), 8, "the 8 devices are on one host"),
        (cuda(count=1), 4, "each of the 4 devices is on its own host"),
        (cpu, 4, "which ranks share a host is not known of CPUs"),
    ):
        assert "hsdp" not in default_space(task, device, count).by_name
        assert parallel.no_hsdp(count, device) == reason


def test_a_global_batch_that_cannot_be_shared_is_refused(cpu, compiler):
    with pytest.raises(SpaceError, match="31 is not one of 7; 28 is.*each of 7 stages.*7 ranks must divide"):
        default_space(workload("gpt2-tiny", global_batch=31), cpu, 7)


def test_micro_batches_are_the_divisors_or_where_too_many_the_powers_of_two():
    assert micro_batches(1) == [1]
    assert micro_batches(24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert micro_batches(7) == [1, 7]
    assert micro_batches(720) == [1, 2, 4, 8, 16, 720]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (1, [0.0, 1.0]),
        (2, [0.0, 0.5, 1.0]),
        (3, [0.0, 0.25, 0.75, 1.0]),
        (4, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (24, [0.0, 0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_ratios_that_choose_as_many_blocks_are_offered_once(blocks, expected):
    assert ratios(blocks) == expected
    assert len({round(ratio * blocks) for ratio in expected}) == len(expected)


def test_fusion_needs_a_compiler_and_python_s_headers(cpu, cuda, monkeypatch, tmp_path):
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/x" if name == "g++" else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "headers are missing" in devices.fusion_obstacle(cpu)
    (tmp_path / "Python.h").touch()
    assert devices.fusion_obstacle(cpu) is None
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert "there is no compiler" in devices.fusion_obstacle(cpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert devices.fusion_obstacle(cuda()) == "triton is not installed"


def test_expert_rows_are_dropped_only_on_request(cpu, compiler):
    mixture = default_space(workload("mixtral-tiny"), cpu, allow=("lossy",))
    assert "capacity_factor" not in values(mixture) and "capacity_factor" not in mixture.default()
    set_values(mixture, "capacity_factor", [0, 1.25, 1.0, 1.25])
    assert values(mixture)["capacity_factor"] == (0, 1.25, 1.0) and mixture.default()["capacity_factor"] == 0
    assert lossy_of_space(mixture) == {"capacity_factor": [1.25, 1.0]}
    for wrong in (-1, "much", True):
        with pytest.raises(SpaceError, match=f"capacity_factor must be a number from 0 on, but is {wrong!r}"):
            fix_knob(default_space(workload("mixtral-tiny"), cpu), "capacity_factor", wrong)
    dense = default_space(workload("llama-tiny"), cpu)
    with pytest.raises(SpaceError, match="the model has no experts, so capacity_factor must be 0"):
        set_values(dense, "capacity_factor", [1.25])


def test_devices_that_could_only_be_replicas_are_refused_where_a_loss_is_of_one_replica(cpu):
    from redline.models import hugging_face
    from transformers import DogeConfig, SwitchTransformersConfig

    sizes = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_experts": 4}
    switch = SwitchTransformersConfig(output_router_logits=True, **sizes)
    with pytest.raises(SpaceError, match=r"2 devices would be replicas, but the loss that balances .* one replica"):
        default_space(hugging_face(switch, seq_len=16), cpu, devices=2)
    assert "dp" not in values(default_space(hugging_face(switch, seq_len=16), cpu))
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    doge = DogeConfig(output_router_logits=True, is_moe=True, num_experts=16, num_experts_per_tok=2, **sizes)
    with pytest.raises(SpaceError, match="one replica"):
        default_space(hugging_face(doge, seq_len=16), cpu, devices=2)


def test_a_model_of_one_replica_has_devices_that_share_it(cpu):
    every = Support(
        tp=lambda ranks: None, sequences=lambda sp, cp, tp: None, pp=lambda stages: None, sequence_parallel=None,
        replicas="it is one",
    )  # fmt: skip
    space = Space()
    spread = parallel.declare(space, 16, cpu, 2, every, any_batch=False, seq_len=16, own_loss=False)
    assert spread.replicas == (1,)
    assert {config["dp"] for config in space} == {1}
    assert "it is one" in {constraint.reason for constraint in space.constraints}
