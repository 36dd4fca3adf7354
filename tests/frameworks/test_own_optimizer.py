"""The optimizer of a user's workload in exports: written with its settings, or named in the first line."""

import json

import pytest
import torch
import yaml
from redline.frameworks.export import render
from redline.models import Workload
from redline.results import Measurement, Trial
from redline.results.schema import REQUEST, clean
from redline.tuner.request.record import optimizer_settings


def made(optimizer):
    return Workload(
        model=lambda: torch.nn.Linear(2, 2), batch=lambda size, seed: (torch.zeros(size, 2),),
        loss=lambda output, batch: output.mean(), optimizer=optimizer,
    )  # fmt: skip


def in_groups(params):
    params = list(params)
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}]
    return torch.optim.SGD([*groups, {"params": [p for p in params if p.dim() < 2]}], lr=0.1)


class Own(torch.optim.SGD):
    pass


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def exported(target, optimizer):
    asked = {
        "model": "mlp",
        "workload": {"id": "0", "spec": "/x/train.py:mlp", "optimizer": optimizer_settings(made(optimizer))},
        "devices": {"type": "cuda", "count": 1, "used": 1},
        "global_batch": 8,
    }
    document, faults = clean({"asked": asked}, REQUEST, "run.yaml")
    assert not faults, "a run's file keeps what was recorded"
    measurement = Measurement(status="ok", throughput=1.0, unit="samples/s", devices=1)
    trial = Trial(
        number=0,
        config={"micro_batch": 8, "grad_accum": 1, "fused_optimizer": True},
        sampler="user",
        measurement=measurement,
    )
    return render(target, trial, document)


def test_the_settings_are_those_that_differ_from_the_class():
    assert optimizer_settings(made(None)) is None
    sgd = optimizer_settings(made(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)))
    assert sgd == {"class": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
    adamw = optimizer_settings(
        made(lambda params, fused: torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), fused=fused))
    )
    assert adamw == {"class": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.9, 0.95]}
    assert optimizer_settings(made(lambda params: params.unknown)) == {"class": ""}
    assert optimizer_settings(made(in_groups)) == {"class": "torch.optim.SGD", "lr": 0.1, "groups": 2}


def test_the_trainer_gets_what_its_arguments_can_state():
    plain = exported("trainer", lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01))
    settings = yaml.safe_load(plain.text)
    assert (settings["optim"], settings["learning_rate"], settings["weight_decay"]) == ("sgd", 0.1, 0.01)
    assert settings["lr_scheduler_type"] == "constant"
    adamw = yaml.safe_load(exported("trainer", lambda params: torch.optim.AdamW(params, lr=1e-3)).text)
    assert (adamw["optim"], adamw["learning_rate"], adamw["weight_decay"]) == ("adamw_torch_fused", 1e-3, 0.01)


def test_an_optimizer_that_it_cannot_state_is_named_in_the_first_line():
    export = exported("trainer", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    assert export.text.startswith("# This file does not carry the optimizer, SGD(lr=0.1, momentum=0.9)")
    assert "optim" not in yaml.safe_load(export.text)
    assert any("SGD(lr=0.1, momentum=0.9)" in note for note in export.notes)


def test_deepspeed_and_lightning_make_any_optimizer_of_torch():
    optimizer = json.loads(exported("deepspeed", sgd).text)["optimizer"]
    assert optimizer == {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    optimizer = yaml.safe_load(exported("lightning", sgd).text)["optimizer"]
    assert optimizer == {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (in_groups, "with 2 groups of parameters"),
        (lambda params: Own(params, lr=0.1), "Own("),
        (lambda params: params.unknown, "the workload's own"),
    ],
)
@pytest.mark.parametrize("target", ["trainer", "deepspeed", "lightning"])
def test_no_file_states_another_optimizer(target, optimizer, name):
    text = exported(target, optimizer).text
    first = "".join(text.splitlines()[:3])
    assert "This file does not carry the optimizer" in first and name in first
    settings = yaml.safe_load(text)
    assert "optim" not in settings and "optimizer" not in settings and "learning_rate" not in settings


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_a_trainer_without_the_optimizer_names_it_in_the_first_line(target):
    lines = exported(target, sgd).text.splitlines()
    assert any("This file does not carry the optimizer, SGD(lr=0.1, momentum=0.9)" in line for line in lines[:2])


def test_the_script_keeps_the_rates_of_the_optimizer():
    text = exported("python", sgd).text
    assert 'args.lr or group["lr"]' in text and "0.0001" not in text


@pytest.mark.parametrize("target", ["accelerate"])
def test_a_target_without_an_optimizer_states_it(target):
    export = exported(target, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    assert any("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)" in note for note in export.notes)
