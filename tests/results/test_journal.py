"""The ledger's file after kill -9, a power cut and other damage."""

import json
import os
import shutil
import signal
import time

import optuna
import pytest
from redline.base.errors import StudyError
from redline.results import Ledger


@pytest.fixture
def written(tmp_path, make_config, ok, oom):
    """A ledger with a success, a failure and a pending trial, and a function that opens a copy of it."""
    knobs = {"tp": (0, 1, 2, 3)}  # few, so that records are short
    path = tmp_path / "study.log"
    ledger = Ledger.open(path, name="a", metadata={"run": "1"}, knobs=knobs, make_config=make_config)
    sizes = [path.stat().st_size]
    for number, outcome in enumerate([ok(10.0), oom(2000.0), None]):
        ledger.start(make_config({"tp": number}), sampler="tpe")
        sizes.append(path.stat().st_size)
        if outcome:
            ledger.finish(number, outcome)
            sizes.append(path.stat().st_size)
    ledger.close()

    def reopen(data, folder):
        folder.mkdir()
        (folder / "study.log").write_bytes(data)
        return Ledger.open(folder / "study.log", name="a", metadata={"run": "1"}, knobs=knobs, make_config=make_config)

    return path.read_bytes(), sizes, reopen


def test_a_file_cut_off_loses_no_finished_trial_and_can_be_continued(written, tmp_path, make_config, ok):
    data, (_, _, finished_0, started_1, finished_1, _), reopen = written
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n") and i + 1 >= finished_0]
    lengths = sorted(
        {
            *ends,
            *(end - 1 for end in ends[1:]),
            *(end + 1 for end in ends[:-1]),
            *range(finished_0, len(data), 97),
        }
    )
    assert len(lengths) > 15
    for length in lengths:
        ledger = reopen(data[:length], tmp_path / "cut")
        trials = ledger.trials()
        finished = [trial.number for trial in trials if not trial.pending]
        assert 0 in finished
        if length >= finished_1:
            assert finished == [0, 1]
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert len(trials) >= 1 + (length >= started_1)
        for trial in ledger.pending():
            ledger.finish(trial.number, ok(99.0))
        ledger.start(make_config({"tp": 3}), sampler="tpe")
        ledger.close()
        again = Ledger.load(tmp_path / "cut" / "study.log").trials()
        assert [trial.number for trial in again] == list(range(len(trials) + 1))
        assert [trial.pending for trial in again] == [False] * len(trials) + [True]
        assert again[0].measurement.throughput == 10.0
        shutil.rmtree(tmp_path / "cut")


def test_an_outcome_whose_state_was_cut_off_counts_and_is_completed(written, tmp_path):
    data, (_, _, finished_0, *_), reopen = written
    lines = data[:finished_0].splitlines(keepends=True)
    assert json.loads(lines[-1])["op_code"] == 6
    ledger = reopen(b"".join(lines[:-1]), tmp_path / "cut")
    assert ledger.trials()[0].measurement.throughput == 10.0
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "cut" / "study.log"))
    study = optuna.load_study(study_name="a", storage=optuna.storages.JournalStorage(backend))
    assert study.best_value == 10.0


@pytest.mark.parametrize("bad", [b"not a record\n", b"[1, 2]\n", b'{"op_code": 4}\n', b'{"op_code": 99}\n'])
def test_damage_in_the_middle_is_reported_and_left_as_it_is(bad, written, tmp_path):
    data, _, reopen = written
    lines = data.splitlines(keepends=True)
    damaged = b"".join([*lines[:3], bad, *lines[3:]])
    with pytest.raises(StudyError, match=r"line 4 of .*study.log"):
        reopen(damaged, tmp_path / "bad")
    assert (tmp_path / "bad" / "study.log").read_bytes() == damaged
    assert [each.name for each in (tmp_path / "bad").iterdir()] == ["study.log"]


def test_the_lock_of_a_killed_process_is_removed_in_seconds(tmp_path, knobs, make_config, point):
    path = tmp_path / "study.log"
    Ledger.open(path, name="a", metadata={"run": "1"}, knobs=knobs, make_config=make_config).close()
    os.symlink(str(path), f"{path}.lock")
    begin = time.monotonic()
    ledger = Ledger.open(path, name="a", metadata={"run": "1"}, knobs=knobs, make_config=make_config)
    ledger.start(point(9), sampler="tpe")
    assert time.monotonic() - begin < 20, "Optuna would wait 30 s by default"
    ledger.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["study.log"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_lock_is_given_back_comes_when_it_is(tmp_path, monkeypatch, make_config, number):
    ledger = Ledger.open(tmp_path / "study.log", name="a", metadata={}, knobs={"tp": (0, 1)}, make_config=make_config)
    unlink = os.unlink

    def interrupted(path, **more):
        unlink(path, **more)
        if str(path).endswith(".rename"):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "unlink", interrupted)
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ledger.start(make_config({"tp": 0}), sampler="tpe")
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    monkeypatch.undo()
    ledger.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["study.log"]
    (kept,) = Ledger.load(tmp_path / "study.log", make_config=make_config).trials()
    assert kept.pending
