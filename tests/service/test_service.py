"""`redline serve` with a Ray of its own: real searches, live output, cancelling and retrying, limits of a process."""

import re
import signal
import subprocess
import sys

import pytest
import redline as rl
from processes import until
from server_process import Server

PROGRAM = "import time; print('begun', flush=True); time.sleep({x} % 3 + 0.5); " + (
    "[print('speed:', {x}, flush=True) or time.sleep(0.05) for _ in range(6)]"
)
WITHIN_S = 300.0


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    server = Server(folder, "--port", "0", "--devices", "2", "--search-memory", "2GiB")
    token, address = server.line("REDLINE_TOKEN=(.*)"), server.line("serve on (http://[^,]*),")
    with rl.Client(address, token=token, patience_s=60) as client:
        client.command = [sys.executable, "-m", "redline.cli"]
        client.environment = ["--server", address, "--token", token]
        yield client
    assert server.end(signal.SIGTERM) == 0, server.log.read_text()
    assert until(lambda: not (folder / "data" / "ray.json").exists())


def submitted(client, trials=3, **options):
    command = rl.Command(command=[sys.executable, "-c", PROGRAM], metric=(r"speed: (?P<tokens_per_second>\d+)",))
    values = {"x": list(range(1, 4 * trials))}
    return client.submit(command, override=values, trials=trials, patience=0, sampler="random", **options)


@pytest.mark.timeout(600)
def test_a_search_is_submitted_waited_for_and_exported_by_commands(client):
    """The two commands of the documentation, with nothing else started."""
    short = ["--trials", "1", "--fix", "fusion=false", "--seq-len", "64", "--measure-time", "0.5s"]
    submit = [*client.command, "submit", "gpt2-tiny", *short, "--wait"]
    done = subprocess.run([*submit, *client.environment], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    search = done.stdout.split()[0]
    assert re.search(r"running on .*\n", done.stdout) and "winner   trial" in done.stdout
    run = client.search(search)
    assert list(run.trials["trial"]) == [0] and run.best.throughput == run.look().best["throughput"]
    assert client.queue().devices[0].total == 2 and client.queue().devices[0].busy == 0
    assert "micro_batch" in run.export("yaml")


@pytest.mark.timeout(600)
def test_a_cancelled_search_is_retried_and_repeats_no_finished_trial(client):
    run = submitted(client, trials=4)
    until(lambda: any(event.kind == "started" for event in run.history()), WITHIN_S)
    assert b"begun" in until(lambda: run.log(0)), "output arrives while the trial runs"
    until(lambda: run.look().trials >= 1, WITHIN_S)
    run.cancel()
    until(lambda: client.queue().devices[0].busy == 0, 90)
    look = run.look()
    assert (look.state, look.best is not None) == ("cancelled", True) and 1 <= len(run.trials) < 4
    run.retry()
    assert run.wait(timeout=WITHIN_S).state == "done"
    finished = [event.data["trial"] for event in run.history() if event.kind == "finished"]
    assert finished == [0, 1, 2, 3] == list(run.trials["trial"])


@pytest.mark.timeout(600)
def test_a_request_that_cannot_run_fails_with_the_reason(client):
    run = client.submit("gpt2-tiny", fix={"micro_bach": 4})
    assert run.wait(timeout=WITHIN_S).state == "failed"
    assert "did you mean 'micro_batch'" in run.look().reason
