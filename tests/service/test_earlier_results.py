"""Searches share measurements: some are answered from the store, and earlier runs serve as training data."""

from types import SimpleNamespace

import pytest
from pools import PLACED, Hands, a_space, a_store, a_whole_search
from redline.results import Measurement, Status, Trial
from redline.service.earlier_results import EarlierResults, fingerprint
from redline.space import Config, Space
from redline.tuner.request import Request

OK = Measurement(
    status=Status.OK, throughput=5.0, peak_memory_mib=600.0, memory_limit_mib=1000.0, started=1.0, seconds_total=9.0
)
FULL = Measurement(status=Status.OOM, reason="out of memory", memory_limit_mib=1000.0, started=1.0, seconds_total=9.0)
ASKED = {
    "workload": {"id": "abc"},
    "seq_len": 64,
    "global_batch": 8,
    "seed": 0,
    "devices": {"type": "cpu", "name": "a CPU", "capability": None, "used": 1, "memory_mib": 5},
}


@pytest.fixture
def store(tmp_path):
    made, user = a_store(tmp_path)
    with made:
        made.ann = user
        yield made


def known(store, monkeypatch, reuse=True, placed=PLACED, user=None, **asked):
    search = store.submit(user or store.ann, {"target": "gpt2-tiny"}, devices=1, reuse=reuse)[0]
    made = EarlierResults(store, search, None, placed)
    made.__dict__["_fingerprint"] = fingerprint({**ASKED, **asked}, {}, placed.software)
    return made


def a_trial(measured, **config):
    return Trial(number=0, config=Config({"micro_batch": 4, **config}), measurement=measured)


def test_measured_dry_runs_are_answered_if_allowed(store, monkeypatch):
    earlier = known(store, monkeypatch)
    earlier.note(a_trial(OK))
    found = known(store, monkeypatch).measurement(Config({"micro_batch": 4}))
    assert (found.status, found.throughput) == (Status.OK, 5.0)
    assert (found.seconds_total, found.started) == (0.0, None)
    assert found.reason == f"measured in search {earlier._search.id}"
    assert known(store, monkeypatch).measurement(Config({"micro_batch": 8})) is None
    assert known(store, monkeypatch, reuse=False).measurement(Config({"micro_batch": 4})) is None
    assert earlier.measurement(Config({"micro_batch": 4})) is None, "a search is not answered by itself"


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"seq_len": 128}, {"workload": {"id": "x"}}, {"devices": {**ASKED["devices"], "used": 2}}]
)
def test_measurements_of_other_conditions_are_no_answer(store, monkeypatch, other):
    known(store, monkeypatch).note(a_trial(OK))
    assert known(store, monkeypatch, **other).measurement(Config({"micro_batch": 4})) is None


@pytest.mark.parametrize(
    ("measured", "limit_mib", "holds"),
    [(OK, 599.0, False), (OK, 600.0, True), (FULL, 1000.0, True), (FULL, 1001.0, False)],
)
def test_an_answer_holds_for_memory_too(store, monkeypatch, measured, limit_mib, holds):
    from dataclasses import replace

    known(store, monkeypatch).note(a_trial(measured))
    here = known(store, monkeypatch, placed=replace(PLACED, memory_limit_mib=limit_mib))
    assert (here.measurement(Config({"micro_batch": 4})) is not None) == holds


@pytest.mark.parametrize("status", [Status.CRASH, Status.TIMEOUT, Status.WRONG, Status.SKIPPED])
def test_outcomes_other_than_ok_and_oom_are_not_reused(store, monkeypatch, status):
    known(store, monkeypatch).note(a_trial(Measurement(status=status, reason="?", started=1.0)))
    assert known(store, monkeypatch).measurement(Config({"micro_batch": 4})) is None


HIDDEN = pytest.mark.parametrize(("visibility", "counts"), [("all", True), ("team", False), ("own", False)])


@HIDDEN
def test_a_search_of_another_user_answers_only_where_it_is_shown_to_all(store, visibility, counts):
    """Searches of an admin or of the same team get no answer either: their readers may not see the earlier search."""
    store.change_user("ann", team="vision")
    others = [store.add_user("bob", "submitter", team="vision"), store.add_user("root", "admin")]
    earlier = known(store, None)
    earlier.note(a_trial(OK))
    store.change_search(earlier._search.id, visibility=visibility)
    config = Config({"micro_batch": 4})
    assert known(store, None).measurement(config) is not None, "its own user's are answered"
    for other in others:
        found = known(store, None, user=other).measurement(config)
        assert (found is not None) == counts
        assert not counts or found.reason == f"measured in search {earlier._search.id}"
    store.cancel(earlier._search.id)
    store.delete_search(earlier._search.id)
    for other in others:
        found = known(store, None, user=other).measurement(config)
        assert (found is not None) == counts
        assert not counts or found.reason == "measured in a search that was deleted"


