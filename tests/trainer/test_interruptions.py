"""However a training ends, it continues exactly from its checkpoint, also elsewhere and with another configuration."""

import signal

import pytest
import yaml
from processes import left_of
from train_commands import EVERY_STEP, PLAIN, SIZES, curve, lines_of, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def steps_done(least):
    return lambda line: line["kind"] == "checkpoint" and line["step"] >= least and not line["failure"]


@pytest.fixture(scope="session")
def uninterrupted(here):
    from train_commands import Command

    arguments = trained("train", "llama", "uninterrupted", "--lr", "1e-3", steps=150)
    code, text = Command(arguments, here).wait()
    assert code == 0, text
    return curve(here / "uninterrupted")


def test_a_killed_training_resumed_on_other_devices_is_the_same(start, here, uninterrupted):
    tuned = start("tune", "llama", *SIZES, "--devices", 2, "--trials", 2, "--measure-time", "50ms", "--out", "run")
    code, text = tuned.wait()
    assert code == 0, text
    out = here / "killed"
    command = start(*trained("train", "run", "killed", "--lr", "1e-3", "--save-every", 5, steps=150, devices=2))
    command.until(out, steps_done(20))
    command.signal(signal.SIGKILL)
    command.wait()
    assert left_of(command.began) == []
    document = yaml.safe_load((out / "train.yaml").read_text())
    winner = yaml.safe_load((here / "run" / "best.yaml").read_text())["best"]["configuration"]
    (first,) = document["strategies"]
    assert first["why"] == "the valid configuration nearest to the run's winner" and first["devices"] == 2
    assert {name: value for name, value in first["configuration"].items() if name in winner} == {
        **winner, "precision": "fp32", "fusion": False, "attention": "eager", "kernels": False,
    }  # fmt: skip
    # It continues on one device, where it is replanned, and is killed again; then on two in a given configuration.
    command = start("train", "killed", "--resume", "--devices", 1)
    command.until(out, steps_done(60))
    command.signal(signal.SIGKILL)
    _, text = command.wait()
    assert left_of(command.began) == []
    assert "replanned for 1 device, after 2" in text and "continuing from step-" in text
    code, text = start("train", "killed", "--resume", "--devices", 2, *PLAIN, "--fix", "tp=2").wait()
    assert code == 0, text
    assert "trained: 150 steps" in text
    strategies = yaml.safe_load((out / "train.yaml").read_text())["strategies"]
    assert [each["devices"] for each in strategies] == [2, 1, 2] and strategies[2]["configuration"]["tp"] == 2
    assert [each["step"] for each in strategies] == sorted(each["step"] for each in strategies)
    found = curve(out)
    assert found.keys() == uninterrupted.keys()
    assert [found[step] for step in range(1, 151)] == pytest.approx(
        [uninterrupted[step] for step in range(1, 151)], rel=2e-4
    )
    assert found[150] < found[1] - 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_saves_a_checkpoint_to_resume_from(start, here, uninterrupted, number):
    name = f"interrupted-{number.name}"
    command = start(*trained("train", "llama", name, "--lr", "1e-3", steps=150))
    command.until(here / name, lambda line: line["step"] >= 10)
    command.signal(number)
    code, text = command.wait()
    assert code == 130, text
    assert left_of(command.began) == [] and "Traceback" not in text
    assert f"\nresume   redline train {name} --resume\n" in text
    last = lines_of(here / name)[-1]
    assert last["kind"] == "end" and last["stopped"] and 10 <= last["step"] < 150
    assert f"ended early: {last['step']} steps" in text
    assert [each.name for each in (here / name / "checkpoints").iterdir()] == [f"step-{last['step']:08d}"]
    code, text = start("train", name, "--resume").wait()
    assert code == 0, text
    found = curve(here / name)
    assert [found[step] for step in range(1, 151)] == [uninterrupted[step] for step in range(1, 151)], "bit for bit"


def test_out_of_memory_resumes_in_a_safer_configuration(start, here):
    out = here / "spiking"
    arguments = ("train", "work.py:spiking", "--devices", 1, "--memory-limit", "1GiB", "--steps", 60, *EVERY_STEP,
                 "--save-every", 4, "--fix", "micro_batch=8", "--out")  # fmt: skip
    code, text = start(*arguments, "fixed").wait()
    # No configuration is safer than the requested one.
    assert code == 3, text
    assert "the training ran out of memory, and no configuration for 1 device needs clearly less" in text
    arguments = [each for each in arguments if each not in ("--fix", "micro_batch=8")]
    code, text = start(*arguments, out.name).wait()
    assert code == 0, text
    strategies = yaml.safe_load((out / "train.yaml").read_text())["strategies"]
    first, *rest = [each["configuration"]["micro_batch"] for each in strategies]
    assert rest and max(rest) < first
    assert "note: out of memory:" in text and "continuing from step" in text and "trained: 60 steps" in text
    assert strategies[-1]["step"] % 4 == 0 and 0 < strategies[-1]["step"] <= 20
    assert curve(out).keys() == set(range(1, 61))
    code, text = start("train", "work.py:net", "--devices", 1, "--steps", 60, *EVERY_STEP, "--out", "never").wait()
    assert code == 0, text
    assert curve(out) == pytest.approx(curve(here / "never"), rel=1e-5)


def test_ranks_that_fail_otherwise_end_it_and_say_why(start, here):
    code, text = start(
        "train", "work.py:broken", "--devices", 1, "--steps", 60, "--save-every", 4, "--out", "broke"
    ).wait()
    assert code == 1, text
    assert (
        "no such token" in text
        and "--resume continues from the checkpoint of step " in text
        and "Traceback" not in text
    )
    assert "KeyError" in (here / "broke" / "logs" / "0.log").read_text()
