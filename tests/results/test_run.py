"""A run's folder: created, refused, resumed, and described."""

import copy
import json
import os
import sys
import time

import pytest
import yaml
from probes import probe
from redline.base.errors import StudyError
from redline.base.lock import FolderLock
from redline.results import View, environment, read_table, request


def changed(asked, path, value):
    """A copy of a request with a changed entry, named by a dotted path."""
    asked = copy.deepcopy(asked)
    *keys, last = path.split(".")
    place = asked
    for key in keys:
        place = place[int(key)] if key.isdigit() else place[key]
    if value is None:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return asked


def snapshot(path):
    return {
        each.relative_to(path): each.read_bytes() for each in path.rglob("*") if each.is_file() and each.name != ".lock"
    }


def test_a_new_run_leaves_the_files_of_the_design(tmp_path, open_run, asked, point, ok, oom):
    with open_run(tmp_path / "runs" / "a") as run:
        assert not run.resumed
        assert run.log_path(0) == run.path / "logs" / "0.log"
        assert run.log_path(0).parent.is_dir()
        trial = run.start(point(0), sampler="default")
        run.finish(trial.number, ok(10.0, log="logs/0.log"))
        trial = run.start(point(1), sampler="tpe")
        assert [each.number for each in run.pending()] == [1]
        run.finish(trial.number, oom(2000.0))
        run.write_best(["redline", "tune", "gpt2-tiny", "--out", "my runs/a"])
    names = {each.name for each in (tmp_path / "runs" / "a").iterdir()}
    assert names == {".lock", "study.log", "trials.csv", "best.yaml", "run.yaml", "logs"}
    document = yaml.safe_load((run.path / "run.yaml").read_text())
    assert document["format"] == 1
    assert document["asked"] == json.loads(json.dumps(asked))
    assert document["environment"]["versions"]["redline"] == environment.versions()["redline"]
    frame = read_table(run.path / "trials.csv")
    assert list(frame["status"]) == ["ok", "oom"]
    assert [each for each in frame.columns if each.startswith("knob.")] == [
        "knob.micro_batch",
        "knob.checkpoint_ratio",
        "knob.attention",
        "knob.fusion",
        "knob.zero",
        "knob.grad_accum",
    ]


def test_a_folder_with_a_run_is_refused_with_both_ways_out(tmp_path, open_run):
    open_run(tmp_path).close()
    before = snapshot(tmp_path)
    with pytest.raises(
        StudyError, match=r"already contains a run of gpt2-tiny; continue it with resume=True, or give another `out`"
    ):
        open_run(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["study.log", "run.yaml", "trials.csv"])
def test_leftovers_of_a_run_are_never_overwritten(name, tmp_path, open_run):
    (tmp_path / name).write_text("what is this\n")
    for resume in (False, True):
        with pytest.raises(StudyError):
            open_run(tmp_path, resume=resume)
    assert snapshot(tmp_path) == {(tmp_path / name).relative_to(tmp_path): b"what is this\n"}


def test_resuming_continues_where_it_stopped(tmp_path, open_run, point, ok, make_config):
    with open_run(tmp_path) as run:
        run.start(point(0), sampler="default")
        run.finish(0, ok(10.0))
        run.start(point(1), sampler="tpe", predicted_throughput=5.0)
        run.remeasure(0, [11.0])
    (tmp_path / "trials.csv").unlink()
    with open_run(tmp_path, resume=True) as run:
        assert run.resumed and run.notes == ()
        assert len(read_table(tmp_path / "trials.csv")) == 1
        assert run.trials()[0].remeasured == (11.0,)
        (pending,) = run.pending()
        assert (pending.number, pending.config, pending.predicted_throughput) == (1, point(1), 5.0)
        run.finish(1, ok(20.0))
        assert run.start(point(2), sampler="tpe").number == 2
    document = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert len(document["resumed"]) == 1


def test_closing_brings_the_table_up_to_date(tmp_path, open_run, point, ok):
    run = open_run(tmp_path)
    run.start(point(), sampler="tpe")
    run.ledger.finish(0, ok(3.0))  # simulates an interrupt before the row was written
    run.close()
    assert list(read_table(tmp_path / "trials.csv")["throughput"]) == [3.0]
    (tmp_path / "trials.csv").unlink()
    run.close()
    assert not (tmp_path / "trials.csv").exists()


