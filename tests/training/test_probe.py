"""The probe of a candidate gives the same values for every way to spread it, and has no side effects."""

import random
import re
import sys
from dataclasses import replace

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from redline.models import Workload
from redline.runners.trial.numerics_check import numerics_mismatch, together
from redline.training import Training
from redline.training.probe import first_step, take
from tiers import tiered
from torch import nn
from torch.nn import functional as F

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CPU = torch.device("cpu")


def probed(workload, step=False, device=CPU, **knobs):
    """Returns the probe of one process."""
    training = Training(workload, knobs, device)
    return together([take(training)], [first_step(training)[1]] if step else [])


def verdict(probe, expected):
    return numerics_mismatch(probe, expected, loss=1.0, last_loss=1.0)


# No side effects


class Restless(nn.Module):
    """Draws from every random stream and counts its calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        if self.training:
            x = x * (1 + 0.1 * random.random()) + 0.1 * np.random.rand()
        return self.last(self.drop(self.first(x)))


def pairs(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def cross_entropy(output, batch):
    return F.cross_entropy(output, batch[1])


restless = Workload(name="restless", model=Restless, batch=pairs, loss=cross_entropy, global_batch=16)


def state(training):
    return {
        "weights": {name: each.clone() for name, each in training.model.state_dict().items()},
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "optimizer": training.optimizer.state_dict()["state"],
        "modes": [each.training for each in training.model.modules()],
        "gradients": [each.grad for each in training.model.parameters()],
    }


def not_summed_over_groups(workload, knobs):
    from torch.distributed.fsdp import FSDPModule

    set_to = FSDPModule.set_requires_all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "set_requires_all_reduce", lambda self, last: set_to(self, False))
        return part_of(workload, knobs)


def without_later_gradients(workload, knobs):
    with pytest.MonkeyPatch.context() as patch:
        # Torch sees no weights in the module of a stage, as none are registered with it.
        patch.setattr("redline.schedule.parallel.pipeline.Stage.parameters", lambda self, recurse=True: iter(()))
        return part_of(workload, knobs)


def test_the_probe_leaves_weights_buffers_streams_and_optimizer_unchanged():
    training = Training(restless, {"micro_batch": 4}, CPU)
    before = state(training)
    part = take(training)
    after = state(training)
    assert part.changed > 0  # it ran in training mode, with random draws
    for name, value in before.pop("weights").items():
        assert torch.equal(after["weights"][name], value), name
    assert torch.equal(before["random"][0], after["random"][0])
    assert before["random"][1:] == after["random"][1:]
    assert after["optimizer"] == {} and after["modes"] == before["modes"] and all(after["modes"])
    assert set(after["gradients"]) == {None}


@pytest.mark.parametrize("knobs", [{}, {"checkpoint_ratio": 1.0, "attention": "eager"}], ids=str)
def test_steps_are_what_they_are_without_it(small, knobs):
    def losses(probe):
        training = Training(small(resid_pdrop=0.1, attn_pdrop=0.1), {"micro_batch": 4, **knobs}, CPU)
        if probe:
            take(training)
            return [float(first_step(training)[0]), float(training.step())]
        return [float(training.step()), float(training.step())]

    assert losses(True) == losses(False)


# The same numbers for every way to spread


def part_of(workload, knobs):
    training = Training(workload, knobs, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    return take(training), first_step(training)[1]


def spread(pool, workload, **knobs):
    found = pool.run(part_of, workload, knobs, timeout=200)
    return together([part for part, _ in found], [step for _, step in found])


@pytest.fixture(scope="module")
def gpt2_on_two(two):
    import numerics_table as numerics

    workload = numerics.tiny("gpt2")
    return workload, spread(two, workload, dp=2, micro_batch=4)


@pytest.mark.parametrize(
    "knobs",
    tiered(
        [
            {"dp": 2, "zero": 1, "micro_batch": 2},
            {"dp": 2, "zero": 3, "micro_batch": 4, "checkpoint_ratio": 0.5},
            {"tp": 2, "sequence_parallel": True, "micro_batch": 2, "checkpoint_ratio": 1.0},
            {"sp": 2, "zero": 2, "micro_batch": 4, "kernels": True},
            {"cp": 2, "zero": 2, "micro_batch": 4, "kernels": True},
            {"cp": 2, "micro_batch": 2, "attention": "eager", "checkpoint_ratio": 1.0},
            {"pp": 2, "micro_batch": 1, "pipeline_schedule": "1f1b", "attention": "eager"},
        ],
        [
            {"dp": 2, "zero": 0, "micro_batch": 1},
            {"dp": 2, "zero": 2, "micro_batch": 2},
            {"tp": 2, "micro_batch": 8},
            {"pp": 2, "micro_batch": 2, "pipeline_schedule": "gpipe"},
        ],
    ),
    ids=str,
)
def test_ranks_together_compute_what_the_reference_computes(two, gpt2_on_two, knobs):
    workload, expected = gpt2_on_two
    found = spread(two, workload, **knobs)
    assert verdict(found, expected) is None
    # Closer than the tolerance: only the order of float32 sums differs.
    assert found.quiet.blocks == pytest.approx(expected.quiet.blocks, rel=1e-5)
    assert found.quiet.vectors == pytest.approx(expected.quiet.vectors, rel=1e-5)
    assert found.quiet.gradient == pytest.approx(expected.quiet.gradient, rel=1e-5)
    assert found.logits == pytest.approx(expected.logits, rel=1e-4, abs=1e-5)
    assert found.step.blocks == pytest.approx(expected.step.blocks, rel=1e-5)
    assert len(found.logits) == 16 and len(found.quiet.blocks) == 2 and found.still == ()


@pytest.mark.parametrize("zero", [2, 3])
def test_norms_count_shared_pieces_once(four, seed, zero):
    import numerics_table as numerics

    workload = numerics.tiny("gpt2")
    expected = spread(four, workload, dp=4, micro_batch=2)
    found = spread(four, workload, dp=4, hsdp=2, zero=zero, micro_batch=1)
    assert verdict(found, expected) is None
    assert found.quiet.blocks == pytest.approx(expected.quiet.blocks, rel=1e-5)
    assert found.quiet.vectors == pytest.approx(expected.quiet.vectors, rel=1e-5)
    assert found.step.gradient == pytest.approx(expected.step.gradient, rel=1e-5)
    assert found.logits == pytest.approx(expected.logits, rel=1e-4, abs=1e-5) and found.still == ()


@pytest.fixture(scope="module")
def deeper_gpt2_on_two(two):
    import numerics_table as numerics

    workload = numerics.tiny("gpt2", "pp2 zbv")
    return workload, spread(two, workload, dp=2, micro_batch=4)


@pytest.mark.parametrize("kind", tiered(["zbv"], ["interleaved", "zero_bubble"]))
def test_ranks_of_several_stages_compute_what_the_reference_computes(two, deeper_gpt2_on_two, kind):
    workload, expected = deeper_gpt2_on_two
    found = spread(two, workload, pp=2, virtual_stages=2, micro_batch=2, pipeline_schedule=kind)
    assert verdict(found, expected) is None
    assert found.quiet.blocks == pytest.approx(expected.quiet.blocks, rel=1e-5)
    assert found.quiet.vectors == pytest.approx(expected.quiet.vectors, rel=1e-5)
    assert found.logits == pytest.approx(expected.logits, rel=1e-4, abs=1e-5)
    assert found.step.blocks == pytest.approx(expected.step.blocks, rel=1e-5)


def test_norms_are_those_of_the_gradients(small):
    training = Training(small(), {"micro_batch": 8}, CPU)
    part = together([take(training)], [first_step(training)[1]])
    same = Training(small(), {"micro_batch": 8}, CPU)
    loss = same.passes()
    assert part.step.loss == float(loss)
    for number, block in enumerate(same.model.transformer.h):
        gradients = [each.grad for each in block.parameters()]
        norm = torch.cat([each.flatten() for each in gradients]).double().norm()
        assert part.step.blocks[number] == pytest.approx(float(norm), rel=1e-6)
        vectors = torch.cat([each for each in gradients if each.dim() == 1]).double().norm()
        assert part.step.vectors[number] == pytest.approx(float(vectors), rel=1e-6)
    whole = torch.cat([each.grad.flatten() for each in same.model.parameters()]).double().norm()
    assert part.step.gradient == pytest.approx(float(whole), rel=1e-6)
    last = same.model.transformer.ln_f
    outside = torch.cat([last.weight.grad, last.bias.grad]).double().norm()
    assert part.step.vectors[-1] == pytest.approx(float(outside), rel=1e-6)


# Users' own models


def spans(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, 6, 8, generator=generator),
        "y": torch.randint(0, 4, (size, 6), generator=generator),
    }


class Masked(nn.Module):
    """Attention under a boolean mask that is a buffer."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 4)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).bool())

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask))


