"""Users' own workloads, valid and invalid."""

import json
from dataclasses import replace
from itertools import count

import pytest
import torch
from redline.base.device import Device
from redline.base.errors import WorkloadError
from redline.models import Workload, flops, flops_of, make_space, workload
from redline.models.request import TrainingRequest, resolve as resolve_request
from redline.space import Space
from redline.training import Training
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

CPU = torch.device("cpu")
NUMBERS = count()


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def pairs(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 8, generator=generator)


def error(output, batch):
    return F.mse_loss(output, batch[-1] if isinstance(batch, tuple) else batch["y"])


def own(**changed):
    return Workload(**{"model": Net, "batch": pairs, "loss": error, "global_batch": 8, **changed})


def first_loss(made, **knobs):
    return float(Training(made, {"micro_batch": 8, **knobs}, CPU).step())


def test_a_dict_gives_the_model_what_its_forward_takes():
    def named(size, seed):
        x, y = pairs(size, seed)
        return {"x": x, "y": y}

    assert first_loss(own(batch=named)) == first_loss(own())


def test_a_model_may_return_its_own_loss():
    class WithLoss(Net):
        def forward(self, x, y):
            return {"loss": F.mse_loss(super().forward(x), y)}

    assert first_loss(own(model=WithLoss, loss=None)) == first_loss(own())


def test_a_model_that_cannot_be_made_without_its_weights_is_made_in_place():
    class Values(Net):
        def __init__(self):
            super().__init__()
            self.rate = torch.linspace(0, 1, 3)[1].item()

    class Attribute(Net):
        def __init__(self):
            super().__init__()
            self.shift = torch.ones(8)  # neither a parameter nor a buffer

        def forward(self, x):
            return super().forward(x + self.shift)

    class Parameter(Net):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.full((8,), 3.0))  # only its constructor knows its value

        def forward(self, x):
            return super().forward(x + self.token)

    for kind in (Values, Attribute, Parameter):
        training = Training(own(model=kind), {"micro_batch": 4, "grad_accum": 2}, CPU)
        before = getattr(training.model, "token", torch.full((8,), 3.0)).detach().clone()
        assert torch.equal(before, torch.full((8,), 3.0))
        assert float(training.step()) == first_loss(own(model=kind), micro_batch=4, grad_accum=2)


