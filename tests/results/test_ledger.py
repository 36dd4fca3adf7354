"""The ledger stores every trial in Optuna's terms."""

import json
import sys

import optuna
import pytest
from redline.base.errors import StudyError
from redline.results import Ledger, Measurement, RankReport, Status
from redline.results.probe import Computed, Probe
from redline.results.summary import measured_again

ALL = Measurement(
    status=Status.OK,
    throughput=1234.5,
    unit="tokens/s",
    samples_per_second=9.5,
    tokens_per_second=1234.5,
    step_ms=12.25,
    step_ms_spread=0.5,
    peak_memory_mib=900.5,
    memory_limit_mib=1024.0,
    tflops_per_device=1.5,
    mfu=0.25,
    devices=2,
    loss=10.8,
    probe=Probe(
        quiet=Computed(loss=10.8, gradient=2.5, blocks=(1.5, 2.0), vectors=(0.1, 0.2, 0.3), samples=4),
        step=Computed(loss=10.7, gradient=1.0, blocks=(0.5, 0.6), vectors=(0.1, 0.2, 0.3), samples=32),
        logits=(0.25, -1.5),
        noise=0.25,
        noise_numbers=64,
        still=("a.weight",),
        brought=("b",),
        weights=12_000,
        depth=7,
        roundoff=2.0**-8,
        loss_roundoff=2.0**-24,
    ),
    started=1.7e9,
    seconds_total=4.0,
    seconds_overhead=0.5,
    seconds_build=1.0,
    seconds_warmup=1.0,
    seconds_measure=1.5,
    log="logs/0.log",
    ranks=(RankReport(rank=0, status=Status.OK, step_ms=12.25, peak_memory_mib=900.5, allocation_retries=1),),
)


@pytest.fixture(params=["journal", "sqlite", "memory"])
def source(request, tmp_path):
    """A place for a ledger: a journal file, a database by its URL, or a storage object."""
    return {
        "journal": tmp_path / "study.log",
        "sqlite": f"sqlite:///{tmp_path / 'study.db'}",
        "memory": optuna.storages.InMemoryStorage(),
    }[request.param]


@pytest.fixture
def open_ledger(knobs, make_config):
    opened = []

    def open_ledger(source, **more):
        arguments = {"name": "a", "metadata": {"run": "1"}, "knobs": knobs, "make_config": make_config} | more
        opened.append(Ledger.open(source, **arguments))
        return opened[-1]

    yield open_ledger
    for ledger in opened:
        ledger.close()


def test_a_trial_round_trips(source, open_ledger, point):
    ledger = open_ledger(source)
    started = ledger.start(point(3), sampler="hebo", predicted_throughput=1000, predicted_memory_mib=800.5)
    assert (started.number, started.pending, started.config) == (0, True, point(3))
    done = ledger.finish(0, ALL)
    ledger.remeasure(0, [1200, 1210.5])
    again = open_ledger(source).trials()
    assert again == ledger.trials()
    assert done.measurement == ALL
    assert again[0].measurement == measured_again(ALL, [1200.0, 1210.5])
    assert (again[0].remeasured, again[0].first) == ((1200.0, 1210.5), ALL.throughput)
    assert (again[0].sampler, again[0].predicted_throughput, again[0].predicted_memory_mib) == (
        "hebo",
        1000.0,
        800.5,
    )
    assert type(again[0].config) is type(point(3))


def test_numbers_count_from_0_and_pending_trials_wait_for_their_outcome(source, open_ledger, point, ok, oom):
    ledger = open_ledger(source)
    assert [ledger.start(point(i), sampler="tpe").number for i in range(4)] == [0, 1, 2, 3]
    ledger.finish(2, oom(2000.0))
    ledger.finish(0, ok(5.0))
    for each in (ledger, open_ledger(source)):
        assert [trial.number for trial in each.pending()] == [1, 3]
        assert [trial.pending for trial in each.trials()] == [False, True, False, True]
    resumed = open_ledger(source)
    resumed.finish(1, ok(7.0))
    assert resumed.start(point(9), sampler="tpe").number == 4
    assert [trial.number for trial in open_ledger(source).pending()] == [3, 4]


