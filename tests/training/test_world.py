"""Ranks and their axes, and degrees that are refused."""

from itertools import product

import pytest
import torch
from redline.base.errors import WorkloadError
from redline.training.world import World


def test_tensor_parallel_ranks_are_adjacent_and_stages_farthest():
    worlds = [World.of({"tp": 2, "pp": 2}, rank, 8) for rank in range(8)]
    assert [each.tp_rank for each in worlds] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [each.dp_rank for each in worlds] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [each.pp_rank for each in worlds] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_ranks_that_share_a_sequence_are_next_and_replicas_of_each_others_weights():
    worlds = [World.of({"tp": 2, "sp": 2}, rank, 8) for rank in range(8)]
    assert [each.tp_rank for each in worlds] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [each.sharing.rank for each in worlds] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [each.dp_rank for each in worlds] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [each.replica for each in worlds] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(each.dp, each.sp, each.replicas) for each in worlds} == {(2, 2, 4)}


def test_a_ring_goes_through_the_groups_that_exchange_heads():
    pieces = [World.of({"cp": 2, "sp": 2}, rank, 8).sharing.piece(torch.arange(16), 0).tolist() for rank in range(8)]
    assert pieces[:4] == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]] == pieces[4:]
    assert [World.of({"cp": 2, "sp": 2}, rank, 8).dp_rank for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("tp", "sp", "cp", "pp"), list(product([1, 2, 4], [1, 2], [1, 2], [1, 2])))
def test_every_place_is_taken_once(tp, sp, cp, pp):
    size = 32
    worlds = [World.of({"tp": tp, "sp": sp, "cp": cp, "pp": pp}, rank, size) for rank in range(size)]
    assert {each.dp for each in worlds} == {size // (tp * sp * cp * pp)}
    assert len({(each.pp_rank, each.dp_rank, each.sharing.rank, each.tp_rank) for each in worlds}) == size


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tp": 3}, r"tp=3, dp=2: tp \* sp \* cp \* pp \* dp must equal the number of devices \(8\)"),
        ({"sp": 3}, r"sp=3, dp=2: tp \* sp"),
        ({"cp": 3}, r"cp=3, dp=2: tp \* sp"),
        ({"cp": 2.0}, r"cp must be a whole number of at least 1, but is 2\.0"),
        ({"sp": 0}, "sp must be a whole number of at least 1, but is 0"),
        ({"tp": 2, "dp": 8}, r"tp=2, dp=8: .* must equal the number of devices \(8\)"),
        ({"pp": 0}, "pp must be a whole number of at least 1, but is 0"),
        ({"tp": 16}, r"tp=16: .* must equal the number of devices \(8\)"),
        ({"tp": 2.0}, r"tp must be a whole number of at least 1, but is 2\.0"),
        ({"tp": True}, "but is True"),
    ],
)
def test_degrees_that_do_not_make_up_the_ranks_are_refused(config, message):
    with pytest.raises(WorkloadError, match=message):
        World.of(config, 0, 8)


def _gives_up():
    """Returns the error of a stage that waits for another one, which sends nothing."""
    import torch.distributed as dist

    mesh = World.of({"pp": 2}, dist.get_rank(), 4).mesh(torch.device("cpu"), 1.0)
    if dist.get_rank() != 2:
        return ""
    try:
        dist.recv(torch.ones(1), 0, group=mesh.get_group("pp"))
    except RuntimeError as error:
        return str(error)
    return "received"


def test_a_stage_waits_for_another_no_longer_than_that(four):
    assert "Timed out waiting 1000ms" in four.run(_gives_up)[2]
