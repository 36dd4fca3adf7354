"""A Ray cluster that is gone for a while: searches pause with the reason, and continue when it is back.

`REDLINE_AWAY_S=600` sets how long it is gone.
"""

import os
import signal
import socket
import sys
import time

import pytest
import redline as rl
from clusters import joined
from processes import until
from server_process import Server

AWAY_S = float(os.environ.get("REDLINE_AWAY_S", "60"))
WITHIN_S = 240.0
TRIALS = 6
PROGRAM = (
    "import time; time.sleep(1 + {x} % 2); [print('speed:', {x}, flush=True) or time.sleep(0.05) for _ in range(6)]"
)


def free_port():
    with socket.socket() as bound:
        bound.bind(("", 0))
        return bound.getsockname()[1]


def submitted(client, name):
    command = rl.Command(command=[sys.executable, "-c", PROGRAM], metric=(r"speed: (?P<tokens_per_second>\d+)",))
    values = {"x": list(range(1, 2 * TRIALS + 1))}
    return client.submit(command, name=name, override=values, trials=TRIALS, patience=0, sampler="random")


def finished(run):
    """Returns the trials that a search has reported as ended, with their speeds."""
    return {event.data["trial"]: event.data["throughput"] for event in run.history() if event.kind == "finished"}


@pytest.mark.slow
@pytest.mark.timeout(int(AWAY_S) + 900)
def test_searches_wait_for_a_cluster_that_is_gone_and_continue_when_it_is_back(tmp_path):
    head = ({"num_cpus": 2, "gcs_server_port": free_port()},)
    with joined(head) as (address, _):
        server = Server(tmp_path, "--port", "0", "--ray-address", address)
        token, server_address = server.line("REDLINE_TOKEN=(.*)"), server.line("serve on (http://[^,]*),")
        client = rl.Client(server_address, token=token, patience_s=60)
        runs = [submitted(client, name) for name in ("one", "two")]
        until(lambda: all(run.look().trials >= 2 for run in runs), WITHIN_S)
    gone = time.monotonic()  # all processes of the cluster were killed
    try:
        until(lambda: [run.state for run in runs] == ["queued", "queued"], WITHIN_S)
        until(lambda: all(address in run.look().reason for run in runs), 60)
        reasons = [run.look().reason for run in runs]
        assert all(reason.endswith("failed: [Errno 111] Connection refused") for reason in reasons), reasons
        assert client.queue().devices == []
        before = [finished(run) for run in runs]
        late = submitted(client, "late")
        while (left := gone + AWAY_S - time.monotonic()) > 0:
            time.sleep(min(5.0, left))
            assert {run.state for run in (*runs, late)} == {"queued"}, [run.look().reason for run in runs]
        assert [finished(run) for run in runs] == before
        assert all(address in run.look().reason for run in (*runs, late))
        with joined(head) as (address_again, _):
            assert address_again == address
            for run in (*runs, late):
                assert run.wait(timeout=WITHIN_S).state == "done", run.look().reason
                events = [event.data["trial"] for event in run.history() if event.kind == "finished"]
                assert sorted(events) == list(range(TRIALS)) == list(run.trials["trial"]), "each trial ended once"
                assert set(run.trials["status"]) == {"ok"}
            for run, earlier in zip(runs, before):
                assert earlier.items() <= finished(run).items() and len(earlier) >= 2
                states = [event.data["state"] for event in run.history() if event.kind == "search"]
                assert states == ["queued", "running", "queued", "running", "done"]
    finally:
        server.end(signal.SIGTERM)
