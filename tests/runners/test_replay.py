"""Replays steps of emulated ranks with the time of their communication."""

import pytest
from redline.runners.place.replay import play
from redline.training.emulation import Act, Entry, Kind, Message, StepTrace

ALL = (0, 1)


def reduction(ranks=ALL, group="dp"):
    return Message(Kind.ALL_REDUCE, 1000, "float32", ranks, group)


def hop(kind, peer, tag=0):
    return Message(kind, 1000, "float32", ALL, "pp", peer, tag)


def step(rank, seconds, *entries):
    """A step of (at, act, number[, message[, stream]]) entries that take no time themselves."""
    made = []
    for at, act, number, *rest in entries:
        message, stream = (*rest, None, 0)[:2] if len(rest) < 2 else rest
        made.append(Entry(act, number, message, at, at, stream or 0))
    return StepTrace(rank, seconds, tuple(made), 0)


def second(message):
    return 1.0


def free(message):
    return 0.0


def test_a_communication_that_is_waited_for_adds_its_price():
    trace = step(0, 3.0, (1.0, Act.BEGIN, 1, reduction()), (1.0, Act.WAIT, 1))
    played = play([trace], second)
    assert played.seconds == pytest.approx(4.0)
    assert played.own_seconds == pytest.approx(3.0)
    assert played.modelled == pytest.approx(1.0)


def test_communications_of_a_group_run_one_after_another_and_of_two_groups_together():
    def both(other):
        trace = step(
            0, 1.0,
            (0.0, Act.BEGIN, 1, reduction()), (0.0, Act.BEGIN, 2, reduction(group=other)),
            (1.0, Act.WAIT, 1), (1.0, Act.WAIT, 2),
        )  # fmt: skip
        return play([trace], second).seconds

    assert both("dp") == pytest.approx(2.0)
    assert both("tp") == pytest.approx(1.0)


def test_the_emulations_own_work_counts_for_nothing():
    entry = Entry(Act.BEGIN, 1, reduction(), 1.0, 5.0, 0)
    trace = StepTrace(0, 7.0, (entry, Entry(Act.WAIT, 1, None, 5.0, 5.0, 0)), 0)
    played = play([trace], second)
    assert trace.own_seconds == pytest.approx(3.0)
    assert played.seconds == pytest.approx(4.0)


def test_a_stage_waits_for_the_one_before_it():
    # The first computes 2 s and sends; the second receives at once, then computes 3 s: 2 + 1 + 3.
    first = step(0, 2.0, (2.0, Act.BEGIN, 1, hop(Kind.SEND, 1)), (2.0, Act.WAIT, 1))
    second_stage = step(1, 3.0, (0.0, Act.BEGIN, 1, hop(Kind.RECEIVE, 0)), (0.0, Act.WAIT, 1))
    played = play([first, second_stage], second)
    assert played.seconds == pytest.approx(6.0)
    assert played.own_seconds == pytest.approx(3.0)


def test_a_pipeline_of_two_stages_has_the_bubble_of_its_order():
    """GPipe with m micro-batches that take f forward and b backward on each of p stages: (m + p - 1)(f + b)."""
    micro_batches, forward, backward = 4, 1.0, 2.0
    entries_first, entries_last = [], []
    at_first = at_last = 0.0
    for number in range(micro_batches):
        at_first += forward
        entries_first.append((at_first, Act.BEGIN, number, hop(Kind.SEND, 1)))
        entries_last += [(at_last, Act.BEGIN, number, hop(Kind.RECEIVE, 0)), (at_last, Act.WAIT, number)]
        at_last += forward
    for number in range(micro_batches, 2 * micro_batches):
        at_last += backward
        entries_last.append((at_last, Act.BEGIN, number, hop(Kind.SEND, 0, tag=1)))
        entries_first += [(at_first, Act.BEGIN, number, hop(Kind.RECEIVE, 1, tag=1)), (at_first, Act.WAIT, number)]
        at_first += backward
    traces = [step(0, at_first, *entries_first), step(1, at_last, *entries_last)]
    played = play(traces, free)
    assert played.seconds == pytest.approx((micro_batches + 1) * (forward + backward))


def test_ranks_that_share_cores_take_turns_and_one_that_waits_leaves_its_core():
    alone = step(0, 2.0)
    assert play([alone], second, cores=2, world_size=8).seconds == pytest.approx(8.0)
    assert play([alone], second, cores=8, world_size=8).seconds == pytest.approx(2.0)
    # While the second stage waits for the first, the first has the only core for itself.
    first = step(0, 2.0, (2.0, Act.BEGIN, 1, hop(Kind.SEND, 1)), (2.0, Act.WAIT, 1))
    behind = step(1, 3.0, (0.0, Act.BEGIN, 1, hop(Kind.RECEIVE, 0)), (0.0, Act.WAIT, 1))
    assert play([first, behind], free, cores=1).seconds == pytest.approx(5.0)


def test_a_stream_delays_only_streams_that_wait_for_its_event():
    """A gather on stream 7 runs ahead of its use: the step's own stream waits at 2 s for the event behind it."""

    def played(awaits):
        entries = [
            (0.0, Act.BEGIN, 1, reduction(), 7),
            (0.0, Act.WAIT, 1, None, 7),
            (0.0, Act.RECORD, 5, None, 7),
            *([(0.25, Act.AWAIT, 5, None, 0)] if awaits else []),
        ]
        return play([step(0, 3.0, *entries)], second).seconds

    assert played(True) == pytest.approx(3.75)
    assert played(False) == pytest.approx(3.0)


def test_ranks_waiting_for_a_transfer_that_never_starts_are_named():
    first = step(0, 1.0)
    second_stage = step(1, 1.0, (0.0, Act.BEGIN, 1, hop(Kind.RECEIVE, 0)), (0.0, Act.WAIT, 1))
    with pytest.raises(AssertionError, match="wait for what none of them begins"):
        play([first, second_stage], second)
