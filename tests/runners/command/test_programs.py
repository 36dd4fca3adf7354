"""Programs that train with other frameworks run, and their clocks agree with what is known of them."""

import itertools
import math

import pytest
from trainers import rows, seconds


@pytest.mark.parametrize("program", rows())
def test_a_program_s_clock_agrees_with_what_is_known_of_it(program, tmp_path):
    run = program.run(tmp_path)
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


@pytest.mark.slow
@pytest.mark.parametrize("program", rows())
def test_two_runs_of_a_program_have_the_same_losses_to_the_bit(program, tmp_path):
    first, second = (program.run(tmp_path / name) for name in ("first", "second"))
    assert first.clocks and first.returncode == second.returncode == program.returncode
    assert [clock.losses for clock in first.clocks] == [clock.losses for clock in second.clocks]


@pytest.mark.slow
@pytest.mark.parametrize("program", [row for row in rows() if row.values[0].order and not row.values[0].returncode])
def test_the_order_of_a_program_s_settings_is_as_its_cost_says(program, tmp_path):
    rates = []
    for number, settings in enumerate(program.order):
        run = program.run(tmp_path / str(number), **settings)
        assert run.clocks[0].steps[-1].samples == program.samples(**settings), run.output
        rates.append(run.clocks[0].rate())
    assert rates == sorted(rates)
