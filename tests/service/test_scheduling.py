"""Which searches get devices: priorities, shares, limits, devices of several kinds, large searches, slices."""

import importlib.util
from dataclasses import replace

import pytest
from house import ROOT
from redline.service.records import Contender, SearchState, Share
from redline.service.scheduling import MOST_AT_ONCE, NO_DEVICES, OVERTAKEN_S, Kind, decide

H100 = Kind("NVIDIA H100", "cuda", 8, 81_920)
A100 = Kind("NVIDIA A100", "cuda", 16, 40_960)
CPU = Kind("a CPU", "cpu", 4, 8_000)
NOW = 1e6


def queued(name, user=1, **fields):
    defaults = {
        "priority": 0, "device": "", "kind": "", "devices": 1, "concurrency": 1, "queued": NOW - 100.0,
        "state": SearchState.QUEUED, "uses": 0, "began": None, "used_s": 0.0, "process": None, "read": 0,
    }  # fmt: skip
    return Contender(search=name, user=user, **(defaults | fields))


def running(name, user=1, uses=1, kind=H100.name, began=NOW - 50.0, **fields):
    fields = {"state": SearchState.RUNNING, **fields}
    return queued(name, user, uses=uses, kind=kind, began=began, **fields)


def decided(contenders, shares=(), kinds=(H100,), most=8, **options):
    return decide(contenders, shares, kinds, NOW, most=most, **options)


def started(decision):
    return [start.search for start in decision.start]


def test_the_order_is_priority_then_use_by_weight_then_time():
    contenders = [
        queued("late", user=1, queued=NOW - 1),
        queued("early", user=1, queued=NOW - 9),
        queued("of one who used much", user=2, queued=NOW - 99),
        queued("of one who used as much with a weight", user=3, queued=NOW - 98),
        queued("urgent", user=2, priority=5, queued=NOW),
    ]
    shares = [Share(user=1, week_s=10.0), Share(user=2, week_s=9e5), Share(user=3, week_s=9e5, weight=1e6)]
    order = started(decided(contenders, shares, most=5))
    # What a user gets counts at once, so that users alternate.
    assert order == ["urgent", "of one who used as much with a weight", "early", "late", "of one who used much"]


def test_users_with_the_same_use_take_turns():
    contenders = [queued(f"{user}{number}", user=user, queued=NOW - number) for user in (1, 2) for number in (3, 2, 1)]
    assert [search[0] for search in started(decided(contenders))] == ["1", "2", "1", "2", "1", "2"]


def test_a_search_gets_the_devices_of_its_trials_at_once_if_nobody_waits():
    alone = decided([queued("a", devices=2, concurrency=None)])
    assert alone.start[0].uses == 2 * min(MOST_AT_ONCE, 4)
    later = queued("b", concurrency=None, queued=NOW)
    both = decided([queued("a", devices=2, concurrency=None), later])
    assert [start.uses for start in both.start] == [2, 1]
    asked = decided([queued("a", devices=2, concurrency=3), later])
    assert [start.uses for start in asked.start] == [6, 1]
    assert decided([queued("a", devices=3, concurrency=3)]).start[0].uses == 6, "as many as there are devices for"
    assert decided([queued("a", concurrency=None)], kinds=[CPU]).start[0].uses == 1


def test_a_search_runs_on_the_kind_that_it_asks_for_and_stays_on_it():
    kinds = [H100, A100]
    assert decided([queued("any")], kinds=kinds).start[0].kind == A100.name
    assert decided([queued("h", device="h100")], kinds=kinds).start[0].kind == H100.name
    assert decided([queued("again", kind=H100.name)], kinds=kinds).start[0].kind == H100.name
    assert decided([queued("large", devices=12)], kinds=kinds).start[0].kind == A100.name
    busy = [running("r", uses=16, kind=A100.name), queued("any")]
    assert decided(busy, kinds=kinds).start[0].kind == H100.name


@pytest.mark.parametrize(
    ("contender", "kinds", "reason"),
    [
        (queued("a"), [], NO_DEVICES),
        (queued("a", device="b200"), [H100, A100], "no 'b200'; it has NVIDIA A100, NVIDIA H100"),
        (queued("a", kind="NVIDIA B200"), [H100], "no 'NVIDIA B200', on which it began"),
        (queued("a", devices=9), [H100], "needs 9 devices of one kind, and the cluster has at most 8"),
    ],
)
def test_a_search_that_cannot_run_says_why(contender, kinds, reason):
    decision = decided([contender], kinds=kinds)
    assert decision.start == [] and reason in decision.reasons["a"]


