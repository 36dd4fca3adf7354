"""`redline serve` as a process: killed during a search and restarted, it continues the search."""

import os
import signal
import socket
import time

import pytest
import redline as rl
from redline.base.errors import UsageError
from redline.service.serve_options import ServeOptions
from redline.service.server import serve
from redline.views.dashboard.serve import listen
from server_process import Server


@pytest.mark.slow
def test_a_server_that_was_killed_takes_its_searches_up_again(tmp_path):
    first = Server(tmp_path, "--port", "0", "--no-worker")
    token, address = first.line("REDLINE_TOKEN=(.*)"), first.line("serve on (http://[^,]*),")
    port = address.rpartition(":")[2]
    client = rl.Client(address, token=token, patience_s=120)
    run = client.submit("gpt2-tiny", runner="simulate", hardware="h100-80gb", global_batch=64, trials=12)
    until = time.monotonic() + 120
    while run.state == "queued" and time.monotonic() < until:
        time.sleep(0.1)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    second = Server(tmp_path, "--port", port, "--no-worker")
    try:
        assert run.wait(timeout=400).state == "done"
        assert sorted(run.trials["trial"]) == list(range(len(run.trials)))
        assert run.best.throughput == pytest.approx(run.look().best["throughput"])
        assert "first start" not in second.log.read_text()
    finally:
        assert second.end(signal.SIGTERM) == 0
    assert "stopped" in second.log.read_text()


@pytest.mark.slow
def test_a_second_server_of_a_folder_is_refused_with_the_reason(tmp_path):
    first = Server(tmp_path, "--port", "0", "--no-worker")
    first.line("serve on (http)")
    try:
        second = Server(tmp_path, "--port", "0", "--no-worker")
        assert second.process.wait(timeout=60) == 2
        assert "is in use by process" in second.log.read_text()
        third = Server(tmp_path / "other", "--storage", "mysql://x/y") if os.mkdir(tmp_path / "other") is None else None
        assert third.process.wait(timeout=60) == 2 and "mysql" in third.log.read_text()
    finally:
        assert first.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_standby_server_takes_over_when_the_first_is_killed(tmp_path):
    first = Server(tmp_path, "--port", "0", "--no-worker")
    token, address = first.line("REDLINE_TOKEN=(.*)"), first.line("serve on (http://[^,]*),")
    second = Server(tmp_path, "--port", address.rpartition(":")[2], "--no-worker", "--standby")
    try:
        second.line("(waiting on standby: .* is in use by process)")
        assert second.process.poll() is None
        first.end(signal.SIGKILL)
        second.line("serve on (http)")
        assert rl.Client(address, token=token, patience_s=60).me().role == "admin"
    finally:
        assert second.end(signal.SIGTERM) == 0


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
        ({"rate": 0.5}, "rate must be at least 1"),
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