def test_resuming_where_nothing_is_is_refused_and_leaves_nothing(tmp_path, open_run):
    with pytest.raises(StudyError, match="contains no run to resume"):
        open_run(tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()


def test_a_run_killed_right_after_run_yaml_can_be_resumed(tmp_path, open_run, point):
    open_run(tmp_path).close()
    (tmp_path / "study.log").unlink()
    with open_run(tmp_path, resume=True) as run:
        assert run.trials() == []
        run.start(point(), sampler="tpe")
    (tmp_path / "study.log").unlink()
    (tmp_path / "trials.csv").unlink()
    open_run(tmp_path, resume=True).close()


def test_a_lost_ledger_does_not_cost_the_table_its_rows(tmp_path, open_run, point, ok):
    with open_run(tmp_path) as run:
        run.start(point(), sampler="tpe")
        run.finish(0, ok())
    (tmp_path / "study.log").unlink()
    before = snapshot(tmp_path)
    with pytest.raises(StudyError, match=r"ledger study\.log is missing and trials\.csv has trials"):
        open_run(tmp_path, resume=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workload.id", "77aa", "workload.id: was 3f2a, now 77aa (its code, data or sizes have changed)"),
        ("devices.count", 2, "devices.count: was 1, now 2"),
        ("devices.memory_mib", 16000, "devices.memory_mib: was 24000, now 16000"),
        ("seq_len", 256, "seq_len: was 128, now 256"),
        ("global_batch", None, "global_batch: was 8, now not given"),
        ("memory_limit_mib", 2048, "memory_limit_mib: was 1024, now 2048"),
        ("space.knobs.0.values", [1, 2], "space.knobs.micro_batch.values: was [1, 2, 4, 8], now [1, 2]"),
        ("space.knobs.3.values", [0, 1], "space.knobs.fusion.values: was [false, true], now [0, 1]"),
    ],
)
def test_a_changed_request_is_refused_with_the_difference(path, value, message, tmp_path, open_run, asked):
    open_run(tmp_path).close()
    before = snapshot(tmp_path)
    with pytest.raises(StudyError) as caught:
        open_run(tmp_path, asked=changed(asked, path, value), resume=True)
    assert message in str(caught.value)
    assert "another `out`" in str(caught.value)
    assert snapshot(tmp_path) == before


def test_changed_samplers_and_versions_are_noted_once(tmp_path, open_run, asked, monkeypatch):
    open_run(tmp_path).close()
    now = environment.versions() | {"torch": "99.0"}
    monkeypatch.setattr(environment, "versions", lambda: now)
    with open_run(tmp_path, asked=asked | {"sampler": "gp"}, resume=True) as run:
        assert run.notes[0] == "sampler: was tpe, now gp"
        assert run.notes[1].startswith("torch: was ") and "now 99.0" in run.notes[1]
    with open_run(tmp_path, resume=True) as run:
        assert run.notes == ()


@pytest.mark.parametrize("text", ["a: [", "", "- 1\n", "format: x\n", "format: true\n", "format: 1\n", "\x00"])
def test_a_damaged_run_yaml_is_an_error_that_names_it(text, tmp_path, open_run):
    open_run(tmp_path).close()
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(StudyError, match=r"run\.yaml"):
        open_run(tmp_path, resume=True)


def test_a_storage_elsewhere_is_named_again_and_its_password_is_not_written(tmp_path, open_run, point, ok):
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    with open_run(tmp_path / "a", storage=url) as run:
        run.start(point(), sampler="tpe")
        run.finish(0, ok())
    assert not (tmp_path / "a" / "study.log").exists()
    with pytest.raises(StudyError, match="add storage="):
        open_run(tmp_path / "a", resume=True)
    with open_run(tmp_path / "a", storage=url, resume=True) as run:
        assert run.trials()[0].ok
    assert View(tmp_path / "a", storage=url).trials()[0].ok
    with pytest.raises(StudyError, match=r"storage: was sqlite.*now sqlite:///other\.db"):
        open_run(tmp_path / "a", storage="sqlite:///other.db", resume=True)
    with pytest.raises(StudyError, match="already contains a study 'a'"):
        open_run(tmp_path / "elsewhere" / "a", storage=url)
    assert not (tmp_path / "elsewhere" / "a").exists()
    document = request.begin(tmp_path, {}, "postgresql://me:secret@host:5432/db")
    assert document["storage"] == "postgresql://me@host:5432/db"


def test_a_refused_start_leaves_no_files(tmp_path, open_run, asked):
    with pytest.raises(StudyError, match="cannot open the storage"):
        open_run(tmp_path / "a", storage="sqlite:////no/such/folder/x.db")
    with pytest.raises(TypeError, match="cannot be written as YAML"):
        open_run(tmp_path / "a", asked=asked | {"model": object()})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="is a file"):
        open_run(tmp_path / "file")
    with pytest.raises(StudyError, match="cannot write"):
        open_run(tmp_path / "file" / "below")


def test_a_second_process_is_refused_with_the_first_s_id(tmp_path, open_run, in_child):
    with open_run(tmp_path):

        def try_it():
            with pytest.raises(StudyError) as caught:
                open_run(tmp_path, resume=True)
            return str(caught.value)

        error = in_child(try_it)
    assert f"in use by process {os.getpid()} on " in error
    assert "another `out`" in error
    assert in_child(lambda: open_run(tmp_path, resume=True).close() or "free") == "free"


