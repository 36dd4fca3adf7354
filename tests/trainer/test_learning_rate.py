"""The learning rate of a training that is resumed with more steps follows its schedule."""

from dataclasses import replace

import pytest
from redline.trainer.loop import Hyperparameters
from redline.trainer.request import TrainRequest, with_schedule
from train_commands import ended, lines_of, settings, trained

pytestmark = pytest.mark.timeout(900)
ASKED = TrainRequest(source="x", steps=100, lr=1e-3, warmup=10)


def rates(request, steps):
    hyper = request.section(Hyperparameters)
    return [hyper.lr_factor(step) for step in steps]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("step", "steps"), [(100, 200), (90, 400), (90, 95)])
def test_the_rate_neither_jumps_nor_rises(schedule, step, steps):
    before = replace(ASKED, lr_schedule=schedule)
    after, note = with_schedule(replace(before, steps=steps), before, step)
    assert after.lr_steps == 100
    assert rates(after, range(400)) == rates(before, range(400))
    assert note.startswith("the learning rate continues by its schedule over 100 steps, from ")
    again, note = with_schedule(replace(after, steps=500), after, steps)
    assert again.lr_steps == 100 and rates(again, range(500)) == rates(before, range(500))


@pytest.mark.parametrize(("schedule", "step"), [("constant", 50), ("wsd", 50), ("cosine", 0), ("cosine", 5)])
def test_the_schedule_extends_if_nothing_jumps(schedule, step):
    before = replace(ASKED, lr_schedule=schedule)
    after, note = with_schedule(replace(before, steps=200), before, step)
    assert note is None and rates(after, range(200)) == rates(replace(before, steps=200), range(200))


def test_a_requested_schedule_is_followed_with_a_note():
    after, note = with_schedule(replace(ASKED, steps=190, lr_steps=190), ASKED, 100)
    assert after.lr_steps == 190
    assert note == "by lr_steps=190 the learning rate jumps from 1.00e-04 to 5.50e-04 at step 100"


def learnt(folder):
    return [(line["step"], line["lr"], line["loss"]) for line in lines_of(folder) if line["kind"] == "step"]


def test_more_steps_by_the_command_line_are_those_of_one_training(run, here):
    assert ended(here, *trained("train", "llama", "extended", "--lr", "1e-2", steps=4)) == 0
    code, out, err = run("train", "extended", "--resume", "--steps", 7)
    text = " ".join(out.split())
    assert code == 0, out + err
    assert (
        "note: the learning rate continues by its schedule over 4 steps, from 1.00e-03 to 1.00e-03, where it stays"
        in text
    )
    assert "lr_steps: 7 in --settings lets it fall over all 7, from 4.50e-03" in text
    assert ended(here, *trained("train", "llama", "at-once", "--lr", "1e-2", *settings(here, lr_steps=4), steps=7)) == 0
    assert learnt(here / "extended") == learnt(here / "at-once") and len(learnt(here / "at-once")) == 7
