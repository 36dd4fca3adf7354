"""Reading a folder from a stranger opens only files inside it and writes nothing."""

import socket
import sqlite3
import subprocess
import sys
import threading

import pytest
import yaml
from damage import ASKED, KNOBS, copied, make_run
from redline.base.errors import RedlineError, StudyError
from redline.results import RunFolder, View
from redline.tuner.history import leaders_of
from redline.views.report import Source


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("whole") / "whole")


def names_storage(run, url):
    document = yaml.safe_load((run / "run.yaml").read_text())
    (run / "run.yaml").write_text(yaml.safe_dump(document | {"storage": url}))


def redline(*arguments, cwd):
    code = "import sys; from redline.cli import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=300
    )


@pytest.mark.parametrize("there", [False, True])
def test_no_database_that_a_run_names_is_opened_or_made(whole, tmp_path, there):
    run, database = copied(whole, tmp_path / "run"), tmp_path / "victim.db"
    names_storage(run, f"sqlite:///{database}")
    if there:
        sqlite3.connect(database).execute("create table mine (a)").connection.close()
    before = database.read_bytes() if there else None
    for read in (View, Source.read, lambda folder: leaders_of([folder])):
        with pytest.raises(RedlineError, match="only if you name it with `storage`"):
            read(run)
    assert (database.read_bytes() if database.exists() else None) == before


def test_no_storage_that_unpickles_is_opened_even_by_name(whole, tmp_path):
    """Optuna would unpickle a snapshot that the server sends. This server records whether anything connected."""
    asked_for = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            try:
                server.accept()
                asked_for.set()
            except OSError:
                return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        for kind in (url, url.replace("redis", "rediss"), url.replace("redis", "REDIS"), "unix://x"):
            with pytest.raises(StudyError, match="unpickles"):
                View(whole, storage=kind)
            with pytest.raises(StudyError, match="unpickles"):
                RunFolder.open(tmp_path / "new", ASKED, knobs=KNOBS, storage=kind)
        assert not (tmp_path / "new" / "run.yaml").exists()
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert not asked_for.is_set()


def test_a_run_is_resumed_in_its_storage_only_where_it_is_named_again(tmp_path):
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    run = make_run(tmp_path / "run", storage=url)
    with pytest.raises(StudyError, match=r"add storage='sqlite:///"):
        RunFolder.open(run, ASKED, knobs=KNOBS, resume=True)
    with RunFolder.open(run, ASKED, knobs=KNOBS, storage=url, resume=True) as again:
        assert len(again.trials()) == 9


@pytest.mark.parametrize("name", ["run.yaml", "best.yaml", "study.log"])
def test_links_out_of_a_run_are_not_read(whole, tmp_path, name):
    run, secret = copied(whole, tmp_path / "run"), tmp_path / "secret"
    (run / name).rename(secret)
    (run / name).symlink_to(secret)
    problems = []
    for read in (Source.read, View):
        try:
            problems += read(run).problems
        except StudyError as error:
            problems.append(str(error))
    assert any("symbolic link" in each for each in problems)


@pytest.mark.parametrize(
    "name",
    [".trials.csv.tmp", ".best.yaml.tmp", ".run.yaml.tmp", ".reserve", ".lock", "study.log", "logs", "logs/9.log"],
)
def test_links_in_out_are_not_followed_when_writing(whole, tmp_path, name):
    run, victim = copied(whole, tmp_path / "run"), tmp_path / "victim"
    if name == "logs":
        victim.mkdir()
        __import__("shutil").rmtree(run / name)
    else:
        victim.write_text((run / name).read_text() if name == "study.log" else "mine")
        (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    before = None if victim.is_dir() else victim.read_bytes()
    try:
        with RunFolder.open(run, ASKED, knobs=KNOBS, resume=True, warn=lambda message: None) as again:
            trial = again.start({"tp": 1}, sampler="bayes")
            again.log_path(9).write_text("a log")
            again.write_best(["redline"])
            assert trial.number == 9
    except StudyError as error:
        assert "link" in str(error) or "cannot write" in str(error)
    assert (sorted(victim.iterdir()) == []) if victim.is_dir() else (victim.read_bytes() == before)
