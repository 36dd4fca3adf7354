"""Workload files written by users, valid and invalid."""

import pickle
import textwrap

import cloudpickle
import numeric
import pytest
import torch
from redline.base.errors import WorkloadError
from redline.models import flops_of, make_space, workload
from redline.runners.trial.job import Job, Rendezvous
from redline.schedule.comparison import allowance, loss_allowance
from redline.training import Training

CPU = torch.device("cpu")

FILE = """\
import torch
from torch import nn
from torch.nn import functional as F
import redline as rl


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(8) for _ in range(blocks)])
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.blocks(x))


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(2, (size,), generator=generator)


net = rl.Workload(model=Net, batch=batch, loss=lambda output, batch: F.cross_entropy(output, batch[1]))


def made():
    return net


def needs(argument):
    return net


def fails():
    return batch(-1, 0)


number = 7
"""


@pytest.fixture
def file(tmp_path):
    def make(text=FILE, name="train.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return make


def first_loss(made, **knobs):
    return float(Training(made, {"micro_batch": 8, **knobs}, CPU).step())


@pytest.mark.parametrize("name", ["net", "made"])
def test_a_file_s_workload_is_found_by_its_name(file, name, cpu):
    made = workload(f"{file()}:{name}")
    assert (made.name, made.spec) == (name, f"{file()}:{name}")
    assert make_space(made, cpu)["checkpoint_ratio"].values == (0.0, 0.25, 0.75, 1.0)
    assert flops_of(made).per_sample == 3 * 2 * (3 * 64 + 16) - 2 * 64  # no gradient with respect to the data
    training = Training(made, make_space(made, cpu).default(), CPU)
    assert training.samples_per_step == 32 and float(training.step()) > 0


def test_a_file_s_workload_reaches_another_process_without_the_file(file, kept_agent):
    path = file()
    made = workload(f"{path}:net", global_batch=16)
    expected = first_loss(made, micro_batch=16)
    assert flops_of(made).per_sample
    held = cloudpickle.dumps(made)
    path.unlink()

    def elsewhere(context):
        again = pickle.loads(held)
        assert again.known
        training = Training(again, {"micro_batch": 16}, torch.device("cpu"))
        return again.name, again.id, again.global_batch, float(training.step())

    program = cloudpickle.dumps(elsewhere)
    outcome = kept_agent().run(Job(program=program, ranks=1, rendezvous=Rendezvous(world_size=1), threads=1))
    name, identity, global_batch, loss = outcome.ranks[0].report
    assert (name, identity, global_batch) == ("net", made.id, 16)
    allowed = loss_allowance(allowance(made.build_model(), 16 * 8), 16)
    numeric.within(abs(loss - expected) / expected, allowed, "the loss")


def test_a_file_may_import_files_beside_it(file):
    file("width = 8\n", "beside_the_workload.py")
    made = workload(f"{file('import beside_the_workload' + chr(10) + FILE)}:net")
    assert pickle.loads(cloudpickle.dumps(made)).id == made.id


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nett", r"unknown workload 'nett'; did you mean 'net'\?"),
        ("", r"needs a name in it, .*train\.py:NAME; workloads there: .*net"),
        ("number", "must be a redline.Workload or a function that returns one, but is int 7"),
        ("needs", r"callable without arguments, but is needs\(argument\)"),
        ("fails", r"fails\(\) failed: .*train\.py:28: RuntimeError"),
        ("batch", r"callable without arguments, but is batch\(size, seed\)"),
    ],
)
def test_a_name_that_is_no_workload_is_refused(file, name, message):
    with pytest.raises(WorkloadError, match=message):
        workload(f"{file()}:{name}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (\n", r"train\.py:1 is not valid Python: '\(' was never closed"),
        ("A recipe:\ntake two eggs\n", r"train\.py:1 is not valid Python: invalid syntax"),
        ("x = 1\0", r"train\.py is not valid Python: .*null bytes"),
        ("\nimport no_such_module\n", r"train\.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f():\n    return 1 / 0\n\nf()\n", r"train\.py:2: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)\n", r"train\.py:1: SystemExit: 3"),
    ],
)
def test_a_file_that_fails_is_refused_with_the_line_and_the_error(file, text, message):
    for _ in range(2):  # the first attempt leaves nothing behind
        with pytest.raises(WorkloadError, match=message):
            workload(f"{file(text)}:net")