def token_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten())


masked = Workload(name="masked", model=Masked, batch=spans, loss=token_loss, global_batch=16)


def test_a_boolean_buffer_that_is_empty_is_seen_without_repeated_blocks():
    expected = probed(masked, micro_batch=4)
    assert expected.quiet.blocks == () and len(expected.quiet.vectors) == 1
    assert verdict(probed(masked, micro_batch=16), expected) is None

    def emptied(sch, config):
        def empty(module, args):
            assert module.mask.dtype == torch.bool
            module.mask.zero_().fill_diagonal_(True)  # with no entry at all the result would be nan

        sch.module.register_forward_pre_hook(empty)

    assert "logits depart" in verdict(probed(replace(masked, schedule=emptied), micro_batch=4), expected)


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        (lambda logits, x: logits, True),
        (lambda logits, x: (logits, x), True),
        (lambda logits, x: {"hidden": x, "logits": logits}, True),
        (lambda logits, x: logits.flatten(0, 1), False),  # samples cannot be told apart
        (lambda logits, x: logits.transpose(0, 1), False),
    ],
    ids=["tensor", "tuple", "by name", "samples and positions in one", "positions first"],
)
def test_logits_are_seen_where_samples_come_first(output, seen):
    class Net(Masked):
        def forward(self, x):
            return output(super().forward(x), x)

    def loss(found, batch):
        found = found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found
        target = batch["y"]
        if found.dim() == 3 and found.shape[0] != len(target):
            found = found.transpose(0, 1)
        return F.cross_entropy(found.reshape(-1, 4), target.flatten())

    workload = replace(masked, model=Net, loss=loss)
    expected = probed(workload, micro_batch=8)
    assert bool(expected.logits) is seen
    assert verdict(probed(workload, micro_batch=2), expected) is None


