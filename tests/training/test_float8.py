"""precision=fp8 and fp8_rowwise: the products computed in 8 bits, their error, and the spaces that have them."""

import importlib.util
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from numeric import caught, within
from redline.base.errors import ScheduleError, WorkloadError
from redline.knobs.meaning import FLOAT8
from redline.models.spaces import default_space, lossy_of_space, without_float8
from redline.runners.trial.numerics_check import numerics_mismatch, together, why_incomparable
from redline.schedule import build, create_schedule
from redline.schedule.comparison import FLOOR, loss_allowance, unit_roundoff
from redline.training import Training
from redline.training.probe import first_step, take
from tiers import tiered
from torch import nn

if torch.cuda.is_available() and importlib.util.find_spec("torchao") is None:
    pytest.skip("torchao is not installed on this GPU machine", allow_module_level=True)
from torchao.float8.float8_linear import Float8Linear

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CPU = torch.device("cpu")
GRADIENTS = {"fp8": torch.float8_e5m2, "fp8_rowwise": torch.float8_e4m3fn}
"""Formats that gradients are rounded to; everything else is rounded to e4m3."""
every_format = pytest.mark.parametrize("precision", FLOAT8)


@pytest.fixture
def installed(monkeypatch):
    """Returns a function that makes torchao appear installed or not. It starts as installed."""

    def there(is_there=True):
        message = "" if is_there else "torchao is not installed: pip install 'redline[fp8]'"
        monkeypatch.setattr("redline.base.device.not_installed", lambda package, extra: message)

    there()
    return there


def converted(model):
    return {name for name, each in model.named_modules() if isinstance(each, Float8Linear)}


def probed(made, precision, **knobs):
    return together([take(Training(made, {"precision": precision, **knobs}, CPU))])


# Converted layers


@every_format
def test_linear_layers_of_blocks_with_sizes_of_16_are_converted_and_no_others(small, precision):
    made = small("llama", intermediate_size=72)  # not a multiple of 16
    training = Training(made, {"micro_batch": 8, "precision": precision}, CPU)
    projections = [f"{name}_proj" for name in "qkvo"]
    assert converted(training.model) == {
        f"model.layers.{block}.self_attn.{each}" for block in range(2) for each in projections
    }
    plain = Training(made, {"micro_batch": 8}, CPU)
    assert list(training.model.state_dict()) == list(plain.model.state_dict())
    assert {each.dtype for each in training.model.parameters()} == {torch.float32}
    kind = training.model.model.layers[0].self_attn.q_proj.config
    assert kind.cast_config_grad_output.target_dtype == GRADIENTS[precision]


def test_without_torchao_it_is_refused_and_that_names_the_extra(small, monkeypatch):
    message = "torchao is not installed: pip install 'redline[fp8]'"
    monkeypatch.setattr("redline.training.precision.not_installed", lambda package, extra: message)
    with pytest.raises(WorkloadError, match=r"pip install 'redline\[fp8\]'"):
        Training(small("llama"), {"micro_batch": 8, "precision": "fp8"}, CPU)


def test_the_primitive_refuses_what_it_cannot_do():
    sch = create_schedule(nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 8), nn.Linear(16, 32)))
    for at, given, message in (
        ("0", {}, "multiples of 16"), ("2", {"scaling": "tensor"}, "did you mean 'tensorwise'"),
    ):  # fmt: skip
        with pytest.raises(ScheduleError, match=message):
            sch[at].float8(**given)
    sch["2"].float8()
    with pytest.raises(ScheduleError, match="converted already"):
        sch["2"].float8()


# Error of the products


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_product_rounds_its_factors_to_8_bits_and_no_more(seed, scaling):
    """A product with rounded factors satisfies |x'w' - xw| <= (u + v + uv) |x| |w| in each term."""
    torch.manual_seed(seed)
    # 20 rows are padded to 32 in the gradient of the weight.
    x, w, g = torch.randn(20, 64), torch.randn(48, 64), torch.randn(20, 48)
    sch = create_schedule(nn.Sequential(nn.Linear(64, 48, bias=False)))
    sch.module[0].weight.data.copy_(w)
    model, _ = build(sch.float8(scaling, emulate=True))
    given = x.clone().requires_grad_()
    output = model(given)
    output.backward(g)
    forward = unit_roundoff(torch.float8_e4m3fn)
    backward = unit_roundoff(torch.float8_e5m2 if scaling == "tensorwise" else torch.float8_e4m3fn)
    for what, found, a, b, u in (
        ("the output", output, x, w.T, forward),
        ("the input's gradient", given.grad, g, w, backward),
        ("the weight's gradient", model[0].weight.grad, g.T, x, backward),
    ):
        exact, size = a.double() @ b.double(), a.abs().double() @ b.abs().double()
        departs = float(((found.detach().double() - exact).abs() / size).max())
        # Factors are scaled to their largest value, so that subnormal ones add next to nothing.
        within(departs, u + forward + u * forward, what)
        # `caught` multiplies by MARGIN, 3: the departure exceeds the bound of factors in bfloat16.
        v = unit_roundoff(torch.bfloat16)
        caught(departs, (2 * v + v * v) / 3, f"{what} against bfloat16")


