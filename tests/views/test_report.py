"""The report of a run."""

import json
import math
import os
import re

import pytest
import yaml
from redline.base.errors import StudyError
from redline.base.reading import Outside, open_inside, read_inside, tail_inside
from redline.results import Measurement, Status, Trial
from redline.views.report import Source, document, page, write_report
from redline.views.report.analysis import effects, failures, frontier, predictions


def trial(number, status=Status.OK, throughput=None, config=None, sampler="gp", predicted=(None, None), **more):
    return Trial(
        number=number, config=config or {"micro_batch": number}, sampler=sampler,
        predicted_throughput=predicted[0], predicted_memory_mib=predicted[1],
        measurement=Measurement(status=status, throughput=throughput, **more),
    )  # fmt: skip


def embedded(text):
    """The data embedded in a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


@pytest.fixture
def run(tmp_path, open_run, point, ok, oom):
    """A finished run of four trials: the default at 1000, the winner at 2000 and re-measured, an OOM, a crash."""
    with open_run(tmp_path / "run") as folder:

        def one(number, measurement, **more):
            folder.start(point(number), sampler="default" if number == 0 else "tpe", **more)
            folder.finish(number, measurement)

        fields = {"started": 1e9, "memory_limit_mib": 1024.0, "devices": 2}
        one(0, ok(1000.0, step_ms=8.0, step_ms_spread=0.4, peak_memory_mib=300.0, seconds_total=10.0, **fields))
        one(
            1,
            ok(
                1900.0,
                step_ms=4.0,
                step_ms_spread=0.1,
                peak_memory_mib=512.0,
                seconds_total=10.0,
                **fields | {"started": 1e9 + 10},
            ),
            predicted_throughput=1000.0,
            predicted_memory_mib=256.0,
        )
        folder.log_path(3).write_text("loading\n" + "step\n" * 40 + "ValueError: no such kernel\n")
        one(2, oom(2048.0, seconds_total=2.0, **fields | {"started": 1e9 + 20}))
        one(
            3,
            Measurement(
                status=Status.CRASH,
                reason="ValueError: no such kernel",
                seconds_total=3.0,
                log="logs/3.log",
                **fields | {"started": 1e9 + 22},
            ),
        )
        folder.remeasure(0, [1000.0, 1000.0])
        folder.remeasure(1, [1980.0, 2020.0])
        folder.write_best(["redline", "tune", "gpt2-tiny"])
    return tmp_path / "run"


def test_the_headline_is_the_winner_its_ratio_spread_headroom_and_what_was_lost(run):
    found = document(Source.read(run))
    head = found["headline"]
    assert (head["winner"]["trial"], head["winner"]["throughput"], head["gain"]) == (1, 2000.0, 2.0)
    # Each was measured again twice: standard deviations of 1.41 % and 0, moderated by 2.5 % and 5 % within a measurement.
    deviations = zip((0.01 * math.sqrt(2), 0.0), (0.1 / 4, 0.4 / 8))
    variances = [(among**2 + 4 * (within / 1.959963984540054) ** 2) / 5 for among, within in deviations]
    winner, base = (2.5706 * math.sqrt(variance / 2) for variance in variances)
    assert head["winner"]["spread"] == pytest.approx(winner, rel=0.02)
    assert head["gain_half_width"] == pytest.approx(2.0 * math.hypot(winner, base), rel=0.02)
    assert head["gain_shown"]
    assert head["winner"]["first"] == 1900.0 and head["winner"]["step_ms"] == pytest.approx(4.0 * 1900 / 2000)
    assert found["again"] == {
        "0": {"first": 1000.0, "again": [1000.0, 1000.0]},
        "1": {"first": 1900.0, "again": [1980.0, 2020.0]},
    }
    assert (head["winner"]["peak_memory_mib"], head["limit_mib"]) == (512.0, 1024.0)
    assert head["counts"] == {"ok": 2, "oom": 1, "timeout": 0, "crash": 1, "wrong": 0, "skipped": 0}
    assert head["cost"]["device_seconds"] == 50.0
    assert head["cost"]["lost"] == 10.0
    assert head["cost"]["wall_seconds"] == 25.0
    assert found["state"] == "finished" and found["problems"] == []
    assert found["reproduce"] == "redline tune gpt2-tiny"


def test_failures_are_grouped_by_reason_with_the_end_of_their_log(run):
    oom, crash = sorted(document(Source.read(run))["failures"], key=lambda each: each["trials"])
    assert (oom["status"], oom["trials"]) == ("oom", [2])
    assert oom["log_why"] == "no log is recorded"
    assert (crash["status"], crash["trials"], crash["log_trial"]) == ("crash", [3], 3)
    assert crash["log"].splitlines() == ["step"] * 11 + ["ValueError: no such kernel"]


def test_the_lines_shown_are_of_the_rank_that_failed_first(tmp_path):
    (tmp_path / "0.log").write_text(
        "[rank 1] loading\n[rank 1] KeyError: 'x'\n" + "[rank 0] Connection closed by peer\n" * 30
    )
    fields = {"log": "0.log"}
    (one,) = failures([trial(0, Status.CRASH, reason="rank 1: KeyError: 'x'", **fields)], tmp_path)
    assert one["log"] == "[rank 1] loading\n[rank 1] KeyError: 'x'"
    (other,) = failures([trial(0, Status.CRASH, reason="rank 3: SIGKILL", **fields)], tmp_path)
    assert other["log"] == "\n".join(["[rank 0] Connection closed by peer"] * 12)


def test_the_frontier_holds_what_nothing_cheaper_beats():
    given = [(0, 100.0, 10.0), (1, 200.0, 9.0), (2, 200.0, 20.0), (3, 300.0, 20.0), (4, 400.0, 21.0)]
    trials = [trial(n, throughput=speed, peak_memory_mib=memory) for n, memory, speed in given]
    trials.append(trial(5, Status.OOM, peak_memory_mib=1.0))
    assert frontier(trials) == [0, 2, 4]


def test_predictions_are_judged_by_ratio_error_and_rank():
    trials = [trial(n, throughput=100.0 * 2**n, predicted=(50.0 * 2**n, None)) for n in range(4)]
    found = predictions(trials)
    assert found["memory"] is None
    assert found["throughput"] == {"count": 4, "ratio": 2.0, "error": 0.5, "rank_correlation": pytest.approx(1.0)}
    backwards = [trial(n, throughput=1.0 + n, predicted=(9.0 - n, None)) for n in range(4)]
    assert predictions(backwards)["throughput"]["rank_correlation"] == pytest.approx(-1.0)


def test_effects_separate_confounded_knobs():
    """micro_batch doubles the speed; fusion has no effect, but the sampler tried fast values mostly with fusion."""
    trials = []
    for number in range(48):
        micro = (1, 2, 4)[number % 3]
        fusion = (number // 3) % 4 < (3 if micro == 4 else 1)
        trials.append(trial(number, throughput=100.0 * micro, config={"micro_batch": micro, "fusion": fusion}))
    found = effects(trials, {"micro_batch": [1, 2, 4], "fusion": [False, True]})
    first, second = found["knobs"]
    assert (first["name"], second["name"]) == ("micro_batch", "fusion")
    assert found["explained"] > 0.95 and first["importance"] > 0.9 and second["importance"] < 0.02
    by_label = {each["label"]: each for each in first["values"]}
    assert by_label["4"]["effect"] / by_label["1"]["effect"] == pytest.approx(4.0, rel=0.15)
    assert (by_label["2"]["median"], by_label["2"]["counts"]) == (200.0, {"ok": 16})
    on, off = (next(v["effect"] for v in second["values"] if v["label"] == label) for label in ("true", "false"))
    assert on / off == pytest.approx(1.0, abs=0.1)


def test_a_run_of_another_format_is_refused(run):
    asked = yaml.safe_load((run / "run.yaml").read_text())
    for version, words in ((0, "format is 0"), (None, "format is None"), (99, "newer redline .format 99")):
        (run / "run.yaml").write_text(yaml.safe_dump(asked | {"format": version}))
        with pytest.raises(StudyError, match=words):
            write_report(run)


def test_a_best_yaml_by_itself_is_the_report_of_its_winner(run, tmp_path):
    (tmp_path / "won.yaml").write_bytes((run / "best.yaml").read_bytes())
    written = write_report(tmp_path / "won.yaml")
    assert written == tmp_path / "won.html"
    found = embedded(written.read_text())
    assert (found["state"], found["headline"]["winner"]["throughput"]) == ("plan", 2000.0)


def test_trials_in_a_database_are_reported_if_it_is_named(tmp_path, open_run, point, ok):
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    with open_run(tmp_path / "run", storage=url) as folder:
        folder.start(point(0), sampler="default")
        folder.finish(0, ok(1.0))
    with pytest.raises(StudyError, match="only if you name it"):
        write_report(tmp_path / "run")
    found = embedded(write_report(tmp_path / "run", storage=url).read_text())
    assert found["headline"]["winner"]["trial"] == 0


def test_a_run_is_running_as_long_as_its_lock_is_held(tmp_path, open_run, point, ok):
    with open_run(tmp_path) as folder:
        folder.start(point(0), sampler="default")
        assert Source.read(tmp_path).state == "running"
        folder.finish(0, ok(1.0))
        source = Source.read(tmp_path)
        assert (source.state, len(source.trials)) == ("running", 1)
    assert Source.read(tmp_path).state == "stopped"


def test_a_best_of_other_trials_is_not_believed(run):
    text = (run / "best.yaml").read_text()
    assert "ok: 2" in text
    (run / "best.yaml").write_text(text.replace("ok: 2", "ok: 3"))
    source = Source.read(run)
    assert source.best is None and any("is about other trials" in each for each in source.problems)
    assert document(source)["headline"]["winner"]["trial"] == 1


def test_without_a_confirmed_success_there_is_no_winner(tmp_path, open_run, point, ok, oom):
    with open_run(tmp_path / "run") as folder:
        folder.start(point(0), sampler="default")
        folder.finish(0, ok(1000.0, step_ms=8.0))
        folder.remeasure(0, [990.0], oom(2048.0))
        folder.write_best(["redline"])
    found = document(Source.read(tmp_path / "run"))
    assert found["headline"]["winner"] is None and "measured again" in found["headline"]["why"]
    assert found["rows"]["status"] == ["oom"] and found["rows"]["throughput"] == [None]
    assert found["rows"]["reason"] == ["when measured again: out of memory; the first time 1,000 tokens/s"]


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_fetches_nothing(run):
    text = write_report(run).read_text()
    assert not re.search(
        r"""(src|href)\s*=|@import|url\(""",
        re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S),
    )
    assert "default-src &#x27;none&#x27;" in text
    assert len(text) < 300_000


def test_every_export_can_be_copied(run):
    from redline.frameworks import export_targets

    found = {each["target"]: each for each in document(Source.read(run))["exports"]}
    assert set(found) == set(export_targets())
    assert json.loads(found["json"]["text"])
    assert "micro_batch" in found["yaml"]["text"]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--"


def test_hostile_text_cannot_leave_the_data(tmp_path):
    source = Source(
        folder=tmp_path,
        trials=[
            trial(0, throughput=1.0, unit=HOSTILE, reason=HOSTILE, config={"a": HOSTILE, HOSTILE: 1}),
            trial(1, Status.CRASH, reason=HOSTILE, config={"a": "b", HOSTILE: 2}),
        ],
    )
    text = page(document(source))
    assert text.count("<script") == 2 and text.count("</script") == 2 and "<img" not in text
    assert embedded(text)["rows"]["knob.a"][0] == HOSTILE


@pytest.mark.parametrize(
    "named",
    [
        "../secret.txt",
        "/etc/passwd",
        "logs/../../secret.txt",
        "link.log",
        "folder/secret.txt",
        "logs",
        "fifo",
        "",
        "logs/\0",
    ],
)
def test_a_log_is_read_from_the_runs_folder_only(tmp_path, named):
    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "link.log").symlink_to(tmp_path / "secret.txt")
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    with pytest.raises(Outside), open_inside(folder, named):
        pass
    (failure,) = failures([trial(0, Status.CRASH, reason="x", log=named)], folder) if named else [{"log_why": ""}]
    assert "log" not in failure and "log_why" in failure


def test_files_are_read_through_a_link_to_the_folder(tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "0.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    assert read_inside(tmp_path / "alias", "logs/0.log", at_most=100) == b"one\ntwo\nthree\n"
    assert tail_inside(tmp_path / "alias", "logs/0.log", at_most=8) == ("three\n", 14)
    with pytest.raises(OSError, match="larger"):
        read_inside(tmp_path / "alias", "logs/0.log", at_most=3)


def test_values_of_a_fine_knob_are_taken_together():
    trials = [trial(n, throughput=1.0 + n, config={"x": n / 10}) for n in range(100)]
    (knob,) = effects(trials, {"x": None})["knobs"]
    assert [each["label"] for each in knob["values"]][:2] == ["0 to 1.2", "1.3 to 2.4"]
    assert sum(each["counts"]["ok"] for each in knob["values"]) == 100
