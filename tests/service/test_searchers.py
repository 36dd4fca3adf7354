"""The processes of searches: started, restarted after their death, paused, interrupted, found again by another server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import psutil
import pytest
from processes import until
from redline.service import searchers as searchers_module
from redline.service.cluster import STARTING, lives, process_of
from redline.service.records import SearchState
from redline.service.runs import folder_of
from redline.service.scheduling import Kind
from redline.service.searchers import MOST_DEATHS, Searchers
from redline.service.serve_options import ServeOptions
from redline.service.store import Store
from served import NoCluster

PLAYED = Path(processes.__file__).with_name("played_search.py")
H100 = Kind("H100", "cuda", 4, 80_000)


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """Searches are played by a program of the tests, and restarts do not wait."""
    monkeypatch.setattr(searchers_module, "COMMAND", (sys.executable, str(PLAYED)))
    monkeypatch.setattr(searchers_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(searchers_module, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(searchers_module, "DECIDE_S", 0.0)


@pytest.fixture
def cluster():
    return NoCluster(kinds=(H100,), failure=None, address="127.0.0.1:1")


@pytest.fixture
def store(sqlite_url):
    with Store.open(sqlite_url) as store:
        yield store


@pytest.fixture
def searchers(store, cluster, tmp_path):
    searchers = Searchers(store, cluster, ServeOptions(data=tmp_path))
    yield searchers
    searchers._thread.start()
    searchers.close()


@pytest.fixture
def ann(store):
    return store.add_user("ann", "admin")


@pytest.fixture
def submit(store, ann):
    def submitted(play, **options):
        return store.submit(ann, {"target": play, **options.pop("request", {})}, devices=1, **options)[0].id

    return submitted


def looked(searchers, condition, within_s=60.0):
    """Lets a server look at its searches until a condition holds."""

    def holds():
        searchers.look()
        return condition()

    return until(holds, within_s)


def kinds(store, search):
    return [event.data.get("state", event.kind) for event in store.events(search=search)]


def tasks(tmp_path, search):
    files = sorted(folder_of(tmp_path, search).glob("started-*"))
    return [json.loads(file.read_text()) for file in files]


def test_a_search_runs_and_its_events_and_outcome_are_recorded(searchers, store, submit, tmp_path):
    search = submit("succeeds", request={"time": "90s", "concurrency": 2})
    looked(searchers, lambda: store.search(search).state.ended)
    record = store.search(search)
    assert (record.state, record.reason, record.best) == ("done", "all tried", {"throughput": 3.0})
    assert (record.attempt, record.trials, record.uses, record.kind) == (1, 1, 0, "H100")
    assert kinds(store, search) == ["queued", "running", "plan", "finished", "done"]
    (task,) = tasks(tmp_path, search)
    assert (task["kind"], task["concurrency"], task["seconds"], task["address"]) == ("H100", 2, 90.0, "127.0.0.1:1")
    assert (folder_of(tmp_path, search).stat().st_mode & 0o777) == 0o700


def test_a_process_that_dies_is_started_again_and_its_last_words_are_told(searchers, store, submit):
    search = submit("dies twice")
    looked(searchers, lambda: store.search(search).state.ended)
    assert (store.search(search).state, store.search(search).attempt) == ("done", 3)
    restarts = [event.data["reason"] for event in store.events(search=search) if event.kind == "restarting"]
    assert restarts == [
        "its process was killed: the last words",
        "its process was killed: the last words\nthe last words",
    ]


def test_a_search_whose_process_dies_again_and_again_fails(searchers, store, submit):
    search = submit("dies always")
    looked(searchers, lambda: store.search(search).state.ended, 120)
    record = store.search(search)
    assert (record.state, record.attempt) == ("failed", MOST_DEATHS)
    assert f"ended {MOST_DEATHS} times in a row" in record.reason


def test_a_search_that_lost_the_cluster_goes_on_with_its_devices_or_waits_for_them(searchers, store, submit, cluster):
    search = submit("loses the cluster once")
    looked(searchers, lambda: store.search(search).state.ended)
    assert kinds(store, search) == ["queued", "running", "plan", "restarting", "plan", "finished", "done"]
    waits = submit("loses the cluster once")
    looked(searchers, lambda: store.contenders()[0].process)
    cluster.failure, cluster.kinds = "Ray was lost", ()
    looked(searchers, lambda: store.search(waits).state is SearchState.QUEUED)
    looked(searchers, lambda: searchers.reasons.get(waits) == "Ray was lost")
    cluster.failure, cluster.kinds = None, (H100,)
    looked(searchers, lambda: store.search(waits).state.ended)
    assert store.search(waits).state == "done"


def test_a_failure_for_lack_of_devices_that_the_cluster_had_is_none(searchers, store, submit, cluster):
    search = submit("loses its devices")
    looked(searchers, lambda: store.contenders()[0].process)
    cluster.kinds = (Kind("A100", "cuda", 4, 40_000),)
    looked(searchers, lambda: searchers.reasons.get(search, "").startswith("the cluster has no 'H100'"))
    assert store.search(search).state == "queued"


def test_a_search_of_a_user_without_device_hours_pauses_and_goes_on_with_the_time_that_is_left(
    searchers, store, submit, ann, tmp_path
):
    search = submit("runs", request={"time": 100})
    looked(searchers, lambda: store.search(search).reason == "predicting")
    store.charge({search: 40.0})  # on four devices
    store.change_user("ann", device_hours=0.01)
    looked(searchers, lambda: store.search(search).state is SearchState.QUEUED)
    assert kinds(store, search)[-2:] == ["pausing", "queued"]
    searchers.look()
    assert store.contenders()[0].uses == 0
    assert searchers.reasons[search].startswith("its user has used 0.04")
    store.change_user("ann", device_hours=None)
    looked(searchers, lambda: len(tasks(tmp_path, search)) == 2)
    assert [task["seconds"] for task in tasks(tmp_path, search)] == [100.0, 60.0]


def test_a_search_that_pauses_and_gets_devices_at_once_runs(searchers, store, submit, tmp_path):
    """Regression: what was remembered of the paused process paused the next one, for ever."""
    search = submit("runs")
    looked(searchers, lambda: store.search(search).reason == "predicting")
    searchers._pause(store.contenders()[0], "for this test")
    looked(searchers, lambda: len(tasks(tmp_path, search)) == 2)
    looked(searchers, lambda: store.search(search).reason == "predicting")
    for _ in range(5):
        searchers.look()
    assert (store.search(search).state, store.search(search).attempt) == ("running", 2)


def test_a_search_gives_way_after_its_slice_and_goes_on_when_the_others_have_ended(store, submit, cluster, tmp_path):
    cluster.kinds = (Kind("H100", "cuda", 1, 80_000),)
    searchers = Searchers(store, cluster, ServeOptions(data=tmp_path, slice=0.5))
    search = submit("runs")
    looked(searchers, lambda: store.search(search).reason == "predicting")
    other = store.submit(store.add_user("bob"), {"target": "succeeds"}, devices=1)[0].id
    looked(searchers, lambda: store.search(other).state.ended)
    looked(searchers, lambda: store.search(search).attempt == 2)
    assert kinds(store, search)[:6] == ["queued", "running", "plan", "waiting", "pausing", "queued"]
    ended = store.search(other).ended
    resumed = [event.time for event in store.events(search=search) if event.data.get("state") == "running"][1]
    assert store.search(other).started <= ended <= resumed
    store.cancel(search)
    looked(searchers, lambda: not store.contenders())


def test_a_search_that_is_cancelled_while_its_process_starts_ends_when_it_has_started(
    searchers, store, submit, tmp_path
):
    search = submit("starts slowly")
    looked(searchers, lambda: tasks(tmp_path, search))
    store.cancel(search)
    looked(searchers, lambda: not store.contenders(), searchers_module.INTERRUPTED_S / 2)
    assert (store.search(search).state, store.search(search).best) == ("cancelled", {"throughput": 2.0})


@pytest.mark.parametrize("play", ["runs", "ignores an interrupt"])
def test_a_cancelled_search_is_interrupted_and_then_killed(searchers, store, submit, monkeypatch, play):
    monkeypatch.setattr(searchers_module, "INTERRUPTED_S", 0.5)
    search = submit(play)
    looked(searchers, lambda: store.search(search).reason == "predicting")
    process = store.contenders()[0].process
    store.cancel(search)
    assert [contender.uses for contender in store.contenders()] == [4], "its process has its devices"
    looked(searchers, lambda: not store.contenders())
    assert not lives(process)
    record = store.search(search)
    assert (record.state, record.best) == ("cancelled", {"throughput": 2.0} if play == "runs" else None)


def test_another_server_finds_the_process_again(searchers, store, submit, cluster, tmp_path):
    search = submit("runs")
    looked(searchers, lambda: store.search(search).reason == "predicting")
    process = store.contenders()[0].process
    second = Searchers(store, cluster, ServeOptions(data=tmp_path))
    for _ in range(3):
        second.look()
    assert store.contenders()[0].process == process and store.search(search).attempt == 1
    os.kill(process.pid, signal.SIGKILL)
    looked(second, lambda: store.search(search).attempt == 2)
    store.cancel(search)
    looked(second, lambda: not store.contenders())


def test_a_server_that_is_stopped_ends_the_processes_and_the_next_one_starts_them_again(
    store, submit, cluster, tmp_path
):
    first, second = (Searchers(store, cluster, ServeOptions(data=tmp_path)) for _ in range(2))
    first.start()
    search = submit("runs")
    until(lambda: store.search(search).reason == "predicting")
    process = store.contenders()[0].process
    first.close()
    until(lambda: not lives(process))
    looked(second, lambda: store.search(search).attempt == 2)
    assert "restarting" not in kinds(store, search) and "stopped" in kinds(store, search)
    second.start()
    second.close()


def test_an_outcome_is_read_again_until_it_is_acted_on(searchers, store, submit, monkeypatch):
    """A server may be killed between reading an outcome and recording it."""
    search = submit("succeeds")
    monkeypatch.setattr(searchers, "_conclude", lambda *arguments: None)
    looked(searchers, lambda: store.search(search).trials)
    until(lambda: not lives(store.contenders()[0].process))
    for _ in range(3):
        searchers.look()
    assert not store.search(search).state.ended
    monkeypatch.undo()
    looked(searchers, lambda: store.search(search).state.ended)
    assert (store.search(search).state, store.search(search).attempt) == ("done", 1)


def test_lines_that_are_no_events_are_left_out(searchers, store, submit, monkeypatch):
    """Code of users runs in the process and can write to its files."""
    monkeypatch.setattr(searchers_module, "MOST_READ", 10_000)
    search = submit("writes nonsense")
    looked(searchers, lambda: store.search(search).state.ended)
    record = store.search(search)
    assert (record.state, record.reason, record.attempt) == ("failed", "with a  in it", 1), "it is not repeated"
    assert kinds(store, search) == ["queued", "running", "plan", "said", "failed"]


def test_a_search_that_cannot_be_managed_is_ended_and_others_are_not(searchers, store, submit, monkeypatch):
    broken, other = submit("runs"), submit("succeeds")
    read = searchers._read

    def breaks(contender):
        if contender.search == broken:
            raise KeyError("state")
        return read(contender)

    monkeypatch.setattr(searchers, "_read", breaks)
    looked(searchers, lambda: store.search(other).state.ended and store.search(broken).state.ended)
    assert store.search(broken).reason == "the server cannot manage it: KeyError: 'state'"
    assert store.search(other).state == "done"


def test_a_process_without_its_task_does_nothing(tmp_path):
    """A server that is killed before the task is sent leaves no second process of a search behind."""
    command = [sys.executable, "-m", "redline.service.searcher"]
    ended = subprocess.run(command, input=b'{"search": "0123', capture_output=True, timeout=120, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr, list(tmp_path.iterdir())) == (0, b"", b"", [])


def test_code_that_was_accepted_before_is_not_run_with_no_code(store, cluster, ann, tmp_path):
    searchers = Searchers(store, cluster, ServeOptions(data=tmp_path, allow_code=False))
    request = {"command": {"command": "echo {x}"}}
    search = store.submit(ann, request, devices=1)[0].id
    looked(searchers, lambda: store.search(search).state.ended)
    assert "does not run submitted code" in store.search(search).reason


def test_use_is_charged_while_a_server_runs(searchers, store, submit, monkeypatch):
    monkeypatch.setattr(searchers_module, "CHARGE_S", 0.2)
    search = submit("runs", request={"concurrency": 3})
    looked(searchers, lambda: store.search(search).used_s > 0.5)
    (share,) = store.shares()
    assert share.week_s == pytest.approx(3 * store.search(search).used_s)
    used_s = store.search(search).used_s
    time.sleep(1.0)  # without a server
    searchers.look()
    assert store.search(search).used_s == used_s


def test_a_search_begins_with_winners_of_the_same_model(searchers, store, submit, tmp_path):
    searches = [submit("succeeds") for _ in range(2)]
    submit("succeeds", request={"finds": "nothing"})
    submit("fails")
    looked(searchers, lambda: not store.contenders())
    bob = store.add_user("bob")
    other = store.submit(bob, {"target": "succeeds", "trials": 9}, devices=1)[0].id
    looked(searchers, lambda: not store.contenders())
    (task,) = tasks(tmp_path, other)
    assert task["earlier"] == [str(folder_of(tmp_path, search)) for search in reversed(searches)]


def test_a_cluster_that_is_being_joined_is_waited_for(searchers, store, submit, cluster):
    search = submit("succeeds")
    store.give_devices(search, "H100", 1)  # by an earlier server
    cluster.failure, cluster.kinds = STARTING, ()
    for _ in range(3):
        searchers.look()
    assert store.search(search).state == "running"
    cluster.failure, cluster.kinds = None, (H100,)
    looked(searchers, lambda: store.search(search).state.ended)


def test_a_later_process_with_the_same_number_is_another_one():
    process = process_of(os.getpid())
    assert lives(process)
    assert not lives(type(process)(pid=process.pid, started=process.started - 1))
    child = subprocess.Popen(["true"])
    ended = type(process)(pid=child.pid, started=psutil.Process(child.pid).create_time())
    until(lambda: not lives(ended))
    assert process_of(child.pid) is None, "it was reaped"