@every_format
def test_a_model_departs_from_float32_as_8_bits_do_and_not_as_bf16(small, precision):
    made = small("llama")
    expected = probed(made, "fp32", micro_batch=8)
    found, half = probed(made, precision, micro_batch=8), probed(made, "bf16", micro_batch=8)
    assert numerics_mismatch(found, expected, loss=found.quiet.loss, last_loss=found.quiet.loss) is None
    assert (found.roundoff, half.roundoff) == (2.0**-4, 2.0**-8)

    def distance(probe):
        return sum((a - b) ** 2 for a, b in zip(probe.logits, expected.logits)) ** 0.5

    # The roundoff is sixteen times as large; a part of the error is that of bf16 in both.
    assert distance(found) > 4 * distance(half)


# Combination with other knobs


@every_format
@pytest.mark.parametrize(
    "knobs",
    [{"checkpoint_ratio": 0.5}, {"grad_accum": 2, "micro_batch": 4}, {"kernels": True}, {"fusion": True}],
    ids=str,
)
def test_float8_composes_with_other_primitives(small, precision, knobs):
    knobs = {"micro_batch": 8, **knobs}
    made = small("llama", vocab_size=512)
    plain = Training(made, {"micro_batch": 8, "precision": precision}, CPU)
    other = Training(made, {**knobs, "precision": precision}, CPU)
    if other.compiled:
        for block in other.model.model.layers:
            block.compile(backend="aot_eager")
    loss, found = float(plain.step()), float(other.step())
    # Micro-batches have scales of their own, and compiled code may round at other places.
    assert found == pytest.approx(loss, rel=unit_roundoff(torch.float8_e4m3fn) / 8**0.5)
    assert converted(other.model) == converted(plain.model)


def on_ranks(made, config):
    """Returns, on each rank, the first loss, its gradient norms, the probe, and the number of converted layers."""
    training = Training(made, config, CPU, rank=dist.get_rank(), world_size=dist.get_world_size())
    loss, part = first_step(training)
    return float(loss), part, take(training), len(converted(training.model))


@pytest.mark.parametrize(
    ("precision", "knobs"),
    tiered([("fp8", {"tp": 2, "sequence_parallel": True})], [("fp8_rowwise", {"tp": 2}), ("fp8", {"pp": 2})]),
    ids=str,
)
def test_ranks_that_share_a_model_convert_what_they_hold(two, small, precision, knobs):
    made = small("llama", hidden_size=64, num_hidden_layers=2)
    layers = 7 if "pp" in knobs else 14
    reference = two.run(on_ranks, made, {"micro_batch": 2, "grad_accum": 4, **knobs})
    found = two.run(on_ranks, made, {"micro_batch": 2, "grad_accum": 4, "precision": precision, **knobs})
    assert [each[3] for each in reference] == [0, 0] and [each[3] for each in found] == [layers, layers]
    expected = together([each[2] for each in reference], [each[1] for each in reference])
    probe = together([each[2] for each in found], [each[1] for each in found])
    assert not why_incomparable(probe, expected)
    assert numerics_mismatch(probe, expected, loss=found[0][0], last_loss=found[0][0]) is None
    assert probe.quiet.gradient != expected.quiet.gradient


@pytest.mark.parametrize(("precision", "zero"), [("fp8", 1), ("fp8_rowwise", 2), ("fp8", 3)])
def test_replicas_round_their_micro_batches_as_one_process_does(two, small, precision, zero):
    """Weights that are gathered as bf16 are rounded twice."""
    made = small("llama")
    one = Training(made, {"micro_batch": 4, "grad_accum": 2, "precision": precision}, CPU)
    loss, alone = first_step(one)
    found = two.run(on_ranks, made, {"micro_batch": 4, "grad_accum": 1, "precision": precision, "zero": zero})
    assert [each[3] for each in found] == [len(converted(one.model))] * 2
    rounding = unit_roundoff(torch.bfloat16 if zero > 1 else torch.float32)
    probe = together([each[2] for each in found], [each[1] for each in found])
    expected = together([take(one)], [alone])
    within(abs(found[0][0] - float(loss)) / float(loss), loss_allowance(8 * rounding, 8 * 16), "the loss")
    allowed = max(16 * rounding, FLOOR)
    within(abs(probe.step.gradient / expected.step.gradient - 1), allowed, "the gradient's norm")


# Spaces that offer it


def test_a_device_that_multiplies_8_bits_has_it_among_what_is_lossy(small, cuda, installed):
    made = small("llama")
    space = default_space(made, cuda((9, 0)), allow=("lossy",))
    assert space["precision"].values == ("tf32", "bf16", "bf16_pure", "fp8", "fp8_rowwise")
    assert lossy_of_space(space) == {"precision": ["bf16_pure", "fp8", "fp8_rowwise"]}
    asked = default_space(made, cuda((8, 9)))
    assert asked["precision"].values == ("tf32", "bf16") and without_float8(made, cuda((8, 9))) is None
    asked.fix("precision", "fp8")


@pytest.mark.gpu
@every_format
def test_a_gpu_computes_what_is_emulated(small, precision):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no CUDA device of compute capability 8.9")
    made = small("llama")
    emulated = Training(made, {"micro_batch": 8, "precision": precision}, CPU)
    weights = {name: each.clone() for name, each in emulated.model.state_dict().items()}
    expected = together([take(emulated)])
    for knobs in ({}, {"fusion": True}, {"grad_accum": 8, "micro_batch": 1}):
        training = Training(made, {"micro_batch": 8, "precision": precision, **knobs}, torch.device("cuda"))
        # The generators of devices differ, and so would the weights.
        training.model.load_state_dict(weights)
        found = together([take(training)])
        loss = float(training.step())
        assert converted(training.model)
        assert numerics_mismatch(found, expected, loss=loss, last_loss=loss) is None
