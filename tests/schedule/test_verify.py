"""verify."""

import copy
import re

import numeric
import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule, verify
from torch import nn


class Detached(nn.Linear):
    """Has a correct output with a wrong gradient."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach(), self.bias)


def detached(old):
    return Detached(old.in_features, old.out_features)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_a_right_schedule_passes(make_transformer, tokens, seed, name):
    sch = create_schedule(make_transformer(name, dropout=0.1))
    path = {"gpt2": "transformer.h", "bert": "bert.encoder.layer", "llama": "model.layers"}[name]
    with verify(sch, {"input_ids": tokens, "labels": tokens}, seed=seed) as same:
        assert same is sch
        sch[f"{path}.0"].checkpoint()
        sch[f"{path}.1"].compile(backend="eager")
    assert not sch.tree.built


def test_a_wrong_output_names_the_first_module_that_departs(make_transformer, tokens):
    class Scaled(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * 1.01

    sch = create_schedule(make_transformer("gpt2"))
    with (
        pytest.raises(
            ScheduleError,
            match=r"first module whose output departs is 'transformer.h.1.ln_2' \(Scaled\).* by 0.01",
        ),
        verify(sch, {"input_ids": tokens, "labels": tokens}),
    ):
        sch["transformer.h.1.ln_2"].replace(lambda old: Scaled(32))


def test_a_wrong_gradient_behind_a_right_output_is_found(mlp):
    sch = create_schedule(mlp)
    with (
        pytest.raises(ScheduleError, match=r"the gradient of fc1.weight is missing"),
        verify(sch, torch.randn(3, 8)),
    ):
        sch["fc1"].replace(detached)


def a_little(tensor, share=1e-3):
    """A copy of the tensor with its largest element increased by a thousandth."""
    wrong = torch.zeros_like(tensor).flatten()
    wrong[tensor.abs().argmax()] = share * tensor.abs().max()
    return tensor + wrong.view_as(tensor)


def scaled_gradient(sch):
    sch["fc2"].hook("bwd_post", lambda m, gin, gout: (gin[0] * 1.001,))


def one_element_of_an_output(sch):
    sch["fc2"].hook("fwd_post", lambda m, args, out: a_little(out))


def one_element_of_a_gradient(sch):
    sch["fc2"].hook("bwd_pre", lambda m, gout: (a_little(gout[0]),))


@pytest.mark.parametrize("fault", [scaled_gradient, one_element_of_an_output, one_element_of_a_gradient])
def test_a_fault_of_a_thousandth_is_found(mlp, seed, fault):
    sch = create_schedule(mlp)
    with pytest.raises(ScheduleError) as raised, verify(sch, torch.randn(3, 8)):
        fault(sch)
    departs, allowed = re.search(r"departs by (\S+) \(allowed: (\S+) of", str(raised.value)).groups()
    numeric.caught(float(departs), float(allowed), fault.__name__)


def test_a_model_that_is_wrong_in_evaluation_only_is_found(mlp):
    class Lazy(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.training else x.new_zeros(len(x), self.out_features)

    sch = create_schedule(mlp)
    with (
        pytest.raises(ScheduleError, match=r"evaluation mode: output 0 .*'fc1' \(Lazy\)"),
        verify(sch, torch.randn(3, 8)),
    ):
        sch["fc1"].replace(lambda old: Lazy(8, 16))


def test_an_error_in_the_body_skips_the_check_and_leaves_nothing(mlp):
    calls = []
    mlp.register_forward_hook(lambda *a: calls.append(1))
    before, state = copy.deepcopy(mlp.state_dict()), torch.get_rng_state()
    sch = create_schedule(mlp)
    with pytest.raises(ZeroDivisionError), verify(sch, torch.randn(3, 8, generator=torch.Generator())):
        raise ZeroDivisionError
    assert not calls
    with verify(sch, torch.randn(3, 8, generator=torch.Generator())):
        sch["fc1"].checkpoint()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in mlp.state_dict().items())
    assert all(p.grad is None for p in mlp.parameters())
    assert mlp.training and not sch.tree.built and "forward" not in mlp.fc1.__dict__
    assert len(mlp._forward_hooks) == 1 and not mlp.fc1._forward_hooks


def test_a_loss_of_ones_own_and_the_tolerance_are_used(mlp, seed):
    target = torch.randn(3, 8)
    sch = create_schedule(mlp)
    with verify(sch, torch.randn(3, 8), loss=lambda out: (out - target).pow(2).mean()):
        sch["fc1"].checkpoint()
    with verify(sch, {"x": torch.randn(3, 8)}, loss=lambda out, batch: (out - batch["x"]).pow(2).mean()):
        sch["fc2"].cast(torch.bfloat16)
    sch = create_schedule(mlp)
    with pytest.raises(ScheduleError, match="allowed: 1e-06"), verify(sch, torch.randn(3, 8), tolerance=1e-6):
        sch["fc2"].cast(torch.bfloat16)


def test_verify_comes_before_build(mlp):
    sch = create_schedule(mlp)
    build(sch)
    with pytest.raises(ScheduleError, match="a schedule before build"), verify(sch, torch.ones(1, 8)):
        raise AssertionError("the body does not run")
