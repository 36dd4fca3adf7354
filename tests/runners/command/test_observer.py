"""Real trainings are observed as they are: their steps, samples and speed by clocks of their own, and nothing of them changes."""

import itertools
import math

import pytest
from redline.runners.command.observation import FOLDER, OBSERVER, Observation
from redline.runners.trial.timing import TimingPlan
from trainers import rows, seconds


@pytest.mark.parametrize("program", rows())
def test_a_training_is_observed_as_its_own_clock_has_it_and_not_changed(program, tmp_path):
    plain = program.run(tmp_path / "plain")
    check_clock(program, plain)
    run = program.run(tmp_path / "watched", {FOLDER: str(tmp_path / "observed"), "PYTHONPATH": str(OBSERVER)})
    check_clock(program, run)
    assert [clock.losses for clock in run.clocks] == [clock.losses for clock in plain.clocks], "equal to the bit"
    observation = Observation(tmp_path / "observed")
    observation.update()
    assert not observation.fault
    training = observation.training
    if program.optimizers == 0:
        assert training is None
        return
    clock = run.clocks[0]
    assert training.world == program.ranks
    assert sum(step.steps for step in training.steps) == pytest.approx(len(clock.steps), abs=program.unseen_steps)
    speed = training.speed(TimingPlan(), ended=True)
    assert 0.95 < sum(speed.shares.values()) < 1.05
    if program.true_steps is None:
        samples = program.samples() if speed.samples_per_step is None else speed.samples_per_step
        assert samples == pytest.approx(program.samples())
        # What happens in every step, such as the generation of reinforcement learning, is part of it.
        recurs = len(clock.apart) > len(clock.steps) / 2
        truth = clock.rate(after=len(clock.steps) - speed.steps, apart=recurs)
        assert samples / speed.seconds_per_step == pytest.approx(truth, rel=0.03)


def test_a_line_that_a_full_disk_cut_is_not_left_out_without_a_word(tmp_path):
    observation = Observation(tmp_path)
    (tmp_path / "1.jsonl").write_text('{"facts": {"rank": 0}}\n{"facts": {"wor')
    observation.update()
    assert observation.fault is None, "the process is writing it"
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('\n{"facts": {"world": 2}}\n')
    observation.update()
    (process,) = observation.processes.values()
    assert process.world == 2 and "a line of its file is damaged" in observation.fault


def check_clock(program, run):
    """The program ran, and its clock agrees with what is known of it."""
    assert run.returncode == program.returncode, run.output
    assert program.message is None or program.message in run.output
    assert [clock.rank for clock in run.clocks] == list(range(program.ranks)), run.output
    steps = program.steps if program.true_steps is None else program.true_steps
    batch = program.true_batch or program.batch
    for clock in run.clocks:
        assert [step.samples for step in clock.steps] == [program.samples()] * steps, run.output
        assert {span.activity for span in clock.apart} == program.activities
        assert {len(losses) for losses in clock.losses} == {program.losses or program.accumulate}
        assert all(math.isfinite(float.fromhex(loss)) for losses in clock.losses for loss in losses)
        times = [clock.start, *(step.end for step in clock.steps)]
        # Every micro-batch is one call of the model at least, which sleeps for a known time.
        assert all(end - start >= program.accumulate * seconds(batch) for start, end in itertools.pairwise(times))
