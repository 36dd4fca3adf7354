"""The soak tries, after a training's first step, what would come hours later, and has no effect on the training."""

import json
import random
import re

import numpy as np
import pytest
import redline as rl
import torch
from redline.base.errors import StudyError
from redline.models.layouts.dcp import dcp_tensors
from redline.trainer.checkpoint.folder import CheckpointFolder
from redline.trainer.data import DataPlan, FromWorkload, prepare
from redline.trainer.hyperparameters import Hyperparameters
from redline.trainer.soak import longest
from texts import TOPICS
from tiers import tiered
from torch import nn
from trainings import part, place

HYPER = Hyperparameters(steps=100, lr=1e-3)
STRATEGIES = {
    "one": {"micro_batch": 2},
    "zero3": {"dp": 2, "zero": 3, "micro_batch": 2},
    "pp2": {"pp": 2, "grad_accum": 4, "pipeline_schedule": "1f1b"},
    "tp2": {"tp": 2},
}


class Moody(nn.Module):
    """Has running means and draws from every source of random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        out = self.out(self.norm(x.flatten(0, 1)))
        if self.training and x.device.type != "meta":
            out = out * (1 + random.random() + float(np.random.random()) + torch.rand(()))
        return out


def points(size, seed):
    """Returns samples with a number of rows that depends on the seed."""
    draw = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(1, 9, (), generator=draw))
    return torch.randn(size, rows, 6, generator=draw), torch.randint(0, 3, (size, rows), generator=draw)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1].flatten())


def moody():
    space = rl.Space()
    space.choice("micro_batch", [4])
    return rl.Workload(name="moody", model=Moody, batch=points, loss=loss, space=space, global_batch=4)


def trained(workload, config, folder, soak, hyper=HYPER):
    """Trains at least seven of a hundred steps, in one thread, as sums over several threads vary in their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random.seed(3), np.random.seed(3)
    found = part(
        workload, config, hyper, save=folder / str(soak), eval_every=3, soak=soak, stop=lambda loop: loop.step >= 6
    )
    torch.set_num_threads(threads)
    drawn = random.random(), np.random.random(), torch.rand(2).tolist()
    last = CheckpointFolder(folder / str(soak)).all()[0]
    names = sorted(each.name for each in (folder / str(soak)).iterdir())
    return found, drawn, last.manifest["samples"], {n: each.read() for n, each in dcp_tensors(last.path).items()}, names


@pytest.mark.parametrize("name", tiered(["one", "zero3", "pp2"], ["tp2"]))
def test_a_training_is_bit_for_bit_the_one_without_it(request, small, tmp_path, name):
    workload = small("gpt2", resid_pdrop=0.1)
    two = request.getfixturevalue("two") if name != "one" else None

    def run(soak):
        asked = (workload, STRATEGIES[name], tmp_path, soak)
        return two.run(trained, *asked) if two else [trained(*asked)]

    for soaked, plain in zip(run(True), run(False)):
        assert soaked[0].losses == plain[0].losses and soaked[0].norms == plain[0].norms
        assert soaked[0].of("evaluation", "loss") == plain[0].of("evaluation", "loss")
        assert soaked[1:3] == plain[1:3], "random numbers, and the position"
        assert soaked[4] == plain[4], "no checkpoint more"
        assert soaked[3].keys() == plain[3].keys()
        assert {each.partition("/")[0] for each in soaked[3]} == {"model", "optimizer"}
        assert all(torch.equal(soaked[3][each], plain[3][each]) for each in plain[3])
        if soaked[0].lines:
            (note,) = soaked[0].of("note", "text")
            message = r"soaked for [\d.]+ s: the longest of the next 99 batches \(step 2\), an evaluation and a checkpoint of "
            assert re.fullmatch(message + r"1\.\d MiB succeeded, without an effect on the training", note), note
            assert not plain[0].of("note")


def test_the_longest_batch_is_tried(small, tmp_path):
    """The soak runs it after the first step and drops the gradients of its passes."""
    workload, sizes = moody(), []

    def watch(training):
        inner = training.micro_batches
        training.micro_batches = lambda share: sizes.append(share[0].shape[1]) or inner(share)

    part(workload, {"micro_batch": 4}, HYPER, watch=watch, stop=lambda loop: loop.step >= 3)
    samples = FromWorkload(workload)
    all_sizes = [samples(4 * step, 4)[0].shape[1] for step in range(100)]
    assert sizes[1] == max(all_sizes) == 8 and [sizes[0], *sizes[2:]] == all_sizes[: len(sizes) - 1]
    found = longest(samples, 4 * 5, 95, 4, 4)
    assert found.looked_at == 95 and found.step == all_sizes[5:].index(8)


@pytest.mark.parametrize(("steps", "more"), [(99, {}), (100, {"soak": False})], ids=["short", "switched off"])
def test_a_short_training_has_none_nor_one_that_is_asked_for_none(small, steps, more):
    hyper = Hyperparameters(steps=steps)
    found = part(small("llama"), {"micro_batch": 8}, hyper, stop=lambda loop: loop.step >= 2, **more)
    assert found.of("note") == [] and found.step == 3


def test_a_checkpoint_that_cannot_be_saved_ends_it_at_once(small, tmp_path, monkeypatch):
    from torch.distributed.checkpoint import FileSystemWriter

    def refused(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", refused)
    with pytest.raises(StudyError, match=r"no checkpoint can be saved in '.*', as a trial.*No space left on device"):
        part(small("llama"), {"micro_batch": 8}, HYPER, save=tmp_path / "here")
    assert place() == (0, 1) and list((tmp_path / "here").iterdir()) == []


def test_running_means_and_numbers_drawn_by_the_model_are_given_back(tmp_path):
    """This model's sums are not reproducible to the bit; different random numbers would change the first digits."""
    trained(moody(), {"micro_batch": 4}, tmp_path / "traced", False)  # tracing draws random numbers too, once
    soaked, plain = (trained(moody(), {"micro_batch": 4}, tmp_path, soak) for soak in (True, False))
    assert soaked[0].losses == pytest.approx(plain[0].losses, rel=1e-5)
    assert soaked[1:3] == plain[1:3]
    assert torch.equal(*(each[3]["model/norm.num_batches_tracked"] for each in (soaked, plain)))
    torch.testing.assert_close(*(each[3]["model/norm.running_mean"] for each in (soaked, plain)))


def test_the_batch_with_the_most_tokens_in_a_pass_is_the_longest(tmp_path):
    lines = [json.dumps({"text": text[: 2 + 17 * number % 31]}) for number, text in enumerate(TOPICS * 3)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    plan = DataPlan(paths=(str(tmp_path / "lines.jsonl"),), packing="padded", seed=1)
    samples = prepare(plan, seq_len=24, task="causal", vocab_size=300, cache=tmp_path / "cache")
    found = longest(samples, 16, 20, 8, 2)
    tokens = (samples(16, 160)["labels"] != -100).reshape(20, 4, 2, 24).sum((2, 3)).amax(1)
    assert tokens[found.step] == tokens.max() > tokens.min() and found.looked_at == 20
