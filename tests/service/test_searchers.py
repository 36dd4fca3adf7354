"""The searchers of a server: one for each running search, restarted when it dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import agent_tasks
import psutil
import pytest
from agent_tasks import Fails, Waits
from pools import DEVICE, a_store
from processes import until
from redline.service import searchers as module
from redline.service.logs import folder_of
from redline.service.records import SearchState
from redline.service.searchers import MOST_DEATHS, Searchers, SearcherSlots
from service_pool import begun


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A store with a worker, and a function that creates searchers that run a task in place of a search."""
    for name, seconds in (("LOOK_S", 0.05), ("FIRST_PAUSE_S", 0.01), ("LONGEST_PAUSE_S", 0.02)):
        monkeypatch.setattr(module, name, seconds)
    store, user = a_store(tmp_path)
    store.ann, made = user, []

    def searching(task, most=8, **more):
        more |= {"imports": ("agent_tasks",), "of_models": ()}
        made.append(Searchers(store, "sqlite:///it", tmp_path, SearcherSlots(store, most), task=task, **more))
        made[-1].start()
        return made[-1]

    with store:
        try:
            yield store, searching
        finally:
            for each in made:
                each.close()


def a_search(store, request=None, **more):
    return store.submit(store.ann, request or {"target": "gpt2-tiny"}, devices=1, **more)[0].id


def pid_of(searchers, search):
    child = searchers._children.get(search)
    return child.pid if child is not None else None


def test_a_search_waits_for_devices_and_then_begins(service):
    store, searching = service
    search, searchers = a_search(store), searching(Waits)
    time.sleep(0.3)
    assert not searchers._children
    store.join(store.ann, "w", "here", DEVICE.to_dict(), 1, 1000, {})
    until(lambda: pid_of(searchers, search))


def test_the_most_urgent_begin_first_and_no_more_than_may(service):
    store, searching = service
    store.join(store.ann, "w", "here", DEVICE.to_dict(), 1, 1000, {})
    low, first, second = a_search(store), a_search(store, priority=5), a_search(store, priority=5)
    searchers = searching(Waits, most=2)
    until(lambda: pid_of(searchers, first) and pid_of(searchers, second))
    time.sleep(0.2)
    assert low not in searchers._children