def test_a_fork_does_not_keep_the_lock_of_its_killed_parent(tmp_path, in_child):
    def hold_and_fork():
        lock = FolderLock(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        assert lock.path.exists()
        return child

    orphan = in_child(hold_and_fork)
    try:
        os.kill(orphan, 0)
        FolderLock(tmp_path).release()
    finally:
        os.kill(orphan, 9)


def test_best_yaml_says_what_won_and_how_to_have_it_again(tmp_path, open_run, point, ok):
    with open_run(tmp_path) as run:
        for number, throughput in enumerate([100.0, 300.0, 290.0]):
            run.start(
                point(number),
                sampler="tpe" if number else "default",
                predicted_throughput=250.0 if number else None,
                predicted_memory_mib=700.0 if number else None,
            )
            run.finish(number, ok(throughput, step_ms=5.0, probe=probe()))
        run.remeasure(0, [110.0, 90.0, 100.0])
        run.remeasure(1, [240.0, 250.0])
        run.remeasure(2, [280.0, 285.0, 500.0])
        path = run.write_best(
            ["redline", "tune", "gpt2-tiny", "--fix", "attention=sdpa", "--out", "my runs"],
            devices={"type": "cpu", "count": 1},
        )
    best = yaml.safe_load(path.read_text())
    assert best["best"]["trial"] == 2
    assert best["best"]["id"] == point(2).id
    assert best["best"]["configuration"] == point(2).to_dict()
    assert best["best"]["throughput"] == 285.0
    assert best["best"]["measurement"]["throughput"] == 285.0
    assert "probe" not in best["best"]["measurement"]
    assert best["best"]["measurement"]["step_ms"] == pytest.approx(5.0 * 290 / 285)
    assert best["best"]["remeasured"] == [280.0, 285.0, 500.0]
    assert best["best"]["first_throughput"] == 290.0
    assert best["best"]["prediction"] == {"throughput": 250.0, "memory_mib": 700.0}
    assert (best["default"]["trial"], best["default"]["throughput"]) == (0, 100.0)
    assert best["gain"] == 2.85
    assert best["trials"] == {"ok": 3}
    assert best["environment"]["versions"]["python"] == sys.version.split()[0]
    assert best["environment"]["devices"] == {"type": "cpu", "count": 1}
    assert best["environment"]["host"]["cores"] >= 1
    assert best["reproduce"] == "redline tune gpt2-tiny --fix attention=sdpa --out 'my runs'"


def test_best_yaml_says_why_there_is_none(tmp_path, open_run, point, oom):
    with open_run(tmp_path) as run:
        for number, peak in enumerate([3000.0, 1500.0, 2000.0]):
            run.start(point(number), sampler="default" if number == 0 else "tpe")
            run.finish(number, oom(peak, memory_limit_mib=1024.0))
        run.write_best(["redline"])
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert best["best"] is None
    assert best["why"] == (
        "none of 3 trials succeeded: 3 oom. The smallest need seen is 1500 MiB (trial 1). The limit is 1024 MiB."
    )
    assert best["default"]["status"] == "oom"
    assert best["gain"] is None


def test_a_view_needs_the_ledger_and_nothing_else(tmp_path, open_run, point, ok):
    with open_run(tmp_path) as run:
        run.start(point(0), sampler="tpe")
        run.finish(0, ok(5.0))
        run.start(point(1), sampler="tpe")
    (tmp_path / "run.yaml").unlink()
    assert [trial.pending for trial in View(tmp_path).trials()] == [False, True]
    (tmp_path / "study.log").unlink()
    with pytest.raises(StudyError, match="there is no ledger"):
        View(tmp_path)
    (tmp_path / "trials.csv").unlink()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.yaml").write_text("{}")
    training = "contains no run.*; it contains a training, whose steps are in '.*log.jsonl'"
    for path, words in [(tmp_path, "contains no run"), (tmp_path / "no", "no folder"), (tmp_path / "train", training)]:
        with pytest.raises(StudyError, match=words):
            View(path)


def test_the_hosts_that_a_runner_finds_are_kept_and_keep_no_run_from_going_on(tmp_path, open_run, asked):
    with open_run(tmp_path / "a") as run:
        run.record_hosts(None)
        assert "per_host" not in yaml.safe_load((run.path / "run.yaml").read_text())["asked"]["devices"]
        run.record_hosts(8)
        assert yaml.safe_load((run.path / "run.yaml").read_text())["asked"]["devices"]["per_host"] == 8
    assert request.conflicts(run.document["asked"], asked) == []
    for per_host in (None, 4):
        with open_run(tmp_path / "a", resume=True) as again:
            again.record_hosts(per_host)
    assert yaml.safe_load((run.path / "run.yaml").read_text())["asked"]["devices"]["per_host"] == 4
    other = {**asked, "devices": {**asked["devices"], "count": 2}}
    assert request.conflicts(run.document["asked"], other) == ["devices.count: was 1, now 2"]
