"""Process groups of one rank without peers, and the record of their communication."""

import pytest
import torch
from redline.training.emulation import Act, EmulatedGroup, Kind, Recorder

CPU = torch.device("cpu")


class Ticks:
    """A clock that advances by one second at each reading."""

    def __init__(self):
        self.now = -1.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def recorder():
    return Recorder(5, CPU, Ticks())


def group(recorder, rank=1, ranks=(4, 5, 6, 7)):
    return EmulatedGroup(rank, ranks, "tp", recorder)


def noted(recorder, call):
    """Returns the trace of a step with one call and its wait."""
    recorder.begin_step()
    call().wait()
    recorder.end_step()
    (trace,) = recorder.traces()
    return trace


def test_a_reduction_leaves_what_the_rank_has_and_is_noted_with_its_bytes_and_ranks(recorder):
    tensor = torch.arange(6.0)
    trace = noted(recorder, lambda: group(recorder).allreduce([tensor]))
    begin, wait = trace.entries
    assert torch.equal(tensor, torch.arange(6.0))
    assert begin.message.kind is Kind.ALL_REDUCE
    assert (begin.message.num_bytes, begin.message.dtype, begin.message.ranks) == (24, "float32", (4, 5, 6, 7))
    assert (begin.act, wait.act, begin.number) == (Act.BEGIN, Act.WAIT, wait.number)
    assert trace.rank == 5


def test_the_time_within_a_call_is_the_emulations_own(recorder):
    trace = noted(recorder, lambda: group(recorder).allreduce([torch.ones(2)]))
    # The clock is read at 0 (begin), 1 and 2 (the call), 3 (the wait), 4 (end).
    assert [(each.at, each.left) for each in trace.entries] == [(1.0, 2.0), (3.0, 3.0)]
    assert (trace.seconds, trace.own_seconds) == (4.0, 3.0)


def test_a_gather_repeats_the_piece_also_where_it_lies_within_the_result(recorder):
    whole = torch.zeros(8)
    piece = whole[2:4]
    piece.copy_(torch.tensor([1.0, 2.0]))
    trace = noted(recorder, lambda: group(recorder).all_gather_single(whole, piece))
    assert whole.tolist() == [1.0, 2.0] * 4
    assert trace.entries[0].message.num_bytes == 32, "those of all ranks together"


def test_a_reduce_scatter_gives_the_ranks_own_part(recorder):
    out = torch.zeros(2)
    trace = noted(recorder, lambda: group(recorder).reduce_scatter_single(out, torch.arange(8.0)))
    assert out.tolist() == [2.0, 3.0]
    assert trace.entries[0].message.num_bytes == 32


def test_an_exchange_gives_back_from_every_rank_what_this_one_has_for_itself(recorder):
    counts, received = torch.tensor([3, 7, 1, 1]), torch.zeros(4, dtype=torch.int64)
    group(recorder).all_to_all_single(received, counts, [1] * 4, [1] * 4).wait()
    assert received.tolist() == [7] * 4, "ranks send each other alike on average"
    rows, arriving = torch.arange(24.0).view(12, 2), torch.full((28, 2), torch.nan)
    group(recorder).all_to_all_single(arriving, rows, [7] * 4, [3, 7, 1, 1]).wait()
    assert torch.equal(arriving, rows[3:10].repeat(4, 1))


def test_rows_arrive_although_the_rank_keeps_none_for_itself(recorder):
    arriving = torch.full((4, 2), torch.nan)
    group(recorder).all_to_all_single(arriving, torch.ones(3, 2), [1] * 4, [3, 0, 0, 0]).wait()
    assert torch.equal(arriving, torch.ones(4, 2))
    arriving.fill_(torch.nan)
    group(recorder).all_to_all_single(arriving, torch.ones(0, 2), [1] * 4, [0] * 4).wait()
    assert arriving.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_received_values_are_finite_and_of_moderate_size(recorder, dtype):
    tensor = torch.full((300, 70), torch.nan, dtype=dtype)
    trace = noted(recorder, lambda: group(recorder).recv([tensor], 3, 7))
    assert tensor.isfinite().all()
    assert 0.015 < tensor.float().std() < 0.025
    message = trace.entries[0].message
    assert (message.kind, message.peer, message.tag) == (Kind.RECEIVE, 7, 7)


def test_received_flags_and_numbers_are_ones(recorder):
    flag, mask = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.bool)
    group(recorder).recv([flag], 0).wait()
    group(recorder).recv([mask], 0).wait()
    assert flag.item() == 1
    assert mask.all()


def test_steps_before_are_forgotten_and_what_is_outside_of_steps_is_not_noted(recorder):
    one = group(recorder)
    noted(recorder, lambda: one.broadcast([torch.ones(1)]))
    recorder.forget()
    one.allreduce([torch.ones(1)]).wait()
    trace = noted(recorder, one.barrier)
    assert [each.message.kind for each in trace.entries if each.message] == [Kind.BARRIER]
