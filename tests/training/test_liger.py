"""The knob kernels on a GPU: modules that Liger's replace, modules that stay, and the equality of their results."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import redline
import torch
import torch.distributed as dist
from numeric import caught, within
from redline.base.device import liger_obstacle
from redline.models.spaces import default_space
from redline.runners.trial.numerics_check import numerics_mismatch, together
from redline.schedule import create_schedule
from redline.schedule.liger import replace_modules
from redline.training import Training
from redline.training.probe import take
from torch import nn
from torch.nn import functional as F

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CPU = torch.device("cpu")
PROGRAM = Path(redline.__file__).parent / "tests" / "support" / "interpreted.py"
LLAMA = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
GEMMA2 = LLAMA | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
NORMS = {"ln_1", "ln_2"}
FAMILIES = {
    "llama": (LLAMA, ["LigerRMSNorm", "LlamaAttention", "SwiGLU"]),
    "mistral": (LLAMA, ["LigerRMSNorm", "MistralAttention", "SwiGLU"]),
    "qwen2": (LLAMA, ["LigerRMSNorm", "Qwen2Attention", "SwiGLU"]),
    "qwen3": (LLAMA | {"self_attn.q_norm", "self_attn.k_norm"}, ["LigerRMSNorm", "Qwen3Attention", "SwiGLU"]),
    "gemma": (LLAMA, ["GeGLU", "GemmaAttention", "LigerRMSNorm"]),
    "gemma2": (GEMMA2, ["GeGLU", "Gemma2Attention", "LigerRMSNorm"]),
    "gpt2": (NORMS, ["LayerNorm"]),
    "bert": ({"attention.output.LayerNorm", "output.LayerNorm"}, ["LayerNorm"]),
}
"""Replaced modules in the first block of a family, and the classes that replace them."""


def interpreted(*arguments):
    """Returns the results that tests/support/interpreted.py prints, by family. Triton's interpreter must be enabled
    before triton is imported."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [each.removeprefix("RESULT ") for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    return {each["family"]: each for each in map(json.loads, lines)}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Makes training replace modules as on a GPU; tests do not run them."""
    monkeypatch.setattr("redline.training.training.liger_obstacle", lambda device_type: "")


@pytest.mark.slow
def test_every_family_computes_the_same_with_them(seed):
    found = interpreted(seed, "right", *FAMILIES)
    assert found.keys() == FAMILIES.keys()
    for family, (first, kinds) in FAMILIES.items():
        each = found[family]
        assert {path.partition(".0.")[2] for path in each["replaced"] if ".0." in path} == first, family
        assert each["kinds"] == kinds and each["kept"] and each["same_names"], family
        plain, kept, traced = each["bytes"]
        # What the estimate's trace of these modules keeps for backward.
        assert kept == traced and (kept < plain or kinds == ["LayerNorm"]), (family, each["bytes"])
        within(each["loss"], each["loss_allowed"], f"{family}: the loss")
        within(each["logits"], each["allowed"], f"{family}: the logits")
        within(each["gradient"], each["allowed"], f"{family}: the gradient of {each['where']}")


@pytest.mark.slow
def test_a_norm_of_another_offset_would_be_seen(seed):
    (found,) = interpreted(seed, "fault", "llama").values()
    caught(found["gradient"], found["allowed"], "a gradient")


# Modules that are not replaced


class Norm(nn.Module):
    def __init__(self, size=16, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class WithoutEpsilon(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True)))


class Gated(Norm):
    def forward(self, x, gate=None):
        return super().forward(x) * (1 if gate is None else F.silu(gate))


class MLP(nn.Module):
    def __init__(self, act=F.silu, factor=1.0):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.factor = act, factor

    def forward(self, x):
        return self.factor * self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Sums(MLP):
    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) + self.up_proj(x))


class ByWeights(MLP):
    def forward(self, x):
        return self.down_proj(self.act(F.linear(x, self.gate_proj.weight)) * self.up_proj(x))


