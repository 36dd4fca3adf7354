"""Size, order, membership, explanation, samples and defaults of a space."""

import time

import numpy as np
import pytest
from hypothesis import given, strategies as st
from redline.base.errors import SpaceError
from redline.space import Space, enumeration


@pytest.fixture
def space():
    space = Space()
    tp = space.choice("tp", [1, 2, 4, 8])
    pp = space.choice("pp", [1, 2, 4])
    space.choice("ratio", [0, 0.5, 1])
    space.choice("precision", ["fp32", "bf16", None])
    space.flag("fusion", when=tp > 1)
    space.derive("dp", 8 // (tp * pp))
    space.require(tp * pp <= 8, "devices")
    return space


@pytest.fixture
def huge():
    """10^12 configurations in components of at most a thousand."""
    space = Space()
    for group in range(4):
        a, b, c = (space.integer(f"{name}{group}", 1, 10) for name in "abc")
        space.require(a + b + c <= 29 + group)
    space.derive("sum", "a0 + b0 + a3 * b3")
    return space


@pytest.fixture
def unlisted():
    """One component with more valid choices than can be listed."""
    space = Space()
    knobs = [space.integer(f"k{at}", 1, 20, default=20) for at in range(10)]
    space.require(sum(knobs) <= 100, "sum")
    space.require(knobs[0] * knobs[1] == 36)
    return space


def test_order_is_that_of_the_values_in_the_order_of_the_knobs(space):
    listed = list(space)
    places = [
        tuple(
            knob.values.index(config[knob.name]) if knob.name in config else -1
            for knob in (space["tp"], space["pp"], space["ratio"], space["precision"])
        )
        for config in listed
    ]
    component = [(tp, pp) for tp, pp, _, _ in places]
    assert component == sorted(component)
    assert listed == list(space)
    assert [space.at(at) for at in range(len(space))] == listed
    assert [space.index(config) for config in listed] == list(range(len(space)))


def test_a_space_is_indexed_by_names_alone(space):
    assert space["tp"].name == "tp"
    with pytest.raises(SpaceError, match=r"space.at\(3\)"):
        space[3]
    with pytest.raises(SpaceError, match="unknown knob 'pt'"):
        space["pt"]


@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_index_out_of_range_is_refused(space, index):
    with pytest.raises(SpaceError, match=f"0 <= index < {len(space)} must hold, but got {index}"):
        space.at(index)


def test_explain_names_everything_that_is_wrong(space):
    explained = space.explain({"tp": 8, "pp": 4, "ratio": 0.4, "precision": "bf61", "tq": 1, "dp": 0})
    assert explained.splitlines() == [
        "unknown knob 'tq'; did you mean 'tp'? Known: dp, fusion, pp, precision, ratio, tp.",
        "knob 'ratio' has no value 0.4; the nearest is 0.5. Values: 0.0, 0.5, 1.0",
        "knob 'precision' has no value 'bf61'; the nearest is 'bf16'. Values: fp32, bf16, None",
        "knob 'fusion' is missing; its values are False, True",
        "violates `tp * pp <= 8` (devices) with tp=8, pp=4: 32 <= 8 is false",
    ]
    good = space.at(0)
    assert space.explain(good) == "valid"
    assert space.explain({**good, "dp": 3}) == "knob 'dp' is 3, but `8 // (tp * pp)` gives 8 with tp=1, pp=1"
    assert space.explain({**good, "tp": "1"}) == "knob 'tp' is an integer, but got '1', which is text"
    without = {name: value for name, value in good.items() if name != "dp"}
    assert space.explain(without) == "derived knob 'dp' is missing; it is 8 here, and config() fills it in"
    with pytest.raises(SpaceError, match="a mapping of knob to value, but got 3"):
        space.explain(3)


def test_default_is_the_valid_configuration_nearest_to_the_defaults():
    space = Space()
    tp = space.choice("tp", [1, 2, 4, 8], default=8)
    pp = space.choice("pp", [1, 2, 4, 8], default=4)
    space.choice("precision", ["fp32", "bf16"], default="bf16")
    assert space.default() == {"tp": 8, "pp": 4, "precision": "bf16"}
    space.require(tp * pp <= 16)
    # One knob has to change, and pp = 2 is as near as tp = 4: the first in order wins.
    assert space.default() == {"tp": 4, "pp": 4, "precision": "bf16"}
    space.require(tp == 8)
    assert space.default() == {"tp": 8, "pp": 2, "precision": "bf16"}


def test_samples_are_uniform(space):
    counts = dict.fromkeys(space, 0)
    for seed in range(400):
        for config in space.sample(3, seed):
            counts[config] += 1
    expected = 1200 / len(counts)
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 1.5 * len(counts)


def test_a_huge_product_of_small_components_is_never_listed(huge):
    """Listing it would not end."""
    size = len(huge)
    assert size == huge.size == 999 * 1000**3
    assert huge.enumerable
    for index in (0, 1, size // 3, size - 1):
        config = huge.at(index)
        assert config in huge and huge.index(config) == index
    picked = huge.sample(100, seed=0)
    assert len(set(picked)) == 100 and all(config in huge for config in picked)
    iterator = iter(huge)
    assert next(iterator) == huge.at(0) and next(iterator) == huge.at(1)
    assert all(config["sum"] == config["a0"] + config["b0"] + config["a3"] * config["b3"] for config in picked)
    with pytest.raises(SpaceError, match="too many for columns"):
        huge.columns()


def test_sizes_beyond_a_machine_word_are_counted_and_sampled():
    space = Space()
    for at in range(25):
        space.integer(f"k{at}", 1, 10)
    assert space.size == 10**25
    with pytest.raises(SpaceError, match=r"use space\.size"):
        len(space)
    assert space.index(space.at(10**25 - 1)) == 10**25 - 1
    assert len(set(space.sample(50, seed=3))) == 50
    assert next(iter(space)) == space.at(0)


def test_an_unlistable_space_says_so_and_works_otherwise(unlisted):
    assert not unlisted.enumerable
    assert bool(unlisted)
    for use in (
        len,
        list,
        lambda s: s.at(0),
        lambda s: s.columns(),
        lambda s: s.index(s.default()),
        lambda s: s.size,
    ):
        with pytest.raises(SpaceError, match="too many valid combinations to list"):
            use(unlisted)
    picked = unlisted.sample(200, seed=5)
    assert len(set(picked)) == 200 and all(config in unlisted for config in picked)
    assert picked == unlisted.sample(200, seed=5) != unlisted.sample(200, seed=6)
    assert len({config["k0"] for config in picked}) == 7  # every factorisation of 36 occurs
    default = unlisted.default()
    assert default in unlisted and default["k0"] * default["k1"] == 36
    assert unlisted.config(**default) == default
    assert "more configurations to try than can be listed" in unlisted.describe()


def summing(knobs, values, divisor):
    """A space of one component: the sum of its knobs is a multiple of the divisor."""
    space = Space()
    chosen = [space.integer(f"k{at}", 0, values - 1) for at in range(knobs)]
    space.require(sum(chosen) % divisor == 0)
    return space


def test_a_space_too_large_to_list_is_predicted_to_be(monkeypatch):
    rows, extend = [], enumeration.Component._extend

    def counted(self, table, join, **terms):
        out = extend(self, table, join, **terms)
        rows.append(out.rows)
        return out

    monkeypatch.setattr(enumeration.Component, "_extend", counted)
    assert not summing(12, 8, 2).enumerable
    assert len(rows) > 3 and max(rows) <= 8 * enumeration._SAMPLED < enumeration.MAX_ROWS


def changed(one, other):
    """Number of knobs that both have with different values, without derived ones."""
    return sum(one[name] != other[name] for name in one.keys() & other.keys() if name not in ("dp", "sum"))


@pytest.mark.parametrize("listed", [True, False])
def test_neighbours_are_all_that_differ_in_a_few_knobs(space, listed, monkeypatch):
    everything = list(space)
    choices = space.choices(10**6)
    assert space.made(choices) == everything
    if not listed:  # combined from the rules instead of looked up in the list

        def refuse(self, at):
            raise enumeration.TooLarge("too many")

        monkeypatch.setattr("redline.space.valid_set.ValidSet.table", refuse)
        space = space.copy()
        assert not space.enumerable
    for row in (0, len(everything) // 2, len(everything) - 1):
        for changes in (0, 1, 2):
            near = space.made(space.near(choices.row(row), changes))
            expected = {each for each in everything if changed(everything[row], each) <= changes}
            assert len(near) == len(set(near)) and set(near) == expected


def test_a_constraint_that_empties_a_space_of_which_no_point_is_known_is_refused(monkeypatch):
    space = Space()
    knobs = [space.integer(f"k{at}", 0, 9) for at in range(6)]
    monkeypatch.setattr(enumeration, "MAX_ROWS", 40)
    weights = [1, 7, 31, 113, 411, 1301]
    space.require(sum(knob * weight for knob, weight in zip(knobs, weights)) % 4999 == 17)
    with pytest.raises(SpaceError, match="leaves no valid configuration"):
        space.require(sum(knobs) == 0)


def test_pruning_reaches_what_filtering_could_not():
    """Filtering 512**5 combinations would not end."""
    space = Space()
    names = ("tp", "pp", "dp", "micro", "acc")
    tp, pp, dp, micro, acc = (space.integer(name, 1, 512) for name in names)
    space.require(tp * pp * dp == 512)
    space.require(micro * dp * acc == 2048)
    powers = [1 << bit for bit in range(10)]
    expected = sum(
        1
        for a in powers
        for b in powers
        for c in powers
        if a * b * c == 512
        for d in powers
        for e in powers
        if d * c * e == 2048
    )
    assert len(space) == expected


def listed_space(rows):
    space = Space()
    for name in ("a", "b", "c"):
        space.choice(name, sorted({row[name] for row in rows}))
    space.require_one_of(rows, "measured")
    return space


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, unique=True), st.integers(1, 30))
def test_the_configurations_of_listed_rows_are_those_rows(points, most):
    rows = [dict(zip("abc", point)) for point in points]
    space = listed_space(rows)
    assert {tuple(config.values()) for config in space} == set(points) and len(space) == len(points)
    space.derive("total", space["a"] + space["b"] + space["c"])
    left = {point for point in points if sum(point) <= most}
    if left:
        space.require(space["total"] <= most)
        assert {(c["a"], c["b"], c["c"]) for c in space} == left
        assert {(c["a"], c["b"], c["c"]) for c in space.sample(len(left), 1)} == left


def test_thousands_of_rows_among_quintillions_of_combinations_are_listed_at_once():
    rng = np.random.default_rng(0)
    points = np.stack([rng.permutation(3000) for _ in range(9)], axis=1).tolist()
    rows = [dict(zip("abcdefghi", point)) for point in points]
    space = Space()
    for name in "abcdefghi":
        space.choice(name, range(3000))
    started = time.perf_counter()
    space.require_one_of(rows)
    assert len(space) == 3000 and rows[7] in space and space.index(rows[7]) == points[7][0]
    assert time.perf_counter() - started < 3
    space.fix("c", points[5][2])
    assert [dict(config) for config in space] == [rows[5]]


def test_wrong_rows_are_refused_with_what_is_wrong():
    space = Space()
    space.choice("a", [1, 2])
    space.choice("b", [1, 2])
    space.derive("c", space["a"] * 2)
    for rows, message in [
        ([], "at least one row"),
        ([{"a": 1, "b": 1}, {"a": 2}], "row 2 has the knobs a, but the first row a, b"),
        ([{"a": 1, "c": 2}], "'c' follows from others"),
        ([{"a": 3}], "no value 3"),
        ([{"z": 3}], "'z'"),
    ]:
        with pytest.raises(SpaceError, match=message):
            space.require_one_of(rows)
    space.require_one_of([{"a": 1, "b": 2}], "measured")
    assert space.explain({"a": 1, "b": 1, "c": 2}) == ("violates `(a, b) is one of 1 rows` (measured) with a=1, b=1")
    with pytest.raises(SpaceError, match="cannot be written"):
        space.to_dict()


def test_predicates_are_called_once_for_every_combination_that_occurs():
    space = Space()
    for name in "abcd":
        space.integer(name, 1, 10)
    seen = []

    def rule(a, b):
        seen.append((a, b))
        return a < b

    space.require(rule)
    seen.clear()
    assert len(space) == 45 * 100
    assert len(seen) <= 120 and set(seen) == {(a, b) for a in range(1, 11) for b in range(1, 11)}


def test_choices_of_a_large_space_are_drawn_with_a_seed(huge, unlisted):
    for large in (huge, unlisted):
        drawn = large.choices(200, seed=5)
        configs = large.made(drawn)
        assert len(set(configs)) == len(configs) == drawn.rows > 100 and all(each in large for each in configs)
        assert configs == large.made(large.choices(200, seed=5)) != large.made(large.choices(200, seed=6))
        again = drawn.followed_by(drawn.take(np.arange(3)))
        assert large.made(again.unique()) == configs
        assert large.made(again.unique(without=drawn.take(np.arange(50)))) == configs[50:]


def test_describe_tells_people_what_there_is(space):
    text = space.describe()
    assert text.splitlines()[0] == f"{len(space)} configurations to try"
    assert "tp * pp <= 8  devices" in text and "= 8 // (tp * pp)" in text and "when tp > 1" in text
