"""The process of a search: its outcome by the error that ends it, its file of events, a pause."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from processes import until
from redline.base.errors import NoRoom, RunnerError, StudyError, UsageError
from redline.service import searcher
from redline.service.searcher import EventFile, SearchTask, run


def task(folder, **fields):
    defaults = {
        "search": "0123456789ab", "folder": str(folder), "request": {"target": "gpt2-tiny"}, "kind": "H100",
        "concurrency": 1, "seconds": None, "address": "127.0.0.1:1", "memory_mib": 300.0,
    }  # fmt: skip
    return SearchTask(**(defaults | fields))


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("error", "state", "reason", "again"),
    [
        (NoRoom("others use the devices"), "queued", "others use the devices", False),
        (RunnerError("Ray was lost"), "queued", "Ray was lost", True),
        (StudyError("the disk is full"), "queued", "the disk is full", True),
        (UsageError("unknown knob"), "failed", "unknown knob", False),
        (MemoryError(), "failed", "more memory than its limit of 0.29", False),
        (SystemError("error return without exception set"), "failed", "more memory than its limit", False),
        (KeyboardInterrupt(), "queued", "", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_that_ends_a_search_decides_its_outcome(tmp_path, monkeypatch, error, state, reason, again):
    def fails(task, events):
        raise error

    monkeypatch.setattr(searcher, "_tuned", fails)
    run(task(tmp_path), EventFile(tmp_path / "events.jsonl"), threading.Event())
    (outcome,) = events(tmp_path)
    assert (outcome["kind"], outcome["data"]["state"], outcome["data"]["again"]) == ("outcome", state, again)
    assert reason in outcome["data"]["reason"] and outcome["data"]["best"] is None


def test_an_unexpected_error_has_no_outcome_so_that_the_search_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(searcher, "_tuned", lambda task, events: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(task(tmp_path), EventFile(tmp_path / "events.jsonl"), threading.Event())
    assert events(tmp_path) == []


def test_earlier_searches_that_do_not_fit_are_left_out(tmp_path, monkeypatch):
    calls = []

    def tune(target, **arguments):
        calls.append(arguments["warm_start"])
        if arguments["warm_start"]:
            raise UsageError("warm start: no trial succeeded")
        raise UsageError("the space is empty")

    monkeypatch.setattr(searcher, "tune", tune)
    with pytest.raises(UsageError, match="the space is empty"):
        searcher._tuned(task(tmp_path, earlier=("elsewhere",)), EventFile(tmp_path / "events.jsonl"))
    assert calls == [("elsewhere",), ()]


def test_a_line_that_a_killed_process_has_left_incomplete_does_not_spoil_the_next(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"time": 1.0, "kind": "said", "da')
    EventFile(tmp_path / "events.jsonl").write("said", message="next")
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[1])["data"] == {"message": "next"}


def test_a_pause_without_a_trial_in_progress_ends_the_process_at_once(tmp_path):
    program = (
        "import signal, sys, time; from pathlib import Path; from redline.service.searcher import EventFile\n"
        "events = EventFile(Path(sys.argv[1])); signal.signal(signal.SIGTERM, lambda number, frame: events.pause())\n"
        "events.write('waiting', what='a lock'); time.sleep(60)"
    )
    file = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", program, str(file)]) as process:
        until(lambda: file.exists() and file.read_text())
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0
    assert events(tmp_path)[-1]["data"] == {"state": "queued", "reason": "paused", "again": False}


def test_limits_of_a_process_are_set_before_anything_else(tmp_path):
    """Models that users describe are resolved in it."""
    program = (
        "import json, resource; from redline.service import searcher\n"
        "searcher.run = lambda task, events, cancelled: print(resource.getrlimit(resource.RLIMIT_DATA)[0], "
        "resource.getrlimit(resource.RLIMIT_CPU)[0])\n"
        "searcher.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=task(tmp_path).to_json(), capture_output=True, text=True, check=True
    )
    data_bytes, cpu_s = map(int, done.stdout.split())
    assert 300 * 2**20 < data_bytes < 3000 * 2**20 and cpu_s == searcher.CPU_S