def test_equivalent_modules_are_replaced_whatever_their_name():
    model = nn.Sequential(Norm(), MLP(), MLP(lambda x: F.gelu(x, approximate="tanh")), nn.LayerNorm(16))
    before = dict(model.named_parameters())
    assert replace_modules(create_schedule(model)) == ["0", "1", "2", "3"]
    assert [type(each).__name__ for each in model] == ["LigerRMSNorm", "SwiGLU", "GeGLU", "LayerNorm"]
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert model[0].variance_epsilon == 1e-6 and model[0].offset == 0.0 and model[0].in_place is False
    assert isinstance(model[3], nn.LayerNorm)


def test_modules_with_another_computation_stay():
    model = nn.Sequential(
        Centred(), WithoutEpsilon(), Gated(), MLP(F.relu), MLP(F.gelu), MLP(factor=2.0), Sums(), ByWeights(),
        nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm((2, 16)), nn.Linear(16, 16),
    )  # fmt: skip
    kinds = [type(each) for each in model]
    assert replace_modules(create_schedule(model)) == []
    assert [type(each) for each in model] == kinds


def test_weights_and_names_are_those_without(small, on_a_gpu):
    made = small("llama")
    plain = Training(made, {"micro_batch": 8}, CPU, seed=3).model
    model = Training(made, {"micro_batch": 8, "kernels": True}, CPU, seed=3).model
    assert type(model.model.layers[1].mlp).__name__ == "SwiGLU"
    assert type(model.model.norm).__name__ == "LigerRMSNorm"
    expected, found = plain.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain.load_state_dict(found)
    assert type(copy.deepcopy(model).model.layers[0].self_attn) is type(model.model.layers[0].self_attn)


# Combination with the rest of a configuration


def pieces(made, config):
    training = Training(made, config, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    block = training.model.model.layers[0]
    local = getattr(block.mlp.gate_proj.weight, "to_local", lambda: block.mlp.gate_proj.weight)()
    return type(block.mlp).__name__, type(block.input_layernorm).__name__, tuple(local.shape)


def test_replacements_are_sharded_like_the_originals(two, small):
    def replaced(made, config):
        from redline.training import training

        before, training.liger_obstacle = training.liger_obstacle, lambda device_type: ""
        try:
            return pieces(made, config)
        finally:
            training.liger_obstacle = before

    kinds, made = ("SwiGLU", "LigerRMSNorm"), small("llama")
    for knobs in ({"tp": 2}, {"zero": 3}):
        config = {"micro_batch": 4, "grad_accum": 1, "kernels": True, **knobs}
        found, expected = two.run(replaced, made, config), two.run(pieces, made, config)
        assert [each[:2] for each in found] == [kinds] * 2
        assert [each[2] for each in found] == [each[2] for each in expected] == [(32, 32)] * 2


def test_the_space_of_a_gpu_says_what_kernels_are_there(cuda, monkeypatch):
    made = redline.workload("llama-tiny")
    for reason, there in ((None, True), ("liger_kernel is not installed: pip install 'redline[kernels]'", False)):
        monkeypatch.setattr("redline.base.device.not_installed", lambda package, extra, reason=reason: reason)
        assert liger_obstacle("cuda") == reason
        space = default_space(made, cuda())
        assert ("Liger-Kernel" in space["kernels"].help) is there and space["kernels"].values == (False, True)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_trains_with_them(precision):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = redline.workload("llama-tiny", global_batch=8)
    gpu = torch.device("cuda")
    expected = together([take(Training(made, {"micro_batch": 8}, gpu))])
    for knobs in ({}, {"fusion": True}, {"checkpoint_ratio": 1.0}):
        training = Training(made, {"micro_batch": 8, "kernels": True, "precision": precision, **knobs}, gpu)
        assert type(training.model.model.norm).__name__ == "LigerRMSNorm"
        found = together([take(training)])
        loss = float(training.step())
        assert numerics_mismatch(found, expected, loss=loss, last_loss=loss) is None
