"""A training is replanned only when necessary; the decision is stored before any rank starts."""

import contextlib
import shutil

import pytest
import yaml
from redline.base.errors import NothingFound
from redline.cli import main
from redline.trainer.driver import Driver
from redline.trainer.listener import TrainListener
from redline.trainer.request import TrainRequest
from train_commands import trained

pytestmark = pytest.mark.timeout(900)


class MessageListener(TrainListener):
    def __init__(self):
        self.messages = []

    def on_message(self, message):
        self.messages.append(message)


def ended(here, *arguments):
    with contextlib.chdir(here), pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    assert end.value.code == 0
    return here / arguments[arguments.index("--out") + 1]


@pytest.fixture(scope="session")
def of_llama(here):
    return ended(here, *trained("train", "llama", "to-replan", steps=1))


@pytest.fixture
def again(tmp_path):
    """`again(folder, **asked)`: resumes a copy of a training. Returns its strategy, messages and strategies in train.yaml."""

    def prepare(folder, **asked):
        copy = tmp_path / "copy"
        if not copy.exists():
            shutil.copytree(folder, copy)
        listener = MessageListener()
        with contextlib.ExitStack() as stack:
            driver = Driver(TrainRequest(source=copy, resume=True, **asked), listener, stack)
            driver.prepare()
        return driver.strategy, listener.messages, yaml.safe_load((copy / "train.yaml").read_text())["strategies"]

    return prepare


def test_an_unchanged_training_keeps_its_strategy(again, of_llama):
    strategy, notes, strategies = again(of_llama)
    assert notes == [] and strategies == [strategy.to_dict()] and strategy.step == 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"devices": 2}, "replanned for 2 devices, after 1: the estimate's best of "),
        ({"memory_limit": "1500MiB"}, "replanned for 1 device with 1,500 MiB each: the estimate's best of "),
        ({"fix": {"micro_batch": 2}}, "replanned for 1 device: "),
    ],
    ids=str,
)
def test_other_devices_memory_or_knobs_are_replanned_with_a_note(again, of_llama, asked, words):
    strategy, (reason,), (before, after) = again(of_llama, **asked)
    assert reason.startswith(words)
    assert after == strategy.to_dict() and after["step"] == 1 and before["step"] == 0
    assert after["devices"] == asked.get("devices", 1)
    assert after["configuration"]["precision"] == before["configuration"]["precision"]
    assert after["configuration"]["micro_batch"] == asked.get("fix", after["configuration"])["micro_batch"]
    # The change is stored: the next start needs no option for it.
    assert again(of_llama) == (strategy, [], [before, after])


def test_without_a_fitting_configuration_a_remedy_is_given_and_nothing_changes(again, of_llama, tmp_path):
    before = (of_llama / "train.yaml").read_bytes()
    with pytest.raises(
        NothingFound, match=r"is predicted to fit 1 rank .*, with 40 MiB each\. The least that any needs is"
    ):
        again(of_llama, memory_limit="40MiB")
    assert (tmp_path / "copy" / "train.yaml").read_bytes() == before
