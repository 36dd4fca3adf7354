"""Effects of a configuration: each knob does what it should, while numbers and work per step stay the same."""

from itertools import pairwise

import numeric
import pytest
import torch
from redline.base.errors import WorkloadError
from redline.models import flops_of
from redline.schedule.comparison import allowance, loss_allowance
from redline.training import Training, gradients
from redline.training.precision import Precision
from tiers import diagonal
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


def losses(workload, steps=3, seed=0, **knobs):
    knobs = {"micro_batch": 4, "grad_accum": workload.global_batch // knobs.get("micro_batch", 4), **knobs}
    training = Training(workload, knobs, CPU, seed=seed)
    return [float(training.step()) for _ in range(steps)]


class Operators(TorchDispatchMode):
    """Records names and result formats of the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append((func._opname, getattr(out, "dtype", None)))
        return out

    def names(self):
        return {name for name, _ in self.seen}

    def dtypes(self, *names):
        return {dtype for name, dtype in self.seen if name in names}


def operators(workload, **knobs):
    training = Training(workload, {"micro_batch": 4, "grad_accum": 2, **knobs}, CPU)
    with Operators() as mode:
        training.step()
    return mode, training


@pytest.mark.parametrize(
    ("family", "knobs"),
    diagonal(
        ["gpt2", "bert", "llama"],
        [
            {"micro_batch": 1},
            {"micro_batch": 8},
            {"checkpoint_ratio": 0.5},
            {"checkpoint_ratio": 1.0},
            {"attention": "eager"},
            {"fused_optimizer": False},
            {"micro_batch": 2, "checkpoint_ratio": 1.0, "attention": "eager", "fused_optimizer": False},
        ],
    ),
    ids=str,
)
def test_results_do_not_depend_on_how_a_step_is_run(small, seed, family, knobs):
    numeric.hold(numeric.departure(small(family), {"micro_batch": 4, "attention": "sdpa", **knobs}, seed))


COMPILED = [
    ("llama", 0.0),
    *(pytest.param(name, ratio, marks=pytest.mark.exhaustive) for name in ("gpt2", "bert") for ratio in (0.0, 0.5)),
]


@pytest.mark.parametrize(("family", "ratio"), COMPILED)
def test_a_compiled_model_computes_the_same(small, seed, family, ratio):
    knobs = {"micro_batch": 4, "fusion": True, "checkpoint_ratio": ratio}
    numeric.hold(numeric.departure(small(family), knobs, seed))


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_lower_precisions_depart_by_their_rounding_and_no_more(small, seed, precision):
    found = numeric.departure(small(), {"micro_batch": 4, "precision": precision}, seed)
    numeric.hold(found)
    assert found.largest_of("gradients").by > allowance(small().build_model(), 8 * 16)


def test_samples_from_elsewhere_take_the_place_of_the_workloads_own(small):
    seen = []
    made = small()
    own = Training(made, {"micro_batch": 2}, CPU)

    def samples(start, count):
        seen.append((start, count))
        assert (start % 8, count) == (0, 8)
        return made.batch(count, own.seed_of(start // 8))

    given = Training(made, {"micro_batch": 2}, CPU, own_data=False)
    got = []
    for step in range(3):
        got.append(float(given.passes(given.micro_batches(given.share(samples, 8 * step)))))
        given.update()
    assert seen == [(0, 8), (8, 8), (16, 8)]
    assert got == [float(own.step()) for _ in range(3)]


def test_micro_batches_count_by_their_factors_in_loss_and_gradients(small):
    made = small()
    factors = torch.tensor([2.0, 1.0, 0.5, 0.5])
    batch = made.batch(8, 0)
    parts = [{key: each[2 * at : 2 * at + 2] for key, each in batch.items()} for at in range(4)]
    whole = Training(made, {"micro_batch": 2}, CPU, own_data=False)
    loss = whole.passes(parts, factors=factors)
    expected = Training(made, {"micro_batch": 2}, CPU, own_data=False)
    total = sum(factor * expected.model(**part).loss for factor, part in zip(factors, parts)) / 4
    total.backward()
    assert float(loss) == pytest.approx(float(total), rel=1e-6)
    for one, other in zip(whole.model.parameters(), expected.model.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-8)


def test_without_gradients_passes_only_evaluate(small):
    made = small()
    training = Training(made, {"micro_batch": 4}, CPU, own_data=False)
    batch = made.batch(8, 0)
    with torch.no_grad():
        loss = training.passes(training.micro_batches(batch))
    assert all(each.grad is None for each in training.model.parameters())
    assert float(loss) == float(training.passes(training.micro_batches(batch)))


def test_the_optimizer_step_covers_the_global_batch_in_micro_batches(small):
    training = Training(small(global_batch=8, seq_len=16), {"micro_batch": 2, "grad_accum": 4}, CPU)
    sizes = []
    training.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    training.step()
    assert sizes == [(2, 16)] * 4
    assert (training.samples_per_step, training.tokens_per_step) == (8, 128)
    assert training.flops_per_step() == 8 * flops_of(training.workload).per_sample


def saved_bytes(workload, **knobs):
    training = Training(workload, {"micro_batch": 8, "grad_accum": 1, **knobs}, CPU)
    weights = {each.data_ptr() for each in training.model.parameters()}
    total = 0

    def pack(tensor):
        nonlocal total
        if tensor.data_ptr() not in weights:
            total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        training._passes.loss_of(training.data[0][0])
    return total


def test_checkpointing_keeps_fewer_activations_the_more_blocks_are_checkpointed(small):
    workload = small(n_layer=4)
    kept = [saved_bytes(workload, checkpoint_ratio=ratio) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 5
    # Blocks are alike, so each saves the same.
    saved = [more - less for more, less in pairwise(kept)]
    assert max(saved) - min(saved) <= 0.02 * max(saved)
    assert kept[-1] < 0.6 * kept[0]


def test_the_fused_optimizer_is_one_kernel_and_the_plain_one_is_not(small):
    fused, training = operators(small())
    assert "_fused_adamw_" in fused.names()
    assert isinstance(training.optimizer, torch.optim.AdamW)
    plain, _ = operators(small(), fused_optimizer=False)
    assert "_fused_adamw_" not in plain.names() and "addcdiv_" in plain.names()


def test_attention_runs_the_kernel_that_was_asked_for(small):
    sdpa, _ = operators(small(), attention="sdpa")
    eager, _ = operators(small(), attention="eager")
    assert any("scaled_dot_product" in name for name in sdpa.names())
    assert not any("scaled_dot_product" in name for name in eager.names()) and "_softmax" in eager.names()


def test_autocast_computes_in_bf16_with_weights_in_fp32(small):
    fp32, _ = operators(small("llama"))
    assert fp32.dtypes("mm", "addmm") == {torch.float32}
    bf16, training = operators(small("llama"), precision="bf16")
    assert bf16.dtypes("mm", "addmm") == {torch.bfloat16}
    assert {each.dtype for each in training.model.parameters()} == {torch.float32}


def test_bf16_pure_holds_weights_and_optimizer_state_in_bf16(small):
    seen, training = operators(small("llama"), precision="bf16_pure")
    assert seen.dtypes("mm", "addmm") == {torch.bfloat16}
    assert {each.dtype for each in training.model.parameters()} == {torch.bfloat16}
    state = next(iter(training.optimizer.state.values()))
    assert state["exp_avg"].dtype == torch.bfloat16


def test_fusion_compiles_each_block_and_nothing_else(small):
    training = Training(small("llama"), {"micro_batch": 8, "fusion": True}, CPU)
    compiled = {name for name, each in training.model.named_modules() if each._compiled_call_impl is not None}
    assert compiled == {"model.layers.0", "model.layers.1"}
    plain = Training(small("llama"), {"micro_batch": 8}, CPU)
    assert all(each._compiled_call_impl is None for each in plain.model.modules())


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"micro_batch": 3}, "micro_batch must divide a replica's samples, 8, but is 3"),
        ({"micro_batch": 0}, "at least 1"),
        ({"precision": "fp16"}, "unknown precision 'fp16'.*work on cpu"),
        ({"precision": "fp8"}, "precision=fp8: 8-bit products take an nn.Linear.* and there is none in its"),
        ({"micro_batch": 8, "tp": 2}, r"tp=2: .* must equal the number of devices \(1\)"),
        ({"micro_batch": 8, "zero": 4}, "zero must be a stage from 0 to 3, but is 4"),
        ({"micro_batch": 4, "dp": 2}, r"dp=2: .* must equal the number of devices \(1\)"),
        ({"micro_batch": 8, "attention": "flash"}, "attention 'flash'"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(small, knobs, message):
    with pytest.raises(WorkloadError, match=message):
        Training(small(), knobs, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16_pure", "fp16"])
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_a_gpu_trains_in_every_precision(small, family, precision):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config = {"micro_batch": 4, "grad_accum": 2, "precision": precision}
    training = Training(small(family), config, torch.device("cuda"))
    # The generators of devices differ, and so would the weights.
    training.model.load_state_dict(Training(small(family), {"micro_batch": 8}, CPU).model.state_dict())
    got = float(training.step())
    # TensorFloat-32 has as many bits as float16.
    dtype = {"fp32": torch.float32, "tf32": torch.float16, "fp16": torch.float16}.get(precision, torch.bfloat16)
    expected, tokens = losses(small(family), steps=1)[0], 8 * 16
    allowed = loss_allowance(allowance(small(family).build_model(), tokens, dtype=dtype), tokens)
    numeric.within(abs(got - expected) / expected, allowed, "the loss")


def test_a_micro_batch_without_labels_counts_for_nothing_and_leaves_the_loss_a_number(small):
    made = small()
    batch = made.batch(4, 0)
    batch = {**batch, "labels": batch["labels"].clone()}
    batch["labels"][:2] = -100
    parts = [{key: each[2 * at : 2 * at + 2] for key, each in batch.items()} for at in range(2)]
    training = Training(made, {"micro_batch": 2}, CPU, own_data=False)
    loss = training.passes(parts, factors=torch.tensor([0.0, 2.0]))
    assert float(loss) == pytest.approx(float(training.model(**parts[1]).loss), rel=1e-6)
    assert all(each.grad.isfinite().all() for each in training.model.parameters() if each.grad is not None)


def test_a_resumed_training_continues_with_its_loss_scale():
    precision = Precision("fp32", CPU)
    precision._scaler = torch.amp.GradScaler("cpu")  # as fp16 has on a GPU
    precision.restore({"loss_scale": 1024.0, "loss_scale_steps": 7})
    assert precision.loss_scale == 1024.0 and float(precision.scale(torch.ones(()))) == 1024.0
    assert precision.facts == {"loss_scale": 1024.0, "loss_scale_steps": 7}
    precision.restore({})  # a checkpoint of an earlier version
    assert precision.facts == {"loss_scale": 1.0, "loss_scale_steps": 0}


def test_gradients_in_16_bits_have_a_norm_in_more(small):
    training = Training(small(), {"micro_batch": 2, "precision": "bf16_pure"}, CPU)
    training.step()
    for number, each in enumerate(training.model.parameters()):
        each.grad = torch.full_like(each, 0.0)
        if number == 0:
            each.grad.view(-1)[:3] = torch.tensor([1.0, 1.0, 1.0], dtype=each.dtype)  # norm 1.7320508, in bf16 1.734375
    assert float(gradients.square(training)) == pytest.approx(3.0, rel=1e-6)
