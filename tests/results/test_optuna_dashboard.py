"""The ledger opens in optuna-dashboard."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest


def fetch(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return json.load(answer)


@pytest.fixture
def served(tmp_path, open_run, point, ok, oom):
    """Serves the ledger of a run with optuna-dashboard. Returns its port."""
    command = Path(sys.executable).with_name("optuna-dashboard")
    if not command.exists() and shutil.which("optuna-dashboard") is None:
        pytest.skip("optuna-dashboard is not installed")
    with open_run(tmp_path / "a") as run:
        for number in range(3):
            run.start(point(number), sampler="tpe")
            run.finish(number, oom(900.0) if number == 1 else ok(100.0 + number))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = subprocess.Popen(
        [str(command if command.exists() else "optuna-dashboard"), str(tmp_path / "a" / "study.log"),
         "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield server, port
    finally:
        server.terminate()
        server.wait(timeout=10)


@pytest.mark.slow
def test_optuna_dashboard_shows_the_trials_of_a_ledger(served):
    server, port = served
    end = time.monotonic() + 60
    while True:
        try:
            studies = fetch(port, "/api/studies")["study_summaries"]
            break
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, server.stderr.read()
            assert time.monotonic() < end, "optuna-dashboard did not answer within a minute"
            time.sleep(0.2)
    (study,) = studies
    assert study["study_name"] == "a" and study["directions"] == ["maximize"]
    detail = fetch(port, f"/api/studies/{study['study_id']}")
    assert [each["state"] for each in detail["trials"]] == ["Complete", "Fail", "Complete"]
    assert [each.get("values") for each in detail["trials"]] == [[100.0], None, [102.0]]
    parameters = {each["name"]: each["param_external_value"] for each in detail["trials"][2]["params"]}
    assert parameters["micro_batch"] == "4"