def test_a_search_that_waits_says_for_what_and_how_many_are_before_it():
    contenders = [
        running("r", uses=6),
        queued("four", devices=4, queued=NOW - 9),
        queued("five", devices=5, queued=NOW),
    ]
    reasons = decided(contenders).reasons
    assert reasons["four"] == "waits for 4 devices of NVIDIA H100: 2 of 8 are free, it is the next"
    assert reasons["five"] == "waits for 5 devices of NVIDIA H100: 2 of 8 are free, 1 search before it"
    assert decided(contenders, most=1).reasons["four"] == "1 search runs at once: it is the next"


def test_smaller_searches_pass_a_large_one_for_a_while_and_not_for_ever():
    large = queued("large", devices=8, device="h100", queued=NOW - 9)
    contenders = [running("r", uses=6), large, queued("small", device="h100", queued=NOW)]
    first = decided(contenders)
    assert started(first) == ["small"] and first.overtaken == {"large"}
    since = {"large": NOW - OVERTAKEN_S}
    later = decided(contenders, overtaken_since=since)
    assert started(later) == [] and "1 search before it" in later.reasons["small"]
    other_kind = [*contenders, queued("elsewhere", device="a100")]
    assert started(decided(other_kind, kinds=[H100, A100], overtaken_since=since)) == ["elsewhere"]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"searches": 1}, "may run 1 search at once"),
        ({"devices": 4}, "may use 4 devices at once, and has 4"),
        ({"device_hours": 2.0, "week_s": 7200.0}, "has used 2 of 2 device-hours in seven days"),
    ],
)
def test_the_limits_of_a_user_hold_their_searches_back_and_nobody_else_s(limits, reason):
    contenders = [running("r", uses=4), queued("theirs"), queued("another's", user=2)]
    decision = decided(contenders, [Share(user=1, **limits), Share(user=2)])
    assert started(decision) == ["another's"] and reason in decision.reasons["theirs"]
    assert (decision.pause.get("r") is not None) == ("device_hours" in limits), "used up hours pause what runs"
    assert decided(contenders, [Share(user=1, **limits)], pausing=["r"]).pause == {}, "once"


def test_a_limit_of_devices_limits_the_trials_at_once():
    decision = decided([queued("a", devices=2, concurrency=4)], [Share(user=1, devices=5)])
    assert decision.start[0].uses == 4


def test_a_search_whose_process_is_ending_still_has_its_devices():
    contenders = [running("r", uses=8, state=SearchState.CANCELLED), queued("a")]
    assert started(decided(contenders)) == []


# -- slices --------------------------------------------------------------------------------------------------


def test_a_slice_that_is_over_gives_way_to_a_search_that_would_go_before_it():
    contenders = [running("long", uses=8, began=NOW - 1300), queued("new", user=2)]
    shares = [Share(user=1, week_s=1e5), Share(user=2)]
    assert "slice of 20 minutes is over" in decided(contenders, shares, slice_s=1200).pause["long"]
    assert decided(contenders, shares, slice_s=1400).pause == {}
    assert decided(contenders, shares).pause == {}
    assert decided(contenders[:1], shares, slice_s=1200).pause == {}
    assert decided(contenders, shares, slice_s=1200, pausing=["long"]).pause == {}
    of_the_same_user = [contenders[0], queued("mine too")]
    assert set(decided(of_the_same_user, shares, slice_s=1200).pause) == {"long"}
    heavier = [Share(user=1, week_s=1e5), Share(user=2, week_s=2e5)]
    assert decided(contenders, heavier, slice_s=1200).pause == {}, "it would get its devices back at once"
    assert decided([replace(contenders[0], priority=5), contenders[1]], shares, slice_s=1200).pause == {}


def test_only_as_many_give_way_as_the_search_needs():
    contenders = [running(str(age), uses=2, began=NOW - age) for age in (4000, 3000, 2000, 1000)]
    shares = [Share(user=1, week_s=1e5), Share(user=2)]
    waiting = queued("new", user=2, devices=4)
    assert list(decided([*contenders, waiting], shares, slice_s=1200).pause) == ["4000", "3000"]
    too_large = replace(waiting, devices=8)
    assert decided([*contenders, too_large], shares, slice_s=1200).pause == {}, "it would wait for the last one anyway"


# -- over time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 1, 2, 2, 4)])
def test_users_get_shares_by_their_weights(weights, monkeypatch):
    """Queued searches of five users on eight devices, in simulated time: within 10 % of the weights."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location("bench_service", ROOT / "bench" / "service.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    shares, _ = bench.simulate(weights, queued=500, started=400)
    assert shares == pytest.approx([1.0] * len(weights), abs=0.1)