def test_statistics_over_the_batch_do_not_make_a_micro_batch_wrong():
    class Normed(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    workload = replace(restless, model=Normed)
    expected = probed(workload, step=True, micro_batch=8)
    for micro in (2, 4, 16):
        assert verdict(probed(workload, step=True, micro_batch=micro), expected) is None
    scaled = replace(workload, loss=lambda output, batch: 2 * cross_entropy(output, batch))
    assert "the loss on the probe" in verdict(probed(scaled, micro_batch=8), expected)


# Parameters that begin as zero or one


def test_a_bias_of_zeros_that_is_added_twice_is_seen(small):
    expected = probed(small(), micro_batch=4)

    def twice(sch, config):
        layer = sch["transformer.h.0.mlp.c_proj"].module
        layer.register_forward_hook(lambda module, args, output: output + module.bias)

    found = probed(replace(small(), schedule=twice), micro_batch=4)
    assert "the logits depart" in verdict(found, expected)


# Settings of modules, and gradients of single parameters


def faulty(workload, change):
    """Returns the workload with a change of its modules."""
    return replace(workload, schedule=lambda sch, config: change(sch.module))


def set_rates(model, rate):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate(module.p)


class Slightly(torch.autograd.Function):
    """Returns its input; the gradient is 1.001 times as large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001


def scale_gradient(model):
    layer = model.transformer.h[1].mlp.c_proj
    layer.register_forward_hook(lambda module, args, output: Slightly.apply(output))


def steeper(layer, name):
    """Has one parameter's gradient be 1.001 times as large."""

    def begin(module, args):
        handle.remove()
        getattr(module, name).register_hook(lambda gradient: gradient * 1.001)

    handle = layer.register_forward_pre_hook(begin)


def keep_inactive(dropout):
    dropout.training = False
    dropout.train = lambda mode=True: dropout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: set_rates(model, lambda p: 0.0), r"rate of dropout .* is 0, the reference's 0.1"),
        (lambda model: set_rates(model, lambda p: 2 * p), r"rate of dropout .* is 0.2, the reference's 0.1"),
        (lambda model: setattr(model.transformer.h[2].mlp.dropout, "p", 0.0), r"transformer.h.\*.mlp.dropout.p is 0 and 0.1"),
        (lambda model: keep_inactive(model.transformer.drop),
         r"rate of dropout transformer.drop.p is 0, the"),
        (lambda model: model.transformer.h[1].mlp.c_fc.bias.requires_grad_(False),
         r"transformer.h.\*.mlp.c_fc.bias is frozen, and trained in the reference"),
        (lambda model: steeper(model.transformer.h[1].mlp.c_fc, 'weight'), r"gradient of transformer.h.1.mlp.c_fc.weight on"),
        (lambda model: steeper(model.transformer.h[3].attn.c_attn, 'bias'), r"gradient of transformer.h.3.attn.c_attn.bias on"),
        (scale_gradient, r"the norm of the gradient"),
    ],
    ids=["off", "doubled", "one off", "inactive", "frozen bias", "weight", "bias", "output"],
)  # fmt: skip
def test_small_faults_are_found_with_few_tokens(small, change, message):
    workload = small(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    expected = probed(workload, micro_batch=4)
    assert verdict(probed(faulty(workload, lambda model: None), micro_batch=2), expected) is None
    found = verdict(probed(faulty(workload, change), micro_batch=4), expected)
    assert re.search(message, found), found


# Weights that a schedule adds


def test_weights_that_a_schedule_brings_in_are_named(small):
    class Other(nn.Module):
        def __init__(self, old):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(old.normalized_shape))
            self.shift = nn.Parameter(torch.zeros(old.normalized_shape))

        def reset_parameters(self):
            with torch.no_grad():
                self.scale.fill_(1.0), self.shift.zero_()

        def forward(self, x):
            return F.layer_norm(x, self.scale.shape, self.scale, self.shift)

    def schedule(sch, config):
        sch["transformer.ln_f"].replace(Other)

    with pytest.warns(UserWarning):
        found = probed(replace(small(), schedule=schedule), micro_batch=4)
    assert found.brought == ("transformer.ln_f.scale", "transformer.ln_f.shift")
    whole = small().build_model({})
    assert found.weights == sum(each.numel() for each in whole.parameters()), "those of the model as it is constructed"