def test_optuna_reads_the_ledger(tmp_path, open_ledger, point, ok, oom):
    ledger = open_ledger(tmp_path / "study.log")
    outcomes = [
        ok(10.0),
        oom(2000.0),
        ok(30.0),
        *(Measurement(status=each, reason=str(each)) for each in ("timeout", "crash", "wrong", "skipped")),
    ]
    for number, outcome in enumerate(outcomes):
        ledger.start(point(number), sampler="tpe", predicted_memory_mib=1.0)
        ledger.finish(number, Measurement.from_dict(outcome.to_dict()))
    ledger.start(point(9), sampler="tpe")
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    study = optuna.load_study(study_name="a", storage=optuna.storages.JournalStorage(backend))
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.user_attrs == {"run": "1"}
    assert study.metric_names == ["throughput"]
    assert (study.best_trial.number, study.best_value) == (2, 30.0)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "FAIL", "FAIL", "FAIL", "PRUNED", "RUNNING"]
    trial = study.trials[1]
    assert trial.params == {"micro_batch": 2, "checkpoint_ratio": 0, "attention": "sdpa", "fusion": False}
    assert isinstance(trial.distributions["micro_batch"], optuna.distributions.IntDistribution)
    assert isinstance(trial.distributions["checkpoint_ratio"], optuna.distributions.FloatDistribution)
    assert isinstance(trial.distributions["fusion"], optuna.distributions.CategoricalDistribution)
    assert trial.user_attrs["config"] == point(1).to_dict()
    assert trial.user_attrs["config_id"] == point(1).id
    assert trial.user_attrs["knob.grad_accum"] == 8
    assert (trial.user_attrs["status"], trial.user_attrs["reason"]) == ("oom", "out of memory")
    assert trial.user_attrs["measurement"]["peak_memory_mib"] == 2000.0
    assert trial.user_attrs["predicted_memory_mib"] == 1.0
    frame = study.trials_dataframe()
    assert list(frame["params_micro_batch"]) == [1, 2, 4, 8, 1, 2, 4, 2]


def test_a_loss_that_is_not_a_number_is_kept_in_valid_json(tmp_path, open_ledger, point):
    ledger = open_ledger(tmp_path / "study.log")
    ledger.start(point(), sampler="tpe")
    probe = Probe(
        quiet=Computed(loss=1.0, gradient=float("nan"), blocks=(float("inf"),), samples=2), roundoff=1e-3,
        loss_roundoff=1e-3,
    )  # fmt: skip
    wrong = Measurement(status=Status.WRONG, reason="loss is nan", loss=float("nan"), probe=probe)
    ledger.finish(0, wrong)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for line in (tmp_path / "study.log").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    kept = open_ledger(tmp_path / "study.log").trials()[0].measurement
    assert kept.loss != kept.loss
    assert kept.probe.quiet.blocks == (float("inf"),)
    assert kept.probe.quiet.gradient != kept.probe.quiet.gradient
    assert kept.probe.quiet.samples == 2 and kept.probe.step is None


def test_hostile_reasons_are_kept_exactly(source, open_ledger, point):
    reason = 'line 1\nline 2\r\n\t"quoted", \x00 \x1b[31m é 漢 \U0001f600 \ud800'
    if isinstance(source, str):
        reason = reason.replace("\x00", "")  # databases cannot store NUL in texts
    ledger = open_ledger(source)
    ledger.start(point(), sampler="tpe")
    ledger.finish(0, Measurement(status=Status.CRASH, reason=reason))
    assert open_ledger(source).trials()[0].measurement.reason == reason


def test_wrong_use_is_refused_and_changes_nothing(source, open_ledger, point, ok, oom):
    ledger = open_ledger(source)
    ledger.start(point(0), sampler="tpe")
    ledger.start(point(1), sampler="tpe")
    ledger.finish(1, oom())
    before = ledger.trials()
    for wrong, words in [
        (lambda: ledger.finish(7, ok()), "no trial 7"),
        (lambda: ledger.finish(1, ok()), "already finished"),
        (lambda: ledger.finish(0, ok(float("nan"))), "finite"),
        (lambda: ledger.finish(0, Measurement(status=Status.OK)), "finite"),
        (lambda: ledger.remeasure(0, [1.0]), "did not succeed"),
        (lambda: ledger.remeasure(1, [1.0]), "did not succeed"),
        (lambda: ledger.start(point(0, micro_batch=3000), sampler="tpe"), "3000"),
        (lambda: ledger.start(point(0, attention="paged"), sampler="tpe"), "paged"),
    ]:
        with pytest.raises(StudyError, match=words):
            wrong()
    assert ledger.trials() == before == open_ledger(source).trials()


