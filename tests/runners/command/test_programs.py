"""Programs that train with other frameworks run, and their clocks agree with what is known of them."""

import itertools
import math

import pytest
from trainers import rows, seconds


@pytest.mark.parametrize("program", rows())
def test_a_program_s_clock_agrees_with_what_is_known_of_it(program, tmp_path):
    run = program.run(tmp_path)
    assert run.returncode == program.returncode, run.output
    assert program.error is None or program.error in run.output
    steps = program.steps if program.steps_before_failure is None else program.steps_before_failure
    assert [clock.rank for clock in run.clocks] == list(range(program.ranks)), run.output
    micro_batches = program.micro_batches or program.accumulate
    batch = program.samples // program.ranks // program.accumulate
    for clock in run.clocks:
        assert [step.samples for step in clock.steps] == [program.samples] * steps, run.output
        assert {span.activity for span in clock.apart} == program.activities
        assert {len(losses) for losses in clock.losses} == {micro_batches} or steps == 0
        assert all(math.isfinite(float.fromhex(loss)) for losses in clock.losses for loss in losses)
        times = [clock.start, *(step.end for step in clock.steps)]
        # Every micro-batch is one call of the model at least, which sleeps for a known time.
        assert all(end - start >= micro_batches * seconds(batch) for start, end in itertools.pairwise(times))
