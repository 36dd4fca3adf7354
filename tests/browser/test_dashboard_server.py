"""The dashboard's server: the runs that it finds and serves, access control, and files that it never serves."""

import http.client
import json
import os
import shutil
import socket
import urllib.parse

import pytest
from redline.base.errors import NotFound
from redline.cli import main
from redline.results import Measurement, Status, Trial
from redline.views.dashboard import Library
from redline.views.dashboard.library import find_folders
from redline.views.dashboard.serve import HEADERS


def get(address, target, method="GET", **headers):
    """Returns status, headers and body of one request; the target is sent unchanged."""
    where = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
    try:
        connection.putrequest(method, target, skip_host="host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def ask(address, target, **headers):
    """Returns the JSON of an answer; None for 204."""
    status, _, body = get(address, target, **headers)
    assert status in (200, 204), body
    return json.loads(body) if status == 200 else None


def query(**values):
    return urllib.parse.urlencode(values)


# -- runs that are found ---------------------------------------------------------------------------------------


def test_runs_are_found_at_any_depth_but_not_through_links_hidden_folders_or_logs(tmp_path, disk):
    root = tmp_path / "root"
    for name in ("a", "b/c/d", "b/c/e", ".hidden", "a/logs", "node_modules/x"):
        disk.write_run(root / name, 1)
    disk.write_run(tmp_path / "elsewhere", 1)
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "f").mkdir()
    (root / "f" / "trials.csv").symlink_to(tmp_path / "elsewhere" / "trials.csv")
    (root / "g" / "trials.csv").mkdir(parents=True)
    assert find_folders(root) == ["a", "b/c/d", "b/c/e"]
    assert find_folders(root / "a") == ["."]


def test_a_line_tells_what_was_simulated_or_lossy_where_and_whether_anything_won(tmp_path, disk):
    ok = [({"precision": "bf16_pure"}, disk.measured(1000.0))]
    devices = {"type": "cuda", "name": "h100-80gb", "count": 8, "used": 64}
    disk.write_search(tmp_path / "simulated", ok, simulated=True, devices=devices, lossy={"precision": ["bf16_pure"]})
    disk.write_search(
        tmp_path / "nothing", [({"precision": "bf16"}, disk.Measurement(status=Status.CRASH, reason="x"))]
    )
    lines = {line["run"]: line for line in Library(tmp_path).lines()}
    shown = {name: (line["simulated"], line["lossy"], line["devices"], line["state"]) for name, line in lines.items()}
    assert shown == {
        "simulated": (True, "precision=bf16_pure", "64 × h100-80gb", "finished"),
        "nothing": (False, "", "8 × H100", "nothing"),
    }
    assert all(line["began"][:2] == "20" for line in lines.values())


def test_a_deleted_run_leaves_the_list_with_a_message(tmp_path, disk, monkeypatch):
    monkeypatch.setattr("redline.views.dashboard.library.DISCOVERY_SECONDS", 1e9)
    for name in ("gone", "kept"):
        disk.write_run(tmp_path / name, 2)
    library = Library(tmp_path)
    assert len(library.lines()) == 2
    shutil.rmtree(tmp_path / "gone")
    assert [line["run"] for line in library.lines()] == ["kept"]
    with pytest.raises(NotFound, match="'gone' no longer exists"):
        library.changes("gone")


# -- live --------------------------------------------------------------------------------------------------------


def test_a_page_is_sent_again_only_if_its_run_has_changed(tmp_path, disk):
    trials = disk.write_run(tmp_path / "x", 30)
    library = Library(tmp_path)
    first = library.changes("x")
    assert first["document"]["rows"]["trial"] == list(range(30))
    assert library.changes("x", first["version"]) is None
    more = disk.write_run(tmp_path / "x", 33, seed=0)
    second = library.changes("x", first["version"])
    assert more[:30] == trials
    assert second["document"]["rows"]["trial"] == list(range(33))
    assert second["document"]["headline"]["trials"] == 33


