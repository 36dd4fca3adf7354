"""A long training whose later batch does not fit fails right after its first step."""

import pytest
from train_commands import curve, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG = """
from dataclasses import replace

import torch
from redline.models.batches import step_seed
from work import net


def batch(size, seed):
    rows = 40_000 if seed == step_seed(0, 90) else 16
    return torch.ones(size, rows, 16), torch.zeros(size, dtype=torch.long)


long = replace(net, name="long", batch=batch)
"""


@pytest.mark.parametrize(("more", "steps"), [({}, 1), ({"soak": False}, 90)], ids=["soaked", "not soaked"])
def test_a_later_oom_fails_after_the_first_step(start, here, more, steps):
    (here / "long.py").write_text("import sys; sys.path.insert(0, '.')\n" + LONG)
    out = "long-" + "-".join(["soaked", *more])
    arguments = ("train", "long.py:long", "--devices", 1, "--memory-limit", "1GiB", "--steps", 120,
                 "--fix", "micro_batch=8", "--out", out)  # fmt: skip
    code, text = start(*arguments, *settings(here, **more)).wait()
    assert code == 3, text
    assert "the training ran out of memory, and no configuration for 1 device needs clearly less" in text
    assert max(curve(here / out)) == steps
    assert ("(during soak)" in text) is (not more)
