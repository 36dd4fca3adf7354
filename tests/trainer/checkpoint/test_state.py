"""A checkpoint contains all state that a training's future depends on, for any optimizer, adapters and buffers."""

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from redline.base.errors import WorkloadError
from redline.models.layouts.dcp import dcp_tensors
from redline.models.lora import Lora, with_lora
from redline.trainer.checkpoint.saver import CheckpointFolder
from redline.trainer.loop import Hyperparameters
from tiers import tiered
from torch.distributed.checkpoint.staging import DefaultStager
from trainings import built, part, unequal

HYPER = Hyperparameters(steps=6, lr=1e-2, warmup=2)


class Counting(torch.optim.SGD):
    """An optimizer whose state consists of Python numbers, without tensors."""

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                kept = self.state[each]
                kept["count"] = kept.get("count", 0) + 1
                kept["scale"] = kept.get("scale", 1.0) * 0.9
                kept["odd"] = kept["count"] % 2 == 1
                assert type(kept["count"]) is int and type(kept["odd"]) is bool
                with torch.no_grad():
                    each -= group["lr"] * kept["scale"] * (1 + kept["odd"]) * each.grad.sign()


class Grouped(torch.optim.SGD):
    """An optimizer that keeps numbers in its groups, as Schedule-free ones do, and 32-bit state of any weight."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(k=0, weight_sum=0.0, first=True)

    def step(self, closure=None):
        for group in self.param_groups:
            group.update(k=group["k"] + 1, weight_sum=group["weight_sum"] + 0.3, first=False)
            for each in group["params"]:
                if each.grad is None:
                    continue
                mean = self.state[each].setdefault("mean", torch.zeros_like(each, dtype=torch.float32))
                mean.lerp_(each.grad.float(), 1 / group["k"])
                with torch.no_grad():
                    each -= (group["lr"] * mean * group["weight_sum"]).to(each.dtype)


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=False),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True),
    "numbers": lambda params: Counting(params, lr=1e-3),
    "groups": lambda params: Grouped(params, lr=1e-2),
}


def with_optimizer(workload, name):
    return replace(workload, optimizer=OPTIMIZERS[name])


def goes_on_bit_for_bit(workload, config, where, hyper=HYPER, run=lambda function: function()):
    """Asserts that a resumed training ends exactly as the uninterrupted one; returns the tensors of its checkpoint."""
    whole = run(lambda: part(workload, config, hyper))
    run(lambda: part(workload, config, hyper, until=3, save=where))
    again = run(lambda: part(workload, config, hyper, begin=where))
    one = (whole, again) if isinstance(whole, type(again)) and not isinstance(whole, list) else (whole[0], again[0])
    assert one[1].found == 3 and one[1].losses == one[0].losses[3:]
    assert unequal(one[0].weights, one[1].weights) == []
    return dcp_tensors(CheckpointFolder(where).all()[0].path)


@pytest.mark.parametrize(
    "name",
    tiered(["Adam", "AdamW fused", "Adafactor", "numbers"], ["SGD", "SGD with momentum", "AdamW", "RMSprop"]),
)
def test_every_optimizer_resumes_bit_for_bit(small, tmp_path, name):
    held = goes_on_bit_for_bit(with_optimizer(small("llama"), name), {"micro_batch": 8}, tmp_path)
    keys = {each.rpartition("/")[2] for each in held if each.startswith("optimizer/")}
    assert (
        keys
        == {
            "SGD": set(),
            "SGD with momentum": {"momentum_buffer"},
            "Adam": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
            "AdamW": {"step", "exp_avg", "exp_avg_sq"},
            "AdamW fused": {"step", "exp_avg", "exp_avg_sq"},
            "Adafactor": {"step", "row_var", "col_var", "variance"},
            "RMSprop": {"step", "square_avg", "grad_avg"},
            "numbers": {"count:int", "scale:float", "odd:bool"},
        }[name]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_numbers_of_groups_and_state_wider_than_the_weights_resume_bit_for_bit(small, tmp_path, precision):
    config = {"micro_batch": 8, "precision": precision}
    held = goes_on_bit_for_bit(with_optimizer(small("llama"), "groups"), config, tmp_path)
    assert {each for each in held if each.startswith("group/")} == {
        f"group/0/{key}" for key in ("k:int", "weight_sum:float", "first:bool")
    }
    assert float(held["group/0/k:int"].read()) == 3
    assert {held[each].dtype for each in held if each.endswith("/mean")} == {torch.float32}


def test_numbers_of_groups_are_refused_where_each_stage_has_its_own(two, small, tmp_path):
    workload = with_optimizer(small("llama"), "groups")

    def refused():
        with pytest.raises(WorkloadError) as error:
            part(workload, {"pp": 2, "grad_accum": 2}, HYPER, until=2, save=tmp_path)
        return str(error.value)

    message = "Grouped keeps 'k' in its groups, of which each pipeline stage has its own; checkpoints of it need pp=1"
    assert two.run(refused) == [message] * 2


def test_a_state_that_parts_do_not_make_up_is_refused_before_anything_is_written(two, small, tmp_path):
    workload = with_optimizer(small("llama"), "Adafactor")

    def run():
        steps = []
        with pytest.raises(WorkloadError) as refused:
            part(workload, {"tp": 2}, HYPER, save=tmp_path / "here", watch=steps.append)
        (training,) = steps
        assert {float(each["step"]) for each in training.optimizer.state.values()} == {1}, "at once"
        return str(refused.value)

    for text in two.run(run, timeout=60):
        assert text.startswith("Adafactor keeps 'row_var' of model.embed_tokens.weight in a form that cannot")
        assert text.endswith("checkpoints of it need tp=1 and zero of at most 1")
    assert not list((tmp_path / "here").glob("step-*"))


def test_frozen_weights_that_the_training_began_with_are_not_saved_again(small, tmp_path):
    workload = with_lora(small("llama"), Lora(r=4))
    frozen = built(workload, {"micro_batch": 8}, HYPER).outline.frozen
    whole = part(workload, {"micro_batch": 8}, HYPER)
    part(workload, {"micro_batch": 8}, HYPER, until=3, save=tmp_path, from_weights=frozen)
    names = dcp_tensors(CheckpointFolder(tmp_path).all()[0].path)
    assert all(".lora_" in name for name in names)
    again = part(workload, {"micro_batch": 8}, HYPER, begin=tmp_path, from_weights=frozen)
    assert again.found == 3 and unequal(whole.weights, again.weights) == []
    with pytest.raises(WorkloadError, match="tensors are missing"):
        part(workload, {"micro_batch": 8}, HYPER, begin=tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(small, tmp_path):
    part(small("llama"), {"micro_batch": 8}, HYPER, until=1, save=tmp_path)
    with pytest.raises(WorkloadError) as refused:
        part(small("llama", intermediate_size=80), {"micro_batch": 8}, HYPER, begin=tmp_path)
    text = str(refused.value)
    assert text.startswith("the checkpoint is of another model than small-llama: 6 tensors have another shape:")
    assert "model.layers.0.mlp.gate_proj.weight with (64, 32) there, (80, 32) in the model" in text
    with pytest.raises(WorkloadError, match="9 tensors are missing: model.layers.2.self_attn.q_proj.weight; "):
        part(small("llama", num_hidden_layers=3), {"micro_batch": 8}, HYPER, begin=tmp_path)
    with pytest.raises(WorkloadError, match="9 tensors are not in the model: .*model.layers.1."):
        part(small("llama", num_hidden_layers=1), {"micro_batch": 8}, HYPER, begin=tmp_path)


def test_a_damaged_checkpoint_is_refused_with_its_name(small, tmp_path):
    part(small("llama"), {"micro_batch": 8}, HYPER, until=1, save=tmp_path)
    (data,) = CheckpointFolder(tmp_path).all()[0].path.glob("*.distcp")
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(WorkloadError, match="step-00000001/.* is damaged: it has [0-9]+ bytes, and had"):
        part(small("llama"), {"micro_batch": 8}, HYPER, begin=tmp_path)


def test_an_optimizer_on_the_host_is_kept_too(small, tmp_path):
    held = goes_on_bit_for_bit(small("llama"), {"micro_batch": 8, "offload": "optimizer"}, tmp_path)
    plain = tmp_path / "plain"
    part(small("llama"), {"micro_batch": 8}, HYPER, until=3, save=plain)
    assert held.keys() == dcp_tensors(CheckpointFolder(plain).all()[0].path).keys()


@pytest.mark.parametrize(
    "config",
    tiered([{"pp": 2, "grad_accum": 4}], [{"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}]),
    ids=str,
)
def test_dropout_on_two_ranks_resumes_bit_for_bit(two, small, tmp_path, config):
    workload = small("gpt2", resid_pdrop=0.3, embd_pdrop=0.3)
    goes_on_bit_for_bit(workload, config, tmp_path, run=two.run)


# -- division of the writing among ranks ---------------------------------------------------------------------


class Late(torch.optim.SGD):
    """Creates state of a parameter from the second step on, as for an expert that gets its first token then."""

    def step(self, closure=None):
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        for each in self.param_groups[0]["params"] if self.steps > 1 else ():
            self.state[each]["late"] = torch.full_like(each, self.steps)


@pytest.mark.parametrize("config", [{"dp": 2}, {"tp": 2}], ids=str)
def test_every_part_is_copied_and_written_by_one_rank_also_what_was_not_there_before(
    two, small, tmp_path, monkeypatch, config
):
    workload = replace(small("llama"), optimizer=lambda params: Late(params, lr=1e-2))

    def places():
        staged, stage = [], DefaultStager.stage
        monkeypatch.setattr(DefaultStager, "stage", lambda self, parts: staged.append([*parts]) or stage(self, parts))
        part(workload, config, HYPER, until=2, save=tmp_path, save_every=1)
        assert len(staged) == 2
        return staged

    one, other = two.run(places)
    for number, kinds in enumerate(({"model"}, {"model", "optimizer"})):
        everybody = Counter(one[number] + other[number])
        assert set(everybody.values()) == {1}
        assert {name.partition("/")[0] for name, _ in everybody} == kinds
        assert one[number] and other[number]
    held = dcp_tensors(CheckpointFolder(tmp_path).all()[0].path)
    names = [each.removeprefix("model/") for each in held if each.startswith("model/")]
    assert set(names) == set(built(workload, {"micro_batch": 8}, HYPER).outline.shapes)
    assert all(bool((held[f"optimizer/{name}/late"].read() == 2).all()) for name in names)