def test_unchanged_runs_are_not_read_again(tmp_path, disk, monkeypatch):
    for number in range(12):
        disk.write_run(tmp_path / f"run-{number}", 3, seed=number)
    library = Library(tmp_path)
    held = {run: library.changes(run)["version"] for run in library.ids()}
    monkeypatch.setattr("redline.views.dashboard.library.Source.read", None)
    assert [library.changes(run, version) for run, version in held.items()] == [None] * 12


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.97])
def test_a_ledger_that_is_being_written_is_shown_by_its_whole_records(tmp_path, disk, keep):
    disk.write_run(tmp_path / "x", 40)
    path = tmp_path / "x" / "study.log"
    data = path.read_bytes()
    data = data[: int(len(data) * keep)]
    path.write_bytes(data)
    changes = Library(tmp_path).changes("x")
    assert changes["document"]["rows"]["trial"] == list(range(data.count(b"\n") - 1))


@pytest.mark.parametrize("data", [b"", b"\x00\xff" * 500, b"a,b\n1,2\n", b'{"op_code": 4}\n'])
def test_an_invalid_ledger_is_an_empty_run_with_a_reason(tmp_path, disk, data):
    disk.write_run(tmp_path / "good", 2)
    disk.write_run(tmp_path / "bad", 2)
    (tmp_path / "bad" / "study.log").write_bytes(data)
    library = Library(tmp_path)
    assert library.changes("bad")["document"]["rows"]["trial"] == []
    assert library.changes("bad")["document"]["problems"]
    assert {line["run"]: line["problems"] > 0 for line in library.lines()} == {"good": False, "bad": True}


# -- over HTTP ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory, serving_module, disk):
    """A folder with one run among secrets, its trials and its address."""
    top = tmp_path_factory.mktemp("served")
    (top / "secret.txt").write_text("SECRET")
    root = top / "runs"
    trials = disk.write_run(root / "a", 40)
    (root / "secret.txt").write_text("SECRET")
    (root / "a" / "logs").mkdir()
    for each in trials:
        name = each.measurement.log
        if name:
            (root / "a" / name).write_text(f"<b>trial {each.number}</b>\n" * 3)
    (root / "a" / "logs" / "link.log").symlink_to(top / "secret.txt")
    return root, trials, serving_module(root)


@pytest.fixture(scope="module")
def serving_module(serving_factory):
    with serving_factory() as start:
        yield start


def test_list_run_table_log_and_exports_are_served(served):
    root, trials, address = served
    listed = ask(address, "/api/runs")
    assert [line["run"] for line in listed["runs"]] == ["a"]
    run = ask(address, "/api/run?run=a")
    assert len(run["document"]["rows"]["trial"]) == 40
    assert ask(address, f"/api/run?{query(run='a', have=run['version'])}") is None
    status, headers, body = get(address, "/table?run=a")
    assert (status, body) == (200, (root / "a" / "trials.csv").read_bytes())
    assert headers["content-disposition"] == 'attachment; filename="a.csv"'
    ran = next(each for each in trials if each.measurement.log)
    log = ask(address, f"/api/log?run=a&trial={ran.number}")
    assert log["text"] == f"<b>trial {ran.number}</b>\n" * 3 and not log["cut"]
    status, headers, body = get(address, f"/log?run=a&trial={ran.number}")
    assert body.decode() == log["text"] and headers["content-type"].startswith("text/plain")
    names = {each["target"] for each in ask(address, f"/api/exports?run=a&trial={ran.number}")}
    assert {"yaml", "json", "accelerate", "deepspeed"} <= names


def test_every_answer_forbids_scripts_that_are_not_the_dashboards(served):
    for target in (
        "/",
        "/redline.js",
        "/redline.css",
        "/icon.svg",
        "/api/runs",
        "/table?run=a",
        "/nowhere",
        "/api/run?run=no",
    ):
        _, headers, _ = get(served[2], target)
        for name, value in HEADERS.items():
            assert headers.get_all(name) == [value], (target, name)
    assert "unsafe" not in HEADERS["content-security-policy"]


