"""Code as its own Unix user: dry runs of code can read nothing of the worker's or the server's."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path

import pytest
from other_user import NOBODY, closed, only_root, open_python
from processes import until
from redline.base.device import detect
from redline.base.errors import UsageError
from redline.results import Measurement, Status
from redline.runners.job import Outcome
from redline.runners.protocol import Caller, Channel
from redline.runners.unix_user import UnixUser, unix_user
from redline.service.code_process import CodeProcess
from redline.service.logs import read_log
from redline.service.records import Assignment
from redline.service.request import digest
from redline.service.worker import Worker
from served import served
from service_pool import begun

TOOL = [sys.executable, "-m", "redline.cli"]
LONG_S = 300.0
LOOK = """
import json, os, pathlib
def readable(path):
    try:
        return bool(pathlib.Path(path).read_bytes())
    except OSError as error:
        return type(error).__name__
report = {"uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(), "env": sorted(os.environ), "home": os.environ["HOME"]}
report["files"] = {path: readable(path) for path in PATHS}
try:
    os.setuid(0)
    report["root"] = True
except OSError:
    report["root"] = False
print("REPORT", json.dumps(report), flush=True)
"""
WORKLOAD = """
import os
assert os.getuid() != 0, "read as root"
import torch, redline
LOOK
workload = redline.Workload(
    model=lambda: torch.nn.Linear(8, 8),
    batch=lambda size, seed: (torch.ones(size, 8), torch.zeros(size, 8)),
    loss=lambda output, batch: ((output - batch[1]) ** 2).mean(),
    global_batch=2,
)
"""


@pytest.fixture(scope="module")
def nobody():
    return only_root()


# -- which users are accepted --------------------------------------------------------------------------------


def test_a_user_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"unknown user of this host 'nobdy'.*did you mean 'nobody'"):
        unix_user("nobdy")


def test_a_user_from_whom_nothing_would_be_kept_is_refused(nobody, monkeypatch):
    with pytest.raises(UsageError, match="is an administrator of this host"):
        unix_user("root")
    monkeypatch.setattr(os, "geteuid", lambda: nobody.pw_uid)
    with pytest.raises(UsageError, match="the one that this process runs as"):
        unix_user(NOBODY)


def test_without_the_right_to_change_users_a_worker_does_not_start(nobody):
    """The code runs as a user without that right."""
    code = "from redline.runners.unix_user import unix_user; unix_user('daemon')"
    done = subprocess.run(
        [*open_python(), sys.executable, "-c", f"import os; os.setgroups([]); os.setgid({nobody.pw_gid}); "
         f"os.setuid({nobody.pw_uid}); {code}"],
        capture_output=True, text=True,
    )  # fmt: skip
    message = done.stderr.strip().splitlines()[-1]
    assert "UsageError: 'nobody' may not start processes of the user 'daemon': start this as root" in message, (
        done.stderr
    )


def test_a_user_who_cannot_run_this_python_is_refused(nobody):
    if closed() is None:
        pytest.skip("every user can run this Python")
    with pytest.raises(UsageError, match=f"the user '{NOBODY}' cannot run .*: install Python and redline where"):
        unix_user(NOBODY)


def test_with_ray_it_is_refused():
    user = UnixUser(name=NOBODY, uid=65534, gid=65534, groups=())
    with pytest.raises(UsageError, match="--code-user needs the runner 'local'"):
        Worker(None, name="w", host="h", devices=1, runner="ray", code_user=user)


def test_a_token_on_the_command_line_is_refused():
    command = [*TOOL, "worker", "--server", "http://127.0.0.1:9", "--token", "redline_x", "--code-user", NOBODY]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "every user of this host can see" in done.stderr


def test_the_environment_of_code_has_no_secrets_of_the_worker_s(monkeypatch, tmp_path):
    for name in ("REDLINE_TOKEN", "REDLINE_SERVER", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    user = UnixUser(name=NOBODY, uid=65534, gid=65534, groups=(44,))
    arguments = user.popen(tmp_path)
    assert "secret" not in arguments["env"].values() and arguments["env"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert (arguments["env"]["HOME"], arguments["env"]["USER"]) == (str(tmp_path), NOBODY)
    assert (arguments["user"], arguments["group"], arguments["extra_groups"]) == (65534, 65534, [44])


class Agent:
    """In place of a host agent: ends each of three concurrent jobs as a crash whose reason is its devices."""

    def __init__(self, imports):
        self._all = threading.Barrier(3)

    def run(self, job, key):
        self._all.wait(30)
        return Outcome(status=Status.CRASH, reason=",".join(job.device_ids))

    def also_import(self, imports):
        return

    wait_ready = close = lambda self: None


def test_concurrent_dry_runs_of_code_run_on_the_devices_lent_to_each(tmp_path, monkeypatch):
    """Regression: they shared all lent devices, so one could run on a device that the worker had taken back."""
    monkeypatch.setattr("redline.service.warm.HostAgent", Agent)
    here, there = Pipe()
    process = CodeProcess(Channel(there, plain=True), tmp_path, 3)
    serving = threading.Thread(target=process.serve)
    serving.start()
    caller = Caller(here, str, plain=True)
    space = {"knobs": [{"name": "x", "type": "choice", "values": [1]}]}
    request = {
        "command": {"command": "true {x}", "metric": [r"(?P<tokens_per_second>\d+)"]},
        "space": space,
        "devices": 1,
    }
    asked = {"config": {"x": 1}, "timeout_s": 60.0, "best_throughput": None, "reference": None, "soak": None}
    lent, calls = ("2", "1", "0"), []
    for number, each in enumerate(lent):
        payload = {"requests": [{**asked, "number": number, "log": f"{number}.log"}], "memory_limit_mib": 4000.0}
        of = {"dry_run": number, "lease": 1, "worker": "w", "until": 0.0, "search": "s", "attempt": 1, "user": 1}
        assignment = Assignment(**of, request=request, kind="run", payload=payload, devices=1)
        calls.append(caller.begin("run", asdict(assignment), (each,), str(tmp_path)))
    found = [call.result()["reason"] for call in calls]
    caller.close()
    serving.join(30)
    assert found == list(lent)


# -- real dry runs -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_worker(service, folder):
    """Runs `redline worker --code-user nobody` with its token in its environment, and yields its process."""
    environment = {**os.environ, "REDLINE_TOKEN": service.tokens["worker"], "REDLINE_SERVER": service.address}
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            [*open_python(), *TOOL, "worker", "--devices", "1", "--code-user", NOBODY],
            env=environment, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        until(lambda: service.store.workers() or process.poll() is not None, LONG_S)
        assert process.poll() is None, (folder / "output").read_text()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "output").read_text()
    assert "Traceback" not in (folder / "output").read_text()


def dry_run(service, request, config):
    """Submits a search with that request and asks for one dry run; returns the ids of both."""
    search, _ = service.store.submit(service.store.user("coder"), request, devices=1)
    asked = {"config": config, "number": 0, "log": "0.log", "timeout_s": 60.0}
    asked |= {"best_throughput": None, "reference": None, "soak": None}
    payload = {"requests": [asked], "memory_limit_mib": 4000.0}
    attempt = begun(service.store, search.id, detect().name)
    return search.id, service.store.ask_dry_run(search.id, attempt, "trial-0", "run", payload, 1).id


def reports_of(service, search):
    text = read_log(service.parts.runs.data, search, "0.log")[0].decode()
    return [json.loads(each) for each in re.findall(r"REPORT (\{.*\})", text)], text


@pytest.fixture
def place():
    """A folder that every user may enter: only the files' own permissions protect them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def service(place, nobody):
    with served(place) as running:
        yield running


def check(report, service, worker, nobody):
    """Checks what the code reports about its own user and about other users' files."""
    assert (report["uid"], report["gid"], report["groups"], report["root"]) == (
        nobody.pw_uid,
        nobody.pw_gid,
        [nobody.pw_gid],
        False,
    )
    assert not {"REDLINE_TOKEN", "REDLINE_SERVER"} & set(report["env"])
    database = service.store.database._reader.url.database
    assert report["files"] == {
        database: "PermissionError", f"{database}-wal": "PermissionError", f"/proc/{worker.pid}/environ": "PermissionError",
        f"/proc/{worker.pid}/cmdline": True,
    }  # fmt: skip
    assert not os.path.exists(report["home"]) or os.stat(report["home"]).st_uid == nobody.pw_uid


def looking(service, worker):
    database = service.store.database._reader.url.database
    paths = [database, f"{database}-wal", f"/proc/{worker.pid}/environ", f"/proc/{worker.pid}/cmdline"]
    return LOOK.replace("PATHS", repr(paths))


@pytest.mark.slow
def test_a_command_runs_as_that_user_and_reaches_nothing(service, place, nobody):
    with a_worker(service, place) as worker:
        code = (
            looking(service, worker)
            + "\nimport time\nfor each in range(6): print('speed:', X + 1, flush=True); time.sleep(.05)"
        )
        script = place / "train.py"
        script.write_text("import sys\nX = int(sys.argv[1])\n" + code)
        command = {"command": f"{sys.executable} {script} {{x}}", "metric": [r"speed: (?P<tokens_per_second>\d+)"]}
        space = {"knobs": [{"name": "x", "type": "choice", "values": [1, 2]}]}
        search, number = dry_run(service, {"command": command, "space": space, "devices": 1}, {"x": 2})
        outcome = until(lambda: service.store.outcome(number), LONG_S)
        assert Measurement.from_dict(outcome).status == "ok", outcome
        assert Measurement.from_dict(outcome).throughput == 3.0
        reports, text = reports_of(service, search)
        check(reports[0], service, worker, nobody)
        assert "speed: 3" in text


@pytest.mark.slow
def test_a_workload_that_is_code_is_read_and_run_as_that_user(service, place, nobody):
    with a_worker(service, place) as worker:
        text = WORKLOAD.replace("LOOK", looking(service, worker))
        request = {"workload": {"text": text, "sha256": digest(text), "name": "workload"}, "devices": 1}
        search, number = dry_run(service, request, {"micro_batch": 2})
        outcome = until(lambda: service.store.outcome(number), LONG_S)
        assert "refused" not in outcome, outcome
        reports, message = reports_of(service, search)
        assert Measurement.from_dict(outcome).status == "ok", message
        check(reports[0], service, worker, nobody)


@pytest.mark.slow
def test_a_link_in_the_place_of_the_log_is_not_read(service, place, nobody):
    """The log is replaced by a link to a file that the worker may read and the code may not."""
    secret = place / "secret"
    secret.write_text("the worker's alone")
    secret.chmod(0o600)
    with a_worker(service, place):
        script = place / "train.py"
        script.write_text(
            "import os, pathlib, sys, time\n"
            "log = pathlib.Path(sys.argv[1]).parents[1] / 'logs' / '0.log'\n"
            f"log.unlink(); log.symlink_to({str(secret)!r})\n"
            "for each in range(6): print('speed: 3', flush=True); time.sleep(.3)\n"
        )
        command = {
            "command": f"{sys.executable} {script} {{trial_dir}} {{x}}", "metric": [r"speed: (?P<tokens_per_second>\d+)"]
        }  # fmt: skip
        space = {"knobs": [{"name": "x", "type": "choice", "values": [1, 2]}]}
        search, number = dry_run(service, {"command": command, "space": space, "devices": 1}, {"x": 2})
        outcome = until(lambda: service.store.outcome(number), LONG_S)
        assert outcome.get("status") == "ok", outcome  # it has run, and so the link was made
        time.sleep(1)
        assert b"alone" not in read_log(service.parts.runs.data, search, "0.log")[0]


@pytest.mark.slow
def test_a_dry_run_of_code_that_is_cancelled_ends(service, place, nobody):
    with a_worker(service, place) as worker:
        command = {"command": "sleep 1000{x}", "metric": [r"speed: (?P<tokens_per_second>\d+)"]}
        space = {"knobs": [{"name": "x", "type": "choice", "values": [1, 2]}]}
        search, _ = dry_run(service, {"command": command, "space": space, "devices": 1}, {"x": 2})
        sleeping = lambda: subprocess.run(["pgrep", "-u", NOBODY, "-f", "^sleep 10002$"], capture_output=True).stdout  # noqa: E731
        until(sleeping, LONG_S)
        service.store.cancel(search)
        until(lambda: not sleeping(), LONG_S)
        assert worker.poll() is None
