"""Winners, leaders, counts and the reason for a missing winner."""

import pytest
from redline.results import Measurement, Status, Trial, summary
from redline.results.summary import judged


def trial(number, throughput=None, status=None, **more):
    sampler, again = more.pop("sampler", ""), more.pop("remeasured", ())
    status = status or (Status.OK if throughput is not None else Status.CRASH)
    measured = Measurement(status=status, throughput=throughput, **more)
    made = Trial(number=number, config={}, measurement=measured, sampler=sampler)
    return judged(made, again) if again else made


def pending(number, **more):
    return Trial(number=number, config={}, **more)


def test_a_confirmed_trial_wins_over_a_single_fast_measurement():
    trials = [
        trial(0, 100.0, remeasured=(50.0, 52.0, 51.0)),
        trial(1, 90.0, remeasured=(88.0, 10.0, 89.0)),
        trial(2, 89.5),
    ]
    assert [each.number for each in summary.leaders(trials)] == [1, 0, 2]


def test_without_success_there_is_no_best():
    trials = [trial(0), pending(1), trial(2, 5.0, status=Status.WRONG)]
    assert summary.best(trials) is None
    assert summary.leaders(trials) == []
    assert summary.best([]) is None


def test_the_gain_is_over_the_default_configuration_measured_in_this_run():
    base = trial(0, 100.0, sampler="default", remeasured=(80.0,))
    winner = trial(1, 200.0, remeasured=(160.0,))
    assert summary.gain([base, winner]).ratio == 2.0
    assert summary.gain([trial(0, 0.0, sampler="default"), winner]) is None  # a callable may return 0
    assert summary.gain([base]).ratio == 1.0 and not summary.gain([base]).shown
    assert summary.gain([winner]) is None
    assert summary.gain([trial(0, sampler="default"), winner]) is None
    assert summary.gain([pending(0, sampler="default"), winner]) is None


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ([], "no trial has finished"),
        ([pending(0)], "no trial has finished"),
        ([trial(0, 1.0)], ""),
        (
            [
                trial(0, status=Status.OOM, reason="cuda", peak_memory_mib=2000.5, memory_limit_mib=1024.0),
                trial(1, status=Status.OOM, reason="cuda", peak_memory_mib=1800.0, memory_limit_mib=1024.0),
                trial(2, status=Status.CRASH, reason="KeyError: 'x'"),
                trial(3, status=Status.CRASH, reason="KeyError: 'x'"),
                trial(4, status=Status.TIMEOUT, reason="300 s"),
            ],
            "none of 5 trials succeeded: 2 oom, 1 timeout, 2 crash. "
            "The smallest need seen is 1800 MiB (trial 1). The limit is 1024 MiB. "
            "Most common (2 times): crash: KeyError: 'x'",
        ),
        (
            [trial(0, status=Status.OOM, reason="killed by SIGKILL")],
            "none of 1 trials succeeded: 1 oom. Most common: oom: killed by SIGKILL",
        ),
    ],
)
def test_the_reason_for_a_missing_winner_is_given(trials, reason):
    assert summary.why_nothing(trials) == reason


def failed_again(number, log):
    failure = Measurement(status=Status.OOM, reason="when measured again: full", log=log)
    return judged(trial(number, 5.0, log=f"logs/{number}.log"), (), failure)


def test_logs_of_failed_remeasurements_are_named():
    again, other = failed_again(0, "logs/0.again.log"), failed_again(1, "logs/1.again.log")
    message = "every trial that succeeded failed when it was measured again"
    assert summary.why_nothing([other, trial(2)]) == f"{message}; logs/1.again.log has the details"
    assert summary.why_nothing([again, other]) == f"{message}; logs/0.again.log and logs/1.again.log have the details"
    assert summary.why_nothing([judged(trial(0, 5.0), (), Measurement(status=Status.OOM))]) == message


def test_a_trial_that_failed_when_measured_again_has_no_numbers_of_its_success():
    first = timed(0, 5.0, 0.1, tokens_per_second=5.0, mfu=0.3, peak_memory_mib=900.0, memory_limit_mib=1000.0)
    again = judged(first, (), Measurement(status=Status.OOM, peak_memory_mib=1100.0)).measured
    assert (again.tokens_per_second, again.step_ms, again.step_ms_spread, again.mfu) == (None,) * 4
    assert (again.peak_memory_mib, again.memory_limit_mib) == (1100.0, 1000.0)
    assert judged(first, (), Measurement(status=Status.OOM)).measured.peak_memory_mib is None
    assert judged(first, (), Measurement(status=Status.CRASH)).measured.peak_memory_mib == 900.0


def timed(number, throughput, spread, **more):
    return trial(number, throughput, step_ms=100.0, step_ms_spread=100.0 * spread, **more)


def test_a_gain_whose_interval_includes_1_is_not_shown():
    base = timed(0, 627.4, 0.068, sampler="default")
    gain = summary.gain([base, timed(1, 763.8, 0.20)])
    assert gain.ratio == pytest.approx(1.2174, abs=1e-4)
    assert gain.interval == pytest.approx((0.960, 1.475), abs=1e-3)
    assert not gain.shown and str(gain) == "no measurable gain (1.22x ± 0.26)"
    gain = summary.gain([base, timed(1, 763.8, 0.10)])
    assert gain.shown and str(gain) == "1.22x ± 0.15"
    assert str(summary.gain([trial(0, 2.0, sampler="default"), trial(1, 3.0)])) == "1.50x"  # without intervals


def test_re_measurements_that_agree_narrow_the_interval_by_their_number():
    first = timed(0, 100.0, 0.20)
    widths = [judged(first, [100.0, 101.0] * many).measured.spread for many in (1, 3, 9)]
    assert judged(first, [100.0]).measured.spread == pytest.approx(0.20)
    assert 0.10 < widths[0] < 0.20 and 0.04 < widths[1] < 0.09 and widths[2] < 0.03


def test_a_summary_counts_failures_and_has_the_first_reason():
    base = trial(0, 1.0, sampler="default")
    crash = trial(2, status=Status.CRASH, reason="OSError: file too short")
    trials = [base, trial(1, status=Status.OOM, reason="no memory"), crash, trial(3, status=Status.CRASH, reason="b")]
    assert summary.failures(trials) == "1 ok, 1 oom, 2 crash; trial 2 ended as crash: OSError: file too short"
    assert summary.only_default(trials) == "every other trial failed"
    assert summary.failures([base, trial(1, 2.0)]) == ""
    assert summary.only_default([base, pending(1)]) == "only the default configuration was tried"
    assert summary.only_default([base, trial(1, 0.5)]) is None