def test_another_run_may_not_share_a_study(source, open_ledger):
    open_ledger(source)
    with pytest.raises(StudyError, match="run: was 1, now 2"):
        open_ledger(source, metadata={"run": "2"})
    with pytest.raises(StudyError, match="already contains a study 'a'"):
        open_ledger(source, exist_ok=False)
    open_ledger(source, name="b", metadata={"run": "2"}, exist_ok=False)


def test_metadata_a_killed_process_left_out_is_completed(source, open_ledger):
    open_ledger(source, metadata={})
    open_ledger(source, metadata={"run": "1", "redline": "0.1.0"})
    with pytest.raises(StudyError, match=r"redline: was 0\.1\.0, now 9"):
        open_ledger(source, metadata={"run": "1", "redline": "9"})


def test_trials_of_others_in_the_study_are_left_alone(tmp_path, open_ledger, point, ok):
    ledger = open_ledger(tmp_path / "study.log")
    ledger.start(point(0), sampler="tpe")
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    study = optuna.load_study(study_name="a", storage=optuna.storages.JournalStorage(backend))
    study.enqueue_trial({"micro_batch": 2})
    trial = ledger.start(point(1), sampler="tpe")
    assert trial.number == 2
    ledger.finish(2, ok())
    assert [each.number for each in open_ledger(tmp_path / "study.log").trials()] == [0, 2]


def test_a_ledger_can_be_read_while_it_is_written(tmp_path, open_ledger, point, ok):
    path = tmp_path / "study.log"
    ledger = open_ledger(path)
    ledger.start(point(0), sampler="tpe")
    ledger.finish(0, ok(3.0))
    with open(path, "ab") as file:
        file.write(b'{"op_code":4,"worker')  # a record that is still being written
    before = sorted(each.name for each in tmp_path.iterdir()), path.read_bytes()
    seen = Ledger.load(path)
    assert seen.trials()[0].measurement.throughput == 3.0
    assert seen.trials()[0].config == point(0).to_dict()
    assert (sorted(each.name for each in tmp_path.iterdir()), path.read_bytes()) == before
    with pytest.raises(StudyError, match="for reading only"):
        seen.start(point(1), sampler="tpe")


def test_a_ledger_of_ones_own_is_continued_whatever_its_length(tmp_path, open_ledger, point, ok, monkeypatch):
    ledger = open_ledger(tmp_path / "study.log")
    for number in range(3):
        ledger.start(point(number), sampler="bayes")
        ledger.finish(number, ok(1.0 + number))
    monkeypatch.setattr("redline.results.ledger.MOST_RECORDS", 5)
    with pytest.raises(StudyError, match="has more than 5 records"):
        Ledger.load(tmp_path / "study.log")
    assert len(open_ledger(tmp_path / "study.log").trials()) == 3


def test_reading_what_is_not_there_says_so(tmp_path, open_ledger):
    with pytest.raises(StudyError, match="no ledger at"):
        Ledger.load(tmp_path / "study.log")
    assert list(tmp_path.iterdir()) == []
    open_ledger(tmp_path / "study.log", name="apple")
    open_ledger(tmp_path / "study.log", name="pear")
    with pytest.raises(StudyError, match=r"2 studies; name one of them: apple, pear"):
        Ledger.load(tmp_path / "study.log")
    with pytest.raises(StudyError, match="did you mean 'apple'"):
        Ledger.load(tmp_path / "study.log", name="aple")


def test_a_ledger_may_live_in_memory_only(open_ledger, point, ok):
    ledger = open_ledger(None)
    ledger.start(point(), sampler="tpe")
    assert ledger.finish(0, ok(2.0)).measurement.throughput == 2.0
    assert open_ledger(None).trials() == []


@pytest.mark.parametrize("url", ["nosuchdb://user:secret@host/x", "sqlite:////no/such/folder/study.db"])
def test_a_storage_that_cannot_be_opened_is_an_error_without_the_password(url, open_ledger):
    with pytest.raises(StudyError) as caught:
        open_ledger(url)
    assert "cannot open the storage" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_cost_of_a_trial_does_not_grow_with_their_number(tmp_path, open_ledger, point, ok):
    ledger, calls = open_ledger(tmp_path / "study.log"), 0

    def count(frame, event, arg):
        nonlocal calls
        calls += 1

    def work(numbers):
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            for number in numbers:
                ledger.start(point(number), sampler="tpe")
                ledger.finish(number, ok())
        finally:
            sys.setprofile(None)
        return calls

    work(range(20))
    first = work(range(20, 40))
    work(range(40, 280))
    assert work(range(280, 300)) < 1.2 * first
