"""Effects of torch's CUDA switches on a training, tested without a device."""

from types import SimpleNamespace

import pytest
import torch
from redline.estimator import Estimator, TrainingSetup
from redline.estimator.kernels import products_of
from redline.schedule.parallel.sharding import scale_gradients
from redline.trainer.loop import HostCopy
from redline.training.precision import Precision
from torch import nn

CUDA = torch.device("cuda", 0)
TF32, IEEE = torch.finfo(torch.float16).eps / 2, torch.finfo(torch.float32).eps / 2


@pytest.fixture
def switches():
    """torch's switches, which are restored at the end."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    yield matmul, conv
    matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize(
    ("set_it", "roundoff"),
    [
        (lambda matmul: setattr(matmul, "fp32_precision", "tf32"), TF32),
        (lambda matmul: setattr(matmul, "fp32_precision", "ieee"), IEEE),
        (lambda matmul: setattr(matmul, "allow_tf32", True), TF32),
        (lambda matmul: torch.set_float32_matmul_precision("high"), TF32),
        (lambda matmul: torch.set_float32_matmul_precision("highest"), IEEE),
    ],
)
def test_products_in_tf32_are_seen_however_they_were_asked_for(switches, set_it, roundoff):
    set_it(switches[0])
    assert Precision("fp32", CUDA).roundoff(nn.Linear(2, 2)) == roundoff


@pytest.fixture
def matmul_precision():
    yield
    torch.set_float32_matmul_precision("highest")


def test_the_knob_switches_tf32_on_for_the_passes_alone(switches, matmul_precision):
    matmul, _ = switches
    torch.set_float32_matmul_precision("highest")
    tf32, fp32 = Precision("tf32", CUDA), Precision("fp32", CUDA)
    assert tf32.roundoff(nn.Linear(2, 2)) == TF32 and fp32.roundoff(nn.Linear(2, 2)) == IEEE
    with tf32.products():
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == "ieee"
    with fp32.products():
        assert matmul.fp32_precision == "ieee"
    matmul.fp32_precision = "tf32"  # the program's own setting is kept
    for each in (tf32, fp32):
        with each.products():
            assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == "tf32"


def test_tf32_costs_the_memory_of_float32_and_the_time_of_its_own_rate():
    shape = {"layers": 16, "hidden": 2048, "heads": 32, "vocabulary": 128_000}
    made = Estimator(shape, "h100", TrainingSetup(seq_len=2048, global_batch=8))
    fp32, tf32, bf16 = (made({"micro_batch": 2, "precision": each}) for each in ("fp32", "tf32", "bf16"))
    assert tf32.peak_memory_mib == fp32.peak_memory_mib
    # The ratio is 7.39 at equal clocks. Clocks are lower the larger the share of products in the step.
    assert (
        7.39
        <= fp32.breakdown["time.matmul"] / tf32.breakdown["time.matmul"]
        <= 7.39 / products_of(made.hardware).sustained
    )
    assert bf16.step_ms < tf32.step_ms < fp32.step_ms


class OnDevice:
    """A tensor on a GPU that notes what is done with it, in order."""

    is_cuda, device = True, CUDA

    def __init__(self, done):
        self.done = done

    def to(self, device, non_blocking):
        self.done.append(("copy", device, non_blocking))
        return SimpleNamespace(tolist=lambda: self.done.append("read") or [1.0, 0.0])

    def record_stream(self, stream):
        self.done.append(("kept for", stream))

    def mul_(self, factor):
        self.done.append(("times", factor))


def test_what_ranks_agreed_on_is_read_after_its_own_copy_alone(monkeypatch):
    done = []
    event = SimpleNamespace(record=lambda: done.append("mark"), synchronize=lambda: done.append("wait for the mark"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    copy = HostCopy(OnDevice(done))
    assert done == [("copy", "cpu", True), "mark"], "nothing waits while it is made"
    assert copy.tolist() == [1.0, 0.0] and done[2:] == ["wait for the mark", "read"]
    assert HostCopy(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_gradient_that_fsdp_scales_keeps_its_memory_for_the_stream_of_the_hook(monkeypatch):
    done, hooks = [], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    scale_gradients(SimpleNamespace(set_all_reduce_hook=hooks.append), 0.5)
    hooks[0](OnDevice(done))
    assert done == [("kept for", "that of cuda:0"), ("times", 0.5)]
    gradient = torch.ones(3)
    hooks[0](gradient)
    assert gradient.tolist() == [0.5] * 3
