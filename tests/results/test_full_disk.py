"""A full or read-only disk is reported before the first trial, and a later one loses no outcome that was stored."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from redline.base import writing
from redline.base.errors import StudyError
from redline.results import Ledger, Measurement, Status, read_table


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a separate disk of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield disk
    while disk.is_mount():
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * 4096)
            except OSError:
                return


def crash(size: int = 0) -> Measurement:
    return Measurement(status=Status.CRASH, reason="x" * size)


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path, open_run, monkeypatch):
    monkeypatch.setattr(writing, "MIN_FREE_MIB", 10**9)
    with pytest.raises(StudyError, match=r"only [0-9.]+ MiB are free .* needs 1000000000 MiB"):
        open_run(tmp_path / "runs" / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_is_written(small_disk, open_run):
    fill(small_disk / "filler")
    with pytest.raises(StudyError, match=r"only 0\.0 MiB are free"):
        open_run(small_disk / "a")
    assert [each.name for each in small_disk.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_costs_no_finished_trial(small_disk, open_run, point, ok):
    warnings = []
    run = open_run(small_disk / "a", warn=warnings.append)
    for number in range(3):
        run.start(point(number), sampler="tpe")
    run.finish(0, ok(5.0))
    fill(small_disk / "filler")
    size = (small_disk / "a" / "study.log").stat().st_size

    with pytest.raises(StudyError, match="No space left on device"):
        for number in range(3, 50):  # the last page of the file may have room for a few
            run.start(point(number), sampler="tpe")
    started = len(run.trials())
    for number, outcome in ((1, crash(20_000)), (2, crash(30_000))):
        with pytest.raises(
            StudyError, match=rf"outcome of trial {number} could not be stored: .*No space left on device"
        ):
            run.finish(number, outcome)
    assert (small_disk / "a" / "study.log").stat().st_size < size + 20_000
    assert len(Ledger.load(small_disk / "a" / "study.log").trials()) == started
    run.close()

    (small_disk / "filler").unlink()
    with open_run(small_disk / "a", resume=True) as run:
        assert [trial.pending for trial in run.trials()] == [False] + [True] * (started - 1)
        assert run.trials()[0].measurement.throughput == 5.0
        run.finish(1, crash(20_000))
        assert run.trials()[1].measurement.reason == "x" * 20_000


def test_a_run_continues_when_space_is_free_again(small_disk, open_run, point, ok):
    run = open_run(small_disk / "a", warn=lambda message: None)
    run.start(point(0), sampler="tpe")
    fill(small_disk / "filler")
    with pytest.raises(StudyError, match="trial 0 could not be stored"):
        run.finish(0, crash(20_000))
    (small_disk / "filler").unlink()
    run.start(point(1), sampler="tpe")
    assert run.finish(1, ok(3.0)).ok
    run.close()
    assert [trial.pending for trial in Ledger.load(small_disk / "a" / "study.log").trials()] == [True, False]


def test_a_table_that_cannot_be_written_is_one_warning_and_made_up_for_later(tmp_path, open_run, point, ok):
    warnings = []
    with open_run(tmp_path, warn=warnings.append) as run:
        for number in range(3):
            run.start(point(number), sampler="tpe")
        run.finish(0, ok())
        # A folder blocks the temporary file: the same errors as for a table on a bad disk, for root too.
        (tmp_path / ".trials.csv.tmp").mkdir()
        run.finish(1, ok())
        run.finish(2, ok())
        assert len(warnings) == 1
        assert "cannot write" in warnings[0] and "trials.csv" in warnings[0]
        assert list(read_table(tmp_path / "trials.csv")["trial"]) == [0]
        (tmp_path / ".trials.csv.tmp").rmdir()
        run.start(point(3), sampler="tpe")
        run.finish(3, ok())
        assert list(read_table(tmp_path / "trials.csv")["trial"]) == [0, 1, 2, 3]
        run.start(point(4), sampler="tpe")
        (tmp_path / ".trials.csv.tmp").mkdir()
        run.finish(4, ok())
        (tmp_path / ".trials.csv.tmp").rmdir()
    assert list(read_table(tmp_path / "trials.csv")["trial"]) == [0, 1, 2, 3, 4]


def test_a_read_only_folder_is_an_error_before_the_first_trial(open_run, in_child):
    # Not below pytest's own folder, which only its owner can enter.
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o555)

        def try_it():
            messages = []
            for path in (folder, folder / "a" / "b"):
                with pytest.raises(StudyError) as caught:
                    open_run(path)
                messages.append(str(caught.value))
            return messages

        for messages in in_child(try_it, unprivileged=True):
            assert "cannot write to" in messages and "Permission denied" in messages and "another `out`" in messages
        assert list(folder.iterdir()) == []
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_disk_turned_read_only_is_an_error_and_keeps_the_outcome_in_memory(small_disk, open_run, point, ok):
    warnings = []
    run = open_run(small_disk / "a", warn=warnings.append)
    for number in range(2):
        run.start(point(number), sampler="tpe")
    run.finish(0, ok(5.0))
    # A disk with open files cannot be remounted read-only from outside; a read-only view mounted over it can.
    subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(small_disk)], check=True)
    with pytest.raises(StudyError, match=r"outcome of trial 1 could not be stored: .*Read-only file system"):
        run.finish(1, ok(7.0))
    with pytest.raises(StudyError, match="Read-only file system"):
        run.start(point(2), sampler="tpe")
    with pytest.raises(StudyError, match="Read-only file system"):
        run.write_best(["redline"])
    assert len(warnings) == 1
    assert run.trials()[1].measurement.throughput == 7.0
    run.close()
    with pytest.raises(StudyError, match="Read-only file system"):
        open_run(small_disk / "a", resume=True)
    subprocess.run(["umount", str(small_disk)], check=True)
    with open_run(small_disk / "a", resume=True) as run:
        assert [trial.number for trial in run.pending()] == [1]