# The first step


def test_in_a_narrow_format_a_block_counts_as_moved_where_any_of_it_is(small):
    # Norms begin as 1, and an update of 1e-4 is lost in bfloat16.
    assert probed(small(), step=True, precision="bf16_pure", micro_batch=8).still == ()
    held = replace(small(), optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    assert len(probed(held, step=True, precision="bf16_pure", micro_batch=8).still) > 10


def test_gradients_that_groups_of_replicas_do_not_sum_are_seen(four):
    import numerics_table as numerics

    workload = numerics.tiny("gpt2")
    expected = spread(four, workload, dp=4, micro_batch=2)
    parts = four.run(not_summed_over_groups, workload, {"dp": 4, "hsdp": 2, "zero": 3, "micro_batch": 2})
    assert "gradient" in verdict(together([part for part, _ in parts], [step for _, step in parts]), expected)


def test_gradients_that_a_divided_backward_leaves_out_are_seen(two, deeper_gpt2_on_two):
    workload, expected = deeper_gpt2_on_two
    knobs = {"pp": 2, "virtual_stages": 2, "micro_batch": 2, "pipeline_schedule": "zero_bubble"}
    parts = two.run(without_later_gradients, workload, knobs, timeout=200)
    found = together([part for part, _ in parts], [step for _, step in parts])
    assert "gradient" in verdict(found, expected)


def test_a_model_that_returns_its_loss_alone_is_held_to_that_and_its_gradients():
    class Own(Masked):
        def forward(self, x, y):
            return F.cross_entropy(super().forward(x).flatten(0, 1), y.flatten())

    workload = replace(masked, model=Own, loss=None)
    expected = probed(workload, micro_batch=8)
    assert expected.logits == () and expected.noise == 0
    assert verdict(probed(workload, micro_batch=2), expected) is None
    halved = replace(workload, loss=lambda output, batch: output / 2)
    assert "the loss on the probe" in verdict(probed(halved, micro_batch=8), expected)


def test_rows_that_experts_drop_in_training_are_no_departure_and_are_counted():
    import numerics_table as numerics
    from redline.schedule.parallel.experts import dropped_rows

    mixture = numerics.tiny("mixtral")
    expected = probed(mixture, step=True, micro_batch=4)
    training = Training(mixture, {"capacity_factor": 0.5, "micro_batch": 2}, CPU)
    found = take(training)
    assert found.by_batch and dropped_rows(training.model) == (0, 0), "the probe drops nothing"
    _, first = first_step(training)
    assert verdict(together([found], [first]), expected) is None
    dropped, routed = dropped_rows(training.model)
    assert routed == training.samples_per_step * mixture.seq_len * 2 * 2 and routed / 2 <= dropped < routed
