"""Runners that a worker on a Ray cluster keeps warm: each holds devices and serves one dry run at a time."""

import contextlib

import pytest
from redline.base.errors import RunnerError
from redline.runners import Runner
from redline.service.records import Assignment
from redline.service.warm import WarmRunners


class Holding(Runner):
    """Holds devices until it is closed."""

    name = "ray"

    def __init__(self, search, devices):
        self.search, self.devices, self.lost = search, devices, False

    def wait_ready(self):
        if self.lost:
            raise RunnerError("Ray was lost")

    def run(self, request):
        raise NotImplementedError

    def close(self):
        self.closed = True


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """Warm runners with four devices. `made` lists all runners created; the open ones never exceed four devices."""
    kept = WarmRunners("ray", 4, tmp_path, address="127.0.0.1:1")
    kept.made = []

    def make(assignment, folder):
        folder.mkdir(parents=True)
        (folder / "workload.py").write_text("")
        held = sum(each.devices for each in kept.made if not each.closed)
        assert held + assignment.devices <= 4, "more devices than there are"
        kept.made.append(Holding(assignment.search, assignment.devices))
        return kept.made[-1]

    monkeypatch.setattr(kept, "_make", make)
    yield kept
    kept.close()
    assert all(each.closed for each in kept.made)
    assert not list(tmp_path.iterdir()), "the files of requests go with their runners"


def leased(search, number, devices=2):
    return Assignment(
        dry_run=number, lease=1, worker="w", until=0.0, search=search, attempt=1, user=1, request={}, kind="run",
        payload={}, devices=devices,
    )  # fmt: skip


def test_each_dry_run_at_a_time_has_a_runner_of_its_own_and_the_next_one_finds_it_warm(warm):
    with warm.runner(leased("a", 1)) as one, warm.runner(leased("a", 2)) as two:
        assert one is not two
    with warm.runner(leased("a", 3)) as again:
        assert again in (one, two) and not again.closed
    assert len(warm.made) == 2


def test_an_idle_runner_goes_when_another_search_needs_its_devices_and_not_before(warm):
    with warm.runner(leased("a", 1)) as first:
        pass
    with warm.runner(leased("b", 2)) as second:
        assert not first.closed
        with warm.runner(leased("c", 3)):
            assert first.closed and not second.closed


def test_idle_runners_of_another_size_make_room_so_that_a_gang_is_not_kept_out(warm):
    with contextlib.ExitStack() as stack:
        singles = [stack.enter_context(warm.runner(leased("a", number, devices=1))) for number in range(2)]
    with warm.runner(leased("b", 9, devices=2)):
        assert [each.closed for each in singles] == [True, True]


def test_a_lost_runner_is_closed_and_replaced(warm):
    with warm.runner(leased("a", 1)) as runner:
        runner.lost = True
    with pytest.raises(RunnerError, match="Ray was lost"), warm.runner(leased("a", 2)):
        pass
    assert runner.closed
    with warm.runner(leased("a", 3)) as another:
        assert another is not runner


def test_a_dry_run_is_ended_with_its_runner_and_no_other(warm, tmp_path):
    with warm.runner(leased("a", 1)) as one, warm.runner(leased("a", 2)) as two:
        warm.stop(leased("a", 1), tmp_path / "1.log")
        assert (one.closed, two.closed) == (True, False)


def test_a_cluster_that_is_away_is_told_before_a_worker_joins(warm):
    with pytest.raises(RunnerError, match=r"joining the Ray cluster at '127\.0\.0\.1:1' failed"):
        warm.check()
