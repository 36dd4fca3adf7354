"""`redline serve` as a process, with a Ray of its own: killed during a search and restarted, it continues the search."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import redline as rl
from processes import left_of, until
from redline.base.errors import UsageError
from redline.service.serve_options import ServeOptions
from redline.service.server import serve
from redline.views.dashboard.serve import listen
from server_process import Server

PROGRAM = "import time; time.sleep({x} % 3); [print('speed:', {x}, flush=True) or time.sleep(0.05) for _ in range(6)]"


@pytest.fixture
def servers(tmp_path):
    """Starts servers in one folder; the last one is ended, with its Ray."""
    started = []

    def start(*options):
        started.append(Server(tmp_path, *options))
        return started[-1]

    yield start
    assert started[-1].end(signal.SIGTERM) == 0
    assert "stopped" in started[-1].log.read_text()
    assert until(lambda: not (tmp_path / "data" / "ray.json").exists())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_outlives_a_server_that_is_killed_and_the_next_one_takes_it_up(servers, tmp_path):
    first = servers("--port", "0", "--devices", "1")
    token, address = first.line("REDLINE_TOKEN=(.*)"), first.line("serve on (http://[^,]*),")
    client = rl.Client(address, token=token, patience_s=120)
    command = rl.Command(command=[sys.executable, "-c", PROGRAM], metric=(r"speed: (?P<tokens_per_second>\d+)",))
    run = client.submit(command, override={"x": list(range(1, 13))}, trials=6, patience=0, sampler="random")
    until(lambda: run.look().trials >= 1, 200)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    searcher = next(process for process in psutil.process_iter() if process.name() == f"rl-{run.id}")
    time.sleep(2)
    assert searcher.is_running() and (tmp_path / "data" / "ray.json").exists()
    second = servers("--port", address.rpartition(":")[2], "--devices", "1")
    assert run.wait(timeout=300).state == "done"
    assert not searcher.is_running() or searcher.status() == psutil.STATUS_ZOMBIE
    states = [event.data["state"] for event in run.history() if event.kind == "search"]
    assert states == ["queued", "running", "done"], "one process has run it"
    finished = [event.data["trial"] for event in run.history() if event.kind == "finished"]
    assert finished == sorted(set(finished)) == list(range(6)) == list(run.trials["trial"])
    assert run.best.throughput == pytest.approx(run.look().best["throughput"])
    assert "first start" not in second.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_this_hosts_ray_ends_some_time_after_its_last_server(tmp_path):
    file = tmp_path / "ray.json"
    program = "from redline.service import local_ray; local_ray.ALONE_S = 8.0; local_ray.main()"
    with subprocess.Popen([sys.executable, "-c", program, str(file), "1"], start_new_session=True) as keeper:
        until(file.exists, 120)
        family = psutil.Process(keeper.pid).children(recursive=True)
        for _ in range(12):  # a server uses it
            os.utime(file)
            time.sleep(1)
        assert keeper.poll() is None and any("raylet" in process.name() for process in family)
        assert keeper.wait(60) == 0
    assert left_of(family) == []


@pytest.mark.slow
def test_a_second_server_of_a_folder_is_refused_with_the_reason(tmp_path):
    first = Server(tmp_path, "--port", "0")
    first.line("serve on (http)")
    try:
        second = Server(tmp_path, "--port", "0")
        assert second.process.wait(timeout=60) == 2
        assert "is in use by process" in second.log.read_text()
        third = Server(tmp_path / "other", "--storage", "mysql://x/y") if os.mkdir(tmp_path / "other") is None else None
        assert third.process.wait(timeout=60) == 2 and "mysql" in third.log.read_text()
    finally:
        assert first.end(signal.SIGTERM) == 0


def test_answers_do_not_wait_to_be_acknowledged():
    with listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"port": 70_000}, "port must be a whole number from 0 to 65535, but got 70000"),
        ({"searches": 0}, "searches must be a whole number of at least 1"),
        ({"search_memory": "much"}, "search memory must be an amount"),
        ({"keep_searches": -1}, "keep_searches must be at least 0"),
    ],
)
def test_options_of_a_server_are_checked(option, message):
    with pytest.raises(UsageError, match=message):
        ServeOptions(**option)


def test_the_memory_of_a_searcher_is_given_with_a_unit_or_in_mib():
    assert [ServeOptions(search_memory=each).memory_mib for each in ("4GiB", 512)] == [4096.0, 512.0]


def test_a_file_in_place_of_the_servers_folder_is_refused(tmp_path):
    (tmp_path / "data").touch()
    with pytest.raises(UsageError, match="--data .* is a file"):
        serve(ServeOptions(data=tmp_path / "data"))
