"""Ranks that a launcher starts meet at its store, regardless of an earlier start's leftovers."""

import threading
from datetime import timedelta

import pytest
import torch
from redline.base.errors import RunnerError
from redline.trainer import ranks
from redline.trainer.ranks import own_part


@pytest.fixture
def store():
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)


def client(store):
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)


def start(store, ranks_, size, found):
    """Runs one start: every rank writes its role under its own part and reads what rank 0 wrote."""

    def rank_of(number):
        part = own_part(client(store), number, size)
        if number == 0:
            part.set("decided", found["word"])
        part.wait(["decided"], timedelta(seconds=30))
        found[number] = part.get("decided").decode()

    threads = [threading.Thread(target=rank_of, args=(number,)) for number in ranks_]
    for each in threads:
        each.start()
    return threads


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["rank 0 first", "rank 0 last"])
def test_leftovers_of_an_earlier_start_are_not_read(store, order):
    for word in ("first", "second", "third"):
        found = {"word": word}
        for thread in start(store, order, 3, found):
            thread.join(60)
        assert found == {"word": word, 0: word, 1: word, 2: word}


def test_a_rank_that_comes_late_is_waited_for_though_an_earlier_one_has_written(store):
    found = {"word": "first"}
    for thread in start(store, (0, 1), 2, found):
        thread.join(60)
    found = {"word": "second"}
    early = start(store, (0,), 2, found)
    early[0].join(1)
    assert early[0].is_alive() and 0 not in found
    for thread in (*early, *start(store, (1,), 2, found)):
        thread.join(60)
    assert found == {"word": "second", 0: "second", 1: "second"}


def test_a_rank_that_never_comes_is_named(store, monkeypatch):
    monkeypatch.setattr(ranks, "START_S", 0.3)
    with pytest.raises(RunnerError, match=r"rank 0 has waited for the others for 0 s; missing: 1, 2"):
        own_part(store, 0, 3)


@pytest.mark.parametrize(
    ("local_rank", "visible", "chosen", "expected"),
    [(3, 8, None, 3), (3, 8, 0, 3), (3, 1, None, 0), (11, 8, None, 3), (11, 8, 5, 5)],
    ids=["torchrun", "on device 0 by default", "one GPU for each task", "no local rank", "the program's choice"],
)
def test_a_rank_trains_on_a_gpu_that_it_sees(monkeypatch, local_rank, visible, chosen, expected):
    selected = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: chosen is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    place = ranks.RankPlace(rank=11, local_rank=local_rank, size=16)
    assert ranks._device(place) == torch.device("cuda", expected) and selected == [expected]