def test_an_optimizer_of_one_s_own_is_used_and_offers_fusion_only_where_it_has_it(cpu):
    plain = own(optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    assert "fused_optimizer" not in {k.name for k in make_space(plain, cpu).knobs}
    assert isinstance(Training(plain, {}, CPU).optimizer, torch.optim.SGD)
    fused = own(optimizer=lambda params, fused: torch.optim.Adam(params, fused=fused))
    assert "fused_optimizer" in {k.name for k in make_space(fused, cpu).knobs}
    assert Training(fused, {"fused_optimizer": True}, CPU).optimizer.defaults["fused"] is True


def test_a_schedule_of_one_s_own_has_only_the_knobs_that_it_reads(cpu):
    def without_knobs(sch, config):
        sch["blocks.0"].checkpoint()

    def listening(sch, config):
        if config["checkpoint_ratio"] > 0:
            sch["blocks.0"].checkpoint()

    offered = {k.name for k in make_space(own(schedule=without_knobs), cpu).knobs}
    assert not {"checkpoint_ratio", "fusion"} & offered
    offered = {k.name for k in make_space(own(schedule=listening), cpu).knobs}
    assert "checkpoint_ratio" in offered and "fusion" not in offered


def test_a_space_of_one_s_own_is_used_as_it_is_or_as_it_is_made(cpu):
    space = Space()
    space.choice("micro_batch", [2, 4])
    assert [each["micro_batch"] for each in make_space(own(space=space), cpu)] == [2, 4]

    def make(device, devices):
        made = Space()
        made.choice("micro_batch", [devices])
        made.choice("where", [device.type])
        return made

    assert make_space(own(space=make), cpu, devices=4).default() == {"micro_batch": 4, "where": "cpu"}
    with pytest.raises(WorkloadError, match=r"space must return a redline\.Space, but returned int"):
        make_space(own(space=lambda: 3), cpu)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": 3}, "model must be callable, but got int 3"),
        (
            {"model": nn.Linear(8, 8)},
            r"model is a Linear that is built already; pass a function that builds it, .*lambda: Linear\(",
        ),
        ({"batch": lambda size: None}, r"batch must be callable as batch\(size, seed\)"),
        ({"loss": lambda output: None}, r"loss must be callable as loss\(output, batch\)"),
        (
            {"loss": F.mse_loss},
            r"mse_loss takes a target .*such as loss=lambda output, batch: mse_loss\(output, batch\[1\]\)",
        ),
        ({"loss": nn.MSELoss()}, r"MSELoss\(\) takes a target in place of the batch"),
        ({"schedule": lambda sch: None}, r"schedule must be callable as schedule\(sch, config\)"),
        ({"space": 3}, "space must be a Space or a function"),
        ({"global_batch": 0}, "global_batch must be an integer of at least 1, but got 0"),
        ({"seq_len": -1}, "seq_len must be an integer of at least 1, but got -1"),
        ({"unit": "miles/h"}, "unit must be one of tokens/s, samples/s"),
        ({"unit": "tokens/s"}, "needs seq_len"),
    ],
)
def test_a_field_that_is_not_what_it_must_be_is_refused(changed, message):
    with pytest.raises(WorkloadError, match=message):
        own(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": lambda size, seed: 3}, r"batch\(2, 0\) must be a dict or a tuple of tensors, but is int"),
        ({"batch": lambda size, seed: ()}, "empty tuple"),
        ({"batch": lambda size, seed: {"x": [1]}}, "entry 'x' must be a tensor, but is list"),
        ({"batch": lambda size, seed: ({"x": torch.ones(size)},)}, "is dict; flatten the batch into one dict"),
        ({"batch": lambda size, seed: (torch.ones(3, 8),)}, r"entry 0 must be the batch's size, 2.*\(3, 8\)"),
        ({"batch": lambda size, seed: (torch.tensor(1.0),)}, r"entry 0 must be the batch's size, 2.*\(\)"),
        ({"batch": lambda size, seed: (torch.rand(size, 8), torch.ones(size, 8))}, "differs from one call"),
        ({"batch": lambda size, seed: {f"x{next(NUMBERS)}": torch.ones(size, 8)}}, "differs from one call"),
        (
            {"batch": lambda size, seed: (torch.ones(size, 8), torch.ones(size, 8, device="meta"))},
            r"batch\(2, 0\): entry 1 must be on the CPU, but is on meta",
        ),
        ({"batch": lambda size, seed: 1 // 0}, r"batch\(2, 0\) failed: .*py:\d+: ZeroDivisionError"),
        ({"loss": lambda output, batch: output}, r"scalar tensor, the mean over the batch.*\(1, 8\)"),
        ({"loss": lambda output, batch: 1.0}, r"loss\(output, batch\) must be a scalar tensor, but is float"),
        ({"loss": None, "batch": lambda size, seed: (torch.ones(size, 8),)}, r"the model's own loss must be"),
        (
            {"model": lambda: 1 // 0},
            r"building the model failed: .*test_workload\.py:\d+: ZeroDivisionError",
        ),
        ({"model": lambda: 3}, "model must return a torch.nn.Module, but returned int 3"),
        ({"batch": lambda size, seed: {"z": torch.ones(size, 8)}}, "forward takes x, but the batch has z"),
    ],
)
def test_wrong_return_values_are_refused_before_tuning(changed, message):
    with pytest.raises(WorkloadError, match=message):
        workload(own(**changed))


def cross_entropy(reduction, pick=lambda output: output):
    def loss(output, batch):
        return F.cross_entropy(pick(output).float(), batch[1].argmax(dim=1), reduction=reduction)

    return loss


class Mapped(Net):
    def forward(self, x):
        return CausalLMOutput(logits=super().forward(x))


class Tupled(Net):
    def forward(self, x):
        return [None, (super().forward(x), 3)]


class Probable(Net):
    def forward(self, x):
        return super().forward(x).sigmoid().bfloat16()


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Net, lambda how: lambda output, batch: F.mse_loss(output, batch[1], reduction=how)),
        (Net, cross_entropy),
        (Mapped, lambda how: cross_entropy(how, lambda output: output.logits)),
        (Tupled, lambda how: cross_entropy(how, lambda output: output[1][0])),
        (
            Probable,  # it refuses values that are not probabilities
            lambda how: lambda output, batch: F.binary_cross_entropy(output.float(), batch[1].sigmoid(), reduction=how),
        ),
    ],
)
def test_a_loss_that_is_a_sum_is_refused_before_anything_is_tuned(model, loss):
    assert flops_of(workload(own(model=model, loss=loss("mean")))).per_sample
    with pytest.raises(WorkloadError, match=r"the loss at micro-batch 8 is eight times the one at 1: is it a sum\?"):
        workload(own(model=model, loss=loss("sum")))