@pytest.mark.slow
def test_a_search_learns_from_those_that_ended_before_it_began(store, tmp_path):
    with Hands(store, store.ann):
        for number in range(2):
            search = store.submit(store.ann, {"target": "f"}, devices=1)[0].id
            result = a_whole_search(store, search, tmp_path / "searches" / search)
            store.finish(search, store.search(search).attempt, ("done", "failed")[number], "", result.to_dict()["best"])
    done = store.searches(state="done")[0]
    new = store.submit(store.ann, {"target": "f"}, devices=1)[0]
    asked = Request(lambda config: 0.0, a_space(), runner="local", devices=1)
    folder = tmp_path / "searches" / new.id
    assert EarlierResults(store, new, folder, PLACED).similar(asked) == [tmp_path / "searches" / done.id]
    bob = store.add_user("bob", "submitter")
    theirs = store.submit(bob, {"target": "f"}, devices=1)[0]
    for visibility, counts in (("own", False), ("team", False), ("all", True)):
        store.change_search(done.id, visibility=visibility)
        taken = EarlierResults(store, theirs, tmp_path / "searches" / theirs.id, PLACED).similar(asked)
        assert taken == [tmp_path / "searches" / done.id] * counts
    before = SimpleNamespace(id=new.id, user=new.user, started=done.ended - 1, created=0.0)
    assert EarlierResults(store, before, folder, PLACED).similar(asked) == []
    other = Space()
    other.choice("tp", [1, 2])
    unlike = Request(lambda config: 0.0, other, runner="local", devices=1)
    assert EarlierResults(store, new, folder, PLACED).similar(unlike) == []


@pytest.mark.parametrize(
    "other",
    [
        {"devices": {**ASKED["devices"], "name": "another CPU"}},
        {"global_batch": 16},
        {"workload": {"id": "abd", "spec": "workload.py:net"}},  # the digest of its text is in the id
    ],
)
def test_another_device_batch_or_text_of_a_workload_is_no_answer(store, monkeypatch, other):
    known(store, monkeypatch).note(a_trial(OK))
    assert known(store, monkeypatch, **other).measurement(Config({"micro_batch": 4})) is None


@pytest.mark.parametrize("changed", [{"torch": "2.1"}, {"redline": "9.9"}, {"nvidia_driver": "600.1"}])
def test_other_software_is_no_answer(store, monkeypatch, changed):
    from dataclasses import replace

    known(store, monkeypatch).note(a_trial(OK))
    here = replace(PLACED, software={**PLACED.software, **changed})
    assert known(store, monkeypatch, placed=here).measurement(Config({"micro_batch": 4})) is None


def test_a_pool_with_two_versions_reuses_nothing(store, monkeypatch):
    """The measurement would depend on the worker that ran the trial."""
    alone = known(store, monkeypatch)
    alone.note(a_trial(OK))
    device = PLACED.device.to_dict()
    newer = store.join(store.ann, "newer", "there", device, 1, 1000, {"torch": "3"})
    mixed = known(store, monkeypatch)
    assert mixed.measurement(Config({"micro_batch": 4})) is None
    mixed.note(a_trial(OK, checkpoint_ratio=0.5))
    store.leave(newer.id)
    assert mixed.measurement(Config({"micro_batch": 4})) is not None
    assert known(store, monkeypatch).measurement(Config({"micro_batch": 4, "checkpoint_ratio": 0.5})) is None


def test_a_trial_that_was_answered_says_so_wherever_it_is_shown(store, tmp_path):
    import pandas as pd
    from redline.views.report import write_report

    with Hands(store, store.ann) as hands:
        first = store.submit(store.ann, {"target": "f"}, devices=1)[0].id
        a_whole_search(
            store, first, tmp_path / first, known=EarlierResults(store, store.search(first), tmp_path / first, PLACED)
        )
        ran = dict(hands.ran)
        hands.ran.clear()
        again = store.submit(store.ann, {"target": "f"}, devices=1, reuse=True)[0].id
        a_whole_search(
            store, again, tmp_path / again, known=EarlierResults(store, store.search(again), tmp_path / again, PLACED)
        )
    assert ran and not [key for key in hands.ran if key.startswith("trial-")]
    rows = pd.read_csv(tmp_path / again / "trials.csv")
    answered = rows[rows.status != "skipped"]
    assert len(answered) == 8 and answered.reason.str.contains(f"measured in search {first}").all()
    assert (answered.seconds_total == 0).all()
    assert f"measured in search {first}" in write_report(tmp_path / again).read_text()