def test_searches_of_an_earlier_server_continue_and_killed_searchers_restart(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searchers = searching(Waits)
    first = until(lambda: pid_of(searchers, search))
    os.kill(first, signal.SIGKILL)
    until(lambda: pid_of(searchers, search) not in (None, first))


def test_a_search_that_cannot_run_returns_its_slot_and_gets_it_back(service, monkeypatch):
    """Regression: a user over their quota occupied every slot while no device was busy."""
    monkeypatch.setattr(module, "UNABLE_S", 0.2)
    monkeypatch.setattr(module, "DECIDE_S", 0.05)
    store, searching = service
    store.join(store.ann, "w", "here", DEVICE.to_dict(), 1, 1000, {})
    bob = store.add_user("bob")
    mine = a_search(store)
    searchers = searching(Waits, most=1)
    pid = until(lambda: pid_of(searchers, mine))
    store.take_search(mine)
    theirs = store.submit(bob, {"target": "gpt2-tiny"}, devices=1)[0].id
    assert searchers.slots.why([theirs])[theirs] == "1 searches run at once, and it waits for a slot: it is the next"
    store.hold(mine)
    until(lambda: pid_of(searchers, theirs))
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert store.search(mine).state is SearchState.QUEUED
    assert searchers.slots.why([mine])[mine] == "it is held until a user releases it"
    store.cancel(theirs)
    os.kill(pid_of(searchers, theirs), signal.SIGKILL)
    store.hold(mine, False)
    until(lambda: pid_of(searchers, mine))


def test_a_searcher_of_an_ended_search_is_not_restarted(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searchers = searching(Waits)
    pid = until(lambda: pid_of(searchers, search))
    store.cancel(search)
    os.kill(pid, signal.SIGKILL)
    until(lambda: search not in searchers._children)


def test_a_searcher_that_keeps_dying_fails_with_its_last_output(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searching(Fails)
    found = until(lambda: store.search(search).state.ended and store.search(search))
    assert found.state is SearchState.FAILED
    assert found.reason == (
        f"its searcher died {MOST_DEATHS} times in a row; the last one ended with 7: the disk of {search} is full"
    )


def test_searchers_end_with_their_server_and_their_searches_stay(service):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searchers = searching(Waits)
    pid = until(lambda: pid_of(searchers, search))
    searchers.close()
    assert not psutil.pid_exists(pid)
    assert store.search(search).state is SearchState.RUNNING


def test_an_agent_that_is_killed_is_started_again_and_its_searchers_are_not_to_blame(service, monkeypatch):
    monkeypatch.setattr(module, "MOST_DEATHS", 2)
    store, searching = service
    searches = [a_search(store) for _ in range(2)]
    for each in searches:
        store.take_search(each)
    searchers = searching(Waits)
    seen: set[int | None] = {None}

    def is_started():
        found = {pid_of(searchers, each) for each in searches}
        return found if len(found) == 2 and not found & seen else None

    for number in range(5):
        seen |= until(is_started)
        if number < 4:
            os.kill(searchers.agent.pid, signal.SIGKILL)
    assert [store.search(each).state for each in searches] == [SearchState.RUNNING] * 2
    assert [searchers._children[each].deaths for each in searches] == [0, 0]


def test_a_death_that_is_noticed_after_that_of_the_agent_is_not_the_searchers_fault(service, monkeypatch):
    store, searching = service
    search = a_search(store)
    store.take_search(search)
    searchers = searching(Waits)
    first, agent, is_alive = until(lambda: pid_of(searchers, search)), searchers.agent, module._Child.is_alive
    monkeypatch.setattr(module._Child, "is_alive", lambda child: searchers.agent is agent or is_alive(child))
    os.kill(agent.pid, signal.SIGKILL)
    until(lambda: pid_of(searchers, search) not in (None, first))
    assert searchers._children[search].deaths == 0


def test_searchers_end_when_their_server_is_killed(tmp_path):
    """The kernel ends them, whatever they are doing."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from agent_tasks import Waits; from redline.runners.host import HostAgent\n"
        "agent = HostAgent(['agent_tasks']); folder = Path(sys.argv[1])\n"
        "found = agent.begin(Waits(url='', data=folder, search='a', log=folder / 'log'))\n"
        "print(found.note().supervisor, agent.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, Path(agent_tasks.__file__).parent], stdout=subprocess.PIPE, text=True
    ) as server:
        pids = [int(each) for each in server.stdout.readline().split()]
        assert all(psutil.pid_exists(each) for each in pids)
        server.kill()
    until(lambda: not any(psutil.pid_exists(each) for each in pids))


def test_each_searcher_has_its_own_process_group_and_log(service, tmp_path):
    store, searching = service
    searches = [a_search(store) for _ in range(2)]
    for each in searches:
        store.take_search(each)
    searchers = searching(Waits)
    until(lambda: all(pid_of(searchers, each) for each in searches))
    pids = [pid_of(searchers, each) for each in searches]
    assert [os.getpgid(each) for each in pids] == pids
    assert not {os.getpgid(0), os.getpgid(searchers.agent.pid)} & set(pids)


def test_a_held_search_of_an_earlier_server_starts_when_it_is_released(service):
    """Regression: its searchers died because it was held, and the eighth death ended the thread for all searches."""
    store, searching = service
    worker = store.join(store.ann, "w", "here", DEVICE.to_dict(), 1, 1000, {})
    search = a_search(store)
    asked = store.ask_dry_run(search, begun(store, search, DEVICE.name), "0", "run", {}, 1)
    store.lease(asked.id, worker.id, 60.0)  # keeps the slot
    store.hold(search)
    searchers = searching(Waits)
    time.sleep(0.3)
    assert store.search(search).state is SearchState.RUNNING and not searchers._children
    searchers._fail(search, "its searcher died")
    assert store.search(search).state is SearchState.RUNNING
    store.hold(search, False)
    until(lambda: pid_of(searchers, search))


def test_an_unexpected_error_of_a_round_is_logged_and_searches_start_in_the_next(service, monkeypatch, caplog):
    store, searching = service
    share, failing = SearcherSlots.share, [KeyError("a search")]
    monkeypatch.setattr(module, "DECIDE_S", 0.2)

    def failing_once(slots):
        if failing:
            raise failing.pop()
        return share(slots)

    monkeypatch.setattr(SearcherSlots, "share", failing_once)
    search = a_search(store)
    store.take_search(search)
    searchers = searching(Waits)
    until(lambda: searchers.failure == "KeyError: 'a search'")
    until(lambda: pid_of(searchers, search))
    until(lambda: searchers.failure == "")
    assert searchers.is_alive() and "in failing_once" in caplog.text


def test_a_searcher_whose_folder_cannot_be_made_does_not_keep_others_from_starting(service, tmp_path):
    store, searching = service
    first, second = a_search(store), a_search(store)
    for each in (first, second):
        store.take_search(each)
    folder_of(tmp_path, first).parent.mkdir(parents=True)
    folder_of(tmp_path, first).write_text("a file")
    searchers = searching(Waits)
    until(lambda: pid_of(searchers, second))
    assert searchers.failure == "" and searchers._children[first].deaths == 0
    folder_of(tmp_path, first).unlink()
    until(lambda: pid_of(searchers, first))


def test_searches_of_code_fail_on_a_server_that_does_not_run_code(service):
    store, searching = service
    code, model = a_search(store, {"command": {"command": "true {x}"}}), a_search(store)
    for each in (code, model):
        store.take_search(each)
    searchers = searching(Waits, allow_code=False)
    until(lambda: pid_of(searchers, model))
    found = store.search(code)
    assert (found.state, code in searchers._children) == (SearchState.FAILED, False)
    assert found.reason.startswith("this server does not run submitted code")
