"""Which rank is what, and what cannot be arranged."""

from itertools import product

import pytest
import torch
from redline.errors import WorkloadError
from redline.models.world import World


def test_ranks_that_share_a_layer_are_neighbours_and_stages_are_farthest_apart():
    worlds = [World.of({"tp": 2, "pp": 2}, rank, 8) for rank in range(8)]
    assert [each.tp_rank for each in worlds] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [each.dp_rank for each in worlds] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [each.pp_rank for each in worlds] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("tp", "pp"), list(product([1, 2, 4], [1, 2])))
def test_every_place_is_taken_once(tp, pp):
    worlds = [World.of({"tp": tp, "pp": pp}, rank, 8) for rank in range(8)]
    assert {each.dp for each in worlds} == {8 // (tp * pp)}
    assert len({(each.pp_rank, each.dp_rank, each.tp_rank) for each in worlds}) == 8


def test_one_rank_has_no_mesh():
    assert World.of({}).mesh(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tp": 3}, r"tp \* pp \* dp must be the number of ranks, 8, but 3 \* 1 \* 2 is 6"),
        ({"tp": 2, "dp": 8}, r"2 \* 1 \* 8 is 16"),
        ({"pp": 0}, "pp must be a whole number of at least 1, but is 0"),
        ({"tp": 16}, r"16 \* 1 \* 1 is 16"),
        ({"tp": 2.0}, r"tp must be a whole number of at least 1, but is 2\.0"),
        ({"tp": True}, "but is True"),
    ],
)
def test_degrees_that_do_not_make_up_the_ranks_are_refused(config, said):
    with pytest.raises(WorkloadError, match=said):
        World.of(config, 0, 8)
