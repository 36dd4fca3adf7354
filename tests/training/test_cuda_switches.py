"""What torch's switches for CUDA mean to a training, where no device is needed to see it."""

import pytest
import torch
from redline.schedule.random_state import RandomState
from redline.training.precision import Precision
from torch import nn

CUDA = torch.device("cuda", 0)
TF32, IEEE = torch.finfo(torch.float16).eps / 2, torch.finfo(torch.float32).eps / 2


@pytest.fixture
def switches():
    """Torch's, which are as before at the end."""
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


@pytest.mark.parametrize(("asked", "roundoff"), [("tf32", TF32), ("ieee", IEEE)])
def test_convolutions_have_a_switch_of_their_own(switches, asked, roundoff):
    matmul, conv = switches
    matmul.fp32_precision, conv.fp32_precision = "ieee", asked
    assert Precision("fp32", CUDA).roundoff(nn.Conv2d(2, 2, 2)) == roundoff
    assert Precision("fp32", CUDA).roundoff(nn.Linear(2, 2)) == IEEE


def test_the_generators_of_a_device_exist_before_they_are_taken(monkeypatch):
    """A process that has not used CUDA has none, as `deferred("cuda:0")` in its first line finds."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "init", lambda: monkeypatch.setattr(torch.cuda, "default_generators", (generator,)))
    assert RandomState(CUDA).generators == [torch.default_generator, generator]