def test_whether_a_loss_is_a_sum_is_found_out_without_running_the_model_and_at_little_memory(monkeypatch):
    ran = []

    class Watched(Net):
        def forward(self, x):
            ran.append(isinstance(x, FakeTensor))
            return super().forward(x)

    sums = own(model=Watched, loss=cross_entropy("sum"))
    monkeypatch.setattr(flops, "AFFORDABLE_BYTES", 3 * 8 * 4)
    with pytest.raises(WorkloadError, match="the loss at micro-batch 2 is twice the one at 1"):
        workload(sums)
    assert ran == [True]
    monkeypatch.setattr(flops, "AFFORDABLE_BYTES", 3 * 8 * 4 - 1)
    assert flops_of(workload(replace(sums))).per_sample  # its outputs are too large to be made up


def test_an_id_follows_what_the_functions_say():
    assert own().id == own().id
    others = [own(global_batch=4), own(model=Block), own(loss=lambda output, batch: output.sum())]
    assert len({own().id, *(each.id for each in others)}) == 4

    def scaled(factor):
        return own(loss=lambda output, batch: factor * error(output, batch))

    assert scaled(1.0).id == scaled(1.0).id != scaled(2.0).id


def test_much_data_stays_in_host_memory_and_is_cut_all_the_same(monkeypatch):
    from redline.training import training

    expected = first_loss(own(), micro_batch=2)
    monkeypatch.setattr(training, "MAX_BYTES_OF_DATA", 64)
    made = Training(own(), {"micro_batch": 2}, CPU)
    assert not made._resident and len(made.data) == 1
    assert float(made.step()) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizee": 64}, "'hidden_sizee' is not a field of a llama; did you mean 'hidden_size'"),
        ({"hidden_sise": 64}, "did you mean 'hidden_size'"),
        ({"hidden_size": 64, "vocab_sise": 100}, "did you mean 'vocab_size'"),
        ({"hidden_size": 64, "num_key_value_heads": 3}, r"must divide num_attention_heads \(4\), but got 3"),
    ],
)
def test_a_field_of_a_configuration_that_is_misspelt_or_impossible_is_refused(tmp_path, fields, message):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, **fields}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "of_our_own": 1, **sizes}))
    with pytest.raises(WorkloadError, match=message):
        workload(tmp_path / "config.json")


def test_fields_that_a_class_does_not_have_are_named(tmp_path):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "intermediate_size": 64,
    }
    more = {"num_kv_heads": 2, "rope_theta": 1e5, "auto_map": {}, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    assert workload(tmp_path / "config.json").unread == ("num_kv_heads",)
    request = TrainingRequest(tmp_path / "config.json", devices=1)
    cpu = Device(type="cpu", name="cpu", count=1, memory_mib=8000)
    assert (
        "not read, since the model's class has no such fields: num_kv_heads" in resolve_request(request, cpu, 1).notes
    )
