"""Several processes at one store: a dry run has one outcome, written with the latest lease, under any concurrency."""

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

import pool_process
import pytest
from redline.service.records import DryRunState
from redline.service.store import Store
from redline.service.store.dry_runs import MOST_ATTEMPTS
from redline.service.store.part import add_event
from service_pool import begun


class Processes:
    """Processes that begin at the same moment."""

    def __init__(self, url):
        self.url = url
        self.all = []

    def start(self, *arguments):
        self.all.append(
            subprocess.Popen(
                [sys.executable, pool_process.__file__, arguments[0], self.url, *map(str, arguments[1:])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return self.all[-1]

    def go(self):
        for each in self.all:
            assert each.stdout.readline() == "ready\n"
        for each in self.all:
            each.stdin.write("go\n")
            each.stdin.flush()

    def output(self):
        """Returns the lines that each process printed until it ended."""
        out = [each.communicate(timeout=300)[0].split("\n")[:-1] for each in self.all]
        assert [each.returncode for each in self.all] in ([0] * len(self.all), [*[0] * (len(self.all) - 1), -9])
        return out


@pytest.fixture
def processes(url):
    made = Processes(url)
    yield made
    for each in made.all:
        each.kill()
        each.communicate()


@pytest.fixture
def real(url):
    """A store with the real clock."""
    with Store.open(url) as made:
        yield made


def submitted(store):
    ann = store.add_user("ann")
    search, _ = store.submit(ann, {}, devices=1)
    return ann, search, begun(store, search.id, "Xeon")


def test_a_dry_run_is_answered_once_whoever_comes_late_or_dies(real, processes):
    ann, search, attempt = submitted(real)
    asked = [real.ask_dry_run(search.id, attempt, str(number), "run", {}, 1).id for number in range(40)]
    for seed in range(3):
        worker = real.join(ann, "w", "h", {"type": "cpu", "name": "Xeon"}, 3, 1024, {})
        processes.start("work", worker.id, seed)
    processes.start("reap")
    victim = real.join(ann, "w", "h", {"type": "cpu", "name": "Xeon"}, 3, 1024, {})
    processes.start("work", victim.id, 99)
    processes.go()
    processes.all[-1].stdout.readline()  # it has done something
    processes.all[-1].kill()
    answers = [tuple(map(int, line.split())) for lines in processes.output() for line in lines]
    # The pipe may lose the killed process's last line; the store has its answer.
    assert max(Counter(answers).values()) == 1
    done = {each.id: each for each in real.dry_runs(search.id)}
    assert set(done) == set(asked)
    assert {each.state for each in done.values()} == {DryRunState.DONE}
    for (
        dry_run,
        lease,
    ) in answers:  # no acknowledged answer was replaced, and no answer of an earlier lease was accepted
        assert done[dry_run].outcome["lease"] == lease == done[dry_run].lease
    assert len(dict(answers)) == len(answers)
    for each in done.values():
        if "lease" not in each.outcome:
            assert each.outcome["status"] == "crash" and each.attempts == MOST_ATTEMPTS
    ended = [each.data["dry_run"] for each in real.events(limit=100_000) if each.data.get("state") == "done"]
    assert sorted(ended) == sorted(asked)  # each has one event


def at_once(url, *tasks):
    """Runs the tasks at the same moment, each with its own store, and returns their results."""
    go = threading.Barrier(len(tasks))

    def run(task):
        with Store.open(url, create=False, patience_s=60) as store:
            go.wait()
            return task(store)

    with ThreadPoolExecutor(len(tasks)) as threads:
        return [each.result() for each in [threads.submit(run, task) for task in tasks]]


def test_concurrent_attempts_of_a_search_have_one_latest(url, real):
    _, search, attempt = submitted(real)
    taken = at_once(url, *[lambda store: store.take_search(search.id)] * 6)
    assert sorted(taken) == [attempt + 1 + number for number in range(6)]
    assert real.search(search.id).attempt == attempt + 6


def test_a_key_used_by_many_at_once_is_one_search(url, real):
    ann = real.add_user("ann")
    found = at_once(url, *[lambda store: store.submit(ann, {"model": "gpt2"}, devices=1, key="k")] * 6)
    assert len({search.id for search, _ in found}) == len(real.searches()) == 1
    assert [new for _, new in found].count(True) == 1


def test_concurrent_readers_miss_no_event_and_each_key_is_one_dry_run(url, real):
    """Postgres assigns numbers before transactions end: one that ends later must not have the lower number."""
    ann, one, attempt = submitted(real)
    other, _ = real.submit(ann, {}, devices=1)
    attempts = {one.id: attempt, other.id: real.take_search(other.id)}
    seen, writing = [], threading.Event()

    def asker(search):
        return lambda store: [
            store.ask_dry_run(search, attempts[search], str(key), "run", {}, 1).id for key in range(30)
        ]

    def reader(store):
        while not writing.is_set() or store.events(after=seen[-1] if seen else 0):
            seen.extend(each.id for each in store.events(after=seen[-1] if seen else 0, limit=7))

    def waiter(asking):
        out = at_once(url, *asking)
        writing.set()
        return out

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(waiter, [asker(one.id), asker(one.id), asker(other.id), asker(other.id)])
        reader(real)
        first, again, others, others_again = asked.result()
    assert first == again and others == others_again and not set(first) & set(others)
    assert seen == [each.id for each in real.events(limit=100_000)]
    assert len(seen) == 5 + 60


def test_no_event_appears_before_one_with_a_lower_number(url, real):
    """A transaction with an event blocks the others until it ends; otherwise a reader would miss its event for good."""
    ready, go_on = threading.Event(), threading.Event()

    def slowly(connection):
        add_event(connection, 0.0, None, "first", {})
        ready.set()
        go_on.wait()

    with Store.open(url) as one, Store.open(url, patience_s=60) as two, ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.database.write, slowly)
        ready.wait()
        second = threads.submit(two.add_event, None, "second", {})
        wait([second], timeout=0.5)  # it must not finish within this time
        seen = [each.kind for each in real.events()]
        go_on.set()
        first.result()
        second.result()
    assert seen == []
    assert [each.kind for each in real.events()] == ["first", "second"]