HOSTILE_PATHS = [
    "/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/secret.txt", "/a/trials.csv", "/a/logs/link.log",
    *(f"/{page}?{query(run=run)}" for page in ("table", "api/run") for run in ("..", "../runs/a", "a/", "a/.", "./a", "/", "", "a\0", "a/logs", "/etc", "a/../../")),
    *(f"/{page}?{query(run=run, trial=1)}" for page in ("log", "api/log", "api/exports") for run in ("..", "../runs/a", "a/logs")),
]  # fmt: skip


@pytest.mark.parametrize("target", HOSTILE_PATHS)
def test_no_path_leads_anywhere_but_to_the_runs(served, target):
    status, _, body = get(served[2], target)
    assert status in (404, 422), body
    assert b"SECRET" not in body and b"root:" not in body


@pytest.mark.parametrize(
    "log", ["../secret.txt", "/etc/passwd", "logs/../../secret.txt", "logs/link.log", "logs", "logs/pipe"]
)
def test_logs_outside_the_run_are_not_served_and_pipes_do_not_block(tmp_path, disk, serving, log):
    (tmp_path / "secret.txt").write_text("SECRET")
    folder = tmp_path / "runs" / "a"
    measurement = Measurement(status=Status.OK, throughput=5.0, log=log)
    disk.write_run(folder, 0, trials=[Trial(number=0, config={}, measurement=measurement)])
    (folder / "logs").mkdir()
    (folder / "logs" / "link.log").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(folder / "logs" / "pipe")
    address = serving(tmp_path / "runs")
    answer = ask(address, "/api/log?run=a&trial=0")
    assert "text" not in answer and answer["why"]
    status, _, body = get(address, "/log?run=a&trial=0")
    assert status == 404 and b"SECRET" not in body and b"root:" not in body


def test_unknown_runs_and_trials_are_named(served):
    status, _, body = get(served[2], "/api/run?run=b")
    assert status == 404 and b"unknown run 'b'" in body and b"Known: a" in body
    status, _, body = get(served[2], "/api/log?run=a&trial=77")
    assert status == 404 and b"no trial 77" in body


# -- access --------------------------------------------------------------------------------------------------------


def test_a_page_of_another_site_cannot_reach_it_by_a_name_of_its_own(served):
    address = served[2]
    port = urllib.parse.urlsplit(address).port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "localhost.evil"):
        status, _, body = get(address, "/api/runs", host=host)
        assert status == 400 and b'"runs"' not in body
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST"):
        assert get(address, "/api/runs", host=host)[0] == 200


# -- ports and addresses ---------------------------------------------------------------------------------------


def test_a_port_in_use_gives_way_to_the_next_free_one_and_says_so(tmp_path, disk, serving):
    disk.write_run(tmp_path / "a", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        messages = []
        address = serving(tmp_path, port=port, messages=messages)
        other = urllib.parse.urlsplit(address).port
        assert port < other <= port + 100
        assert messages[0] == f"port {port} is in use; serving on {other} instead"
        assert get(address, "/")[0] == 200


def run_command(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return ended.value.code, out + err


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"study.log": "trial,step_ms\n"}, "not a record"),
        ({"study.log": "", "run.yaml": "format: 0\nasked: {}\nstudy: x\n"}, "format"),
    ],
    ids=["ledger", "format"],
)
def test_a_folder_in_which_nothing_can_be_read_is_refused_and_says_what_is_missing(tmp_path, capsys, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code, output = run_command(capsys, "dashboard", tmp_path)
    assert code == 2 and words in output


def test_the_server_ends_when_interrupted(tmp_path, disk):
    import signal
    import subprocess
    import sys

    disk.write_run(tmp_path / "a", 1)
    process = subprocess.Popen(
        [sys.executable, "-m", "redline.cli", "dashboard", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        output = process.stdout.readline() + process.stdout.readline()
        assert "1 run" in output
        address = output.split()[-1]
        assert len(ask(address, "/api/runs")["runs"]) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
