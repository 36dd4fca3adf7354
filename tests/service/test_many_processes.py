"""Several processes at one store: whatever they do at once, a dry run has one outcome, by the lease that was the latest."""

import subprocess
import sys
from collections import Counter

import pool_process
import pytest
from redline.service.records import DryRunState
from redline.service.store import Store
from redline.service.store.dry_runs import MOST_ATTEMPTS


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

    def said(self):
        """What each printed until it ended."""
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
    """A store whose clock is the true one."""
    with Store.open(url) as made:
        yield made


def submitted(store):
    ann = store.add_user("ann")
    search, _ = store.submit(ann, {}, devices=1)
    return ann, search, store.take_search(search.id)


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
    answers = [tuple(map(int, line.split())) for lines in processes.said() for line in lines]
    # What its last line was is lost with the pipe's reader, not what the store has of it.
    assert max(Counter(answers).values()) == 1
    done = {each.id: each for each in real.dry_runs(search.id)}
    assert set(done) == set(asked)
    assert {each.state for each in done.values()} == {DryRunState.DONE}
    for dry_run, lease in answers:  # no acknowledged answer was replaced, and none by an earlier lease was taken
        assert done[dry_run].outcome["lease"] == lease == done[dry_run].lease
    assert len(dict(answers)) == len(answers)
    for each in done.values():
        if "lease" not in each.outcome:
            assert each.outcome["status"] == "crash" and each.attempts == MOST_ATTEMPTS
    ended = [each.data["dry_run"] for each in real.events(limit=100_000) if each.data.get("state") == "done"]
    assert sorted(ended) == sorted(asked)  # and told once


def test_a_key_asked_for_by_many_at_once_is_one_dry_run(real, processes):
    _, search, attempt = submitted(real)
    for _ in range(3):
        processes.start("ask", search.id, attempt, 30)
    processes.go()
    first, *others = processes.said()
    assert len(first) == 30 and all(each == first for each in others)
    assert len(real.dry_runs(search.id)) == 30


def test_of_many_who_take_a_search_up_one_has_the_latest_attempt(real, processes):
    _, search, attempt = submitted(real)
    for _ in range(4):
        processes.start("take", search.id)
    processes.go()
    assert sorted(int(line) for (line,) in processes.said()) == [attempt + 1, attempt + 2, attempt + 3, attempt + 4]
    assert real.search(search.id).attempt == attempt + 4


def test_whoever_reads_events_as_they_come_misses_none(real, processes):
    """On Postgres numbers are given before transactions end: one that ends later must not have the lower number."""
    _, search, attempt = submitted(real)
    other, _ = real.submit(real.user("ann"), {}, devices=1)
    attempts = {search.id: attempt, other.id: real.take_search(other.id)}
    for each, number in attempts.items():
        processes.start("ask", each, number, 60)
        processes.start("ask", each, number, 60)
    processes.go()
    seen, after = [], 0
    while any(each.poll() is None for each in processes.all) or real.events(after=after):
        for each in real.events(after=after, limit=7):
            seen.append(each.id)
            after = each.id
    processes.said()
    assert seen == [each.id for each in real.events(limit=100_000)]
    assert len(seen) == 4 + 120
