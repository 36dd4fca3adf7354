"""A searcher that exceeds a limit ends its search, with the reason; its server continues."""

import multiprocessing
from dataclasses import replace

import pytest
from agent_tasks import run_alone
from pools import a_store
from redline.base.errors import StorageUnavailable, StudyError
from redline.results import Measurement, Status, Trial
from redline.service.limits import SearcherLimits
from redline.service.records import SearchState
from redline.service.searcher import Searcher, StoreListener
from redline.service.searcher_task import SearchTask
from redline.space import Config
from redline.tuner.listener import SearchPlan

LAYERS = {"model_type": "gpt2", "n_layer": 20_000, "n_head": 2, "n_embd": 8, "vocab_size": 64}
SIMULATED = {"model": LAYERS, "runner": "simulate", "hardware": "h100-80gb", "devices": 1, "trials": 2}


def test_an_exceeded_limit_is_named():
    limits = SearcherLimits(cpu_s=7200.0, preparing_s=60.0)
    assert limits.broken(7199.0, 59.0) == ""
    assert "2 hours of CPU time" in limits.broken(7201.0, 0.0)
    assert "longer than the limit of 60 s" in limits.broken(0.0, 61.0)


def failing(tmp_path, monkeypatch, error):
    """Returns a store with a search whose trials raise an error, and the search's id."""
    store, user = a_store(tmp_path)

    def fails(searcher):
        raise error

    monkeypatch.setattr(Searcher, "_tuned", fails)
    return store, store.submit(user, SIMULATED, devices=1)[0].id


@pytest.mark.parametrize("error", [MemoryError(), SystemError("error return without exception set")], ids=repr)
def test_a_library_that_cannot_allocate_ends_the_search_as_too_large(tmp_path, monkeypatch, error):
    """Extensions of the interpreter also fail without an exception of their own."""
    store, search = failing(tmp_path, monkeypatch, error)
    with store:
        Searcher(store, "unused", tmp_path, search, limits=SearcherLimits(memory_mib=300.0)).run()
        found = store.search(search)
    assert found.state is SearchState.FAILED and "its limit of 0.29" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (SearcherLimits(memory_mib=300.0), "its limit of 0.29"),
        (SearcherLimits(preparing_s=3.0), "longer than the limit of 3 s"),
        (SearcherLimits(cpu_s=1.0), "CPU time"),
    ],
    ids=["memory", "time to prepare", "CPU time"],
)
def test_a_model_of_twenty_thousand_layers_ends_its_own_search_alone(tmp_path, limits, message):
    store, user = a_store(tmp_path)
    with store:
        search = store.submit(user, SIMULATED, devices=1)[0].id
        ours, theirs = multiprocessing.Pipe()
        url = f"sqlite:///{tmp_path}/redline.db"
        task = SearchTask(url=url, data=tmp_path, search=search, log=tmp_path / "log", limits=limits)
        process = multiprocessing.get_context("spawn").Process(target=run_alone, args=(task, theirs))
        process.start()
        process.join(300)
        ours.close()
        found = store.search(search)
        assert found.state is SearchState.FAILED and message in found.reason, (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "error", [StorageUnavailable("the database is away"), StudyError("the disk is full")], ids=repr
)
def test_a_search_without_its_database_is_restarted_and_has_not_failed(tmp_path, monkeypatch, error):
    store, search = failing(tmp_path, monkeypatch, error)
    with store:
        with pytest.raises(SystemExit, match="the search cannot continue at the moment"):
            Searcher(store, "unused", tmp_path, search).run()
        assert store.search(search).state is SearchState.RUNNING


def test_a_later_attempt_that_starts_no_trial_is_not_preparing_for_ever(tmp_path):
    store, user = a_store(tmp_path)
    with store:
        search = store.submit(user, SIMULATED, devices=1)[0].id
        attempt = store.take_search(search)
        plan = SearchPlan(
            name="gpt2", where="here", valid=3, trials=2, seconds=None, sampler="grid", runner="ray",
            earlier=(Trial(number=0, config=Config(a=1), sampler="grid", measurement=Measurement(status=Status.OK)),),
        )  # fmt: skip
        fresh, again = (StoreListener(store, search, attempt) for _ in range(2))
        fresh.on_start(replace(plan, earlier=()))
        again.on_start(plan)
        assert (fresh.trying.is_set(), again.trying.is_set()) == (False, True)
