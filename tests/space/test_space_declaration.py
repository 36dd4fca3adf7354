"""Invalid declarations are refused at once and leave the space unchanged."""

import doctest
import itertools
import pickle

import numpy as np
import pytest
import redline as rl
import redline.space.space
from redline.base.errors import SpaceError
from redline.space import Space


@pytest.fixture
def space():
    space = Space()
    space.choice("tp", [1, 2, 4, 8])
    space.choice("pp", [1, 2, 4])
    space.choice("precision", ["fp32", "bf16"])
    return space


def refused(space, message, change):
    """Checks that `change` is refused and changes nothing."""
    before = (space.to_dict(), [knob.name for knob in space.knobs], space.constraints)
    with pytest.raises(SpaceError, match=message):
        change(space)
    assert (space.to_dict(), [knob.name for knob in space.knobs], space.constraints) == before


def test_the_contract_of_the_design_runs_as_written(tmp_path):
    path = tmp_path / "space.yaml"
    # fmt: off
    space = rl.Space()
    tp    = space.choice("tp", [1, 2, 4, 8])
    pp    = space.choice("pp", [1, 2, 4])
    micro = space.choice("micro_batch", [1, 2, 4, 8, 16, 32])
    ckpt  = space.choice("checkpoint_ratio", [0, .25, .5, .75, 1])
    fuse  = space.flag("fusion")
    dp    = space.derive("dp", 8 // (tp * pp))
    acc   = space.derive("grad_accum", 64 // (micro * dp))
    space.require(tp * pp <= 8, "more devices than there are")
    space.require(micro * dp * acc == 64, "global batch")
    space.require(lambda tp, micro_batch: tp > 1 or micro_batch < 32)     # any predicate, by knob name
    config = space.sample(5, seed=0)[0]
    len(space); list(space); space.sample(5, seed=0); config in space; space.explain(config)  # noqa: B015, E702
    space.to_yaml(path); rl.Space.from_yaml(path)                          # constraints as text, parsed  # noqa: E702
    # fmt: on
    assert len(space) == len(list(space)) == 490
    assert config in space
    assert space.explain(config) == "valid"
    assert list(rl.Space.from_yaml(path)) == list(space)
    assert "require: (tp > 1) | (micro_batch < 32)" in path.read_text()
    assert (ckpt.name, fuse.values) == ("checkpoint_ratio", (False, True))
    for config in space:
        assert config["tp"] * config["pp"] * config["dp"] == 8
        assert config["micro_batch"] * config["dp"] * config["grad_accum"] == 64
        assert config["tp"] > 1 or config["micro_batch"] < 32


def test_knobs_say_what_they_are():
    space = Space()
    tp = space.choice("tp", [1, 2], help="degree", monotone_memory=-1)
    ratio = space.choice("ratio", [0, 0.5])
    layers = space.integer("layers", 2, 10, step=4)
    width = space.integer("width", 3, 40, powers_of_two=True, default=16, monotone_memory=1)
    fusion = space.flag("fusion", default=True)
    precision = space.choice("precision", ["fp32", None], default="fp32")
    one = space.choice("one", ["x"])
    total = space.derive("total", tp * layers, help="product")
    assert tp.values == (1, 2) and tp.default == 1 and tp.ordered and tp.help == "degree" and tp.monotone_memory == -1
    assert ratio.values == (0.0, 0.5) and type(ratio.values[0]) is float and ratio.ordered
    assert layers.values == (2, 6, 10) and layers.default == 2
    assert width.values == (4, 8, 16, 32) and width.default == 16 and width.monotone_memory == 1
    assert fusion.values == (False, True) and fusion.default is True and not fusion.ordered
    assert precision.values == ("fp32", None) and not precision.ordered
    assert total.derived and total.help == "product" and total.values == () and not tp.derived
    assert all(a is b for a, b in zip(space.knobs, (tp, ratio, layers, width, fusion, precision, one, total)))
    assert [knob.name for knob in space.free] == ["tp", "ratio", "layers", "width", "fusion", "precision"]
    assert space["tp"] is tp and space["total"] is total


def test_numpy_arrays_ranges_and_generators_list_values():
    space = Space()
    assert space.choice("a", np.array([1, 2])).values == (1, 2)
    assert space.choice("b", range(1, 4)).values == (1, 2, 3)
    assert space.choice("c", (2**bit for bit in range(3))).values == (1, 2, 4)
    assert type(space["a"].values[0]) is int


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("'tp' is declared already", lambda s: s.choice("tp", [1])),
        ("'tp' is declared already", lambda s: s.flag("tp")),
        ("'tp' is declared already", lambda s: s.derive("tp", "pp * 2")),
        ("has no values", lambda s: s.choice("x", [])),
        ("must be a list, but got 'ab'", lambda s: s.choice("x", "ab")),
        ("must be a list, but got 3", lambda s: s.choice("x", 3)),
        ("must be a list, which has an order, but got a set", lambda s: s.choice("x", {1, 2})),
        ("1 .an integer. and 'a' .text. are of different kinds", lambda s: s.choice("x", [1, "a"])),
        ("True .a flag. and 2 .an integer. are of different kinds", lambda s: s.choice("x", [True, 2])),
        ("1 .an integer. and None are of different kinds", lambda s: s.choice("x", [1, None])),
        ("are of different kinds", lambda s: s.choice("x", [0.5, True])),
        ("lists 1 twice", lambda s: s.choice("x", [1, 2, 1])),
        ("lists 1.0 twice", lambda s: s.choice("x", [1, 1.0])),
        ("must be finite", lambda s: s.choice("x", [1.0, float("nan")])),
        ("must be a bool, an int", lambda s: s.choice("x", [[1], [2]])),
        ("has no value 3; the nearest is 2", lambda s: s.choice("x", [1, 2], default=3)),
        ("is an integer, but got '1'", lambda s: s.choice("x", [1, 2], default="1")),
        ("is an integer, but got True", lambda s: s.choice("x", [1, 2], default=True)),
        ("is a flag, but got 1", lambda s: s.flag("x", default=1)),
        ("low <= high must hold, but got low=3, high=1", lambda s: s.integer("x", 3, 1)),
        ("step must be at least 1, but got 0", lambda s: s.integer("x", 1, 3, step=0)),
        ("either step or powers_of_two", lambda s: s.integer("x", 1, 8, step=2, powers_of_two=True)),
        ("no power of two lies between 5 and 7", lambda s: s.integer("x", 5, 7, powers_of_two=True)),
        ("no power of two lies between -4 and 0", lambda s: s.integer("x", -4, 0, powers_of_two=True)),
        ("low is an integer, but got 1.5", lambda s: s.integer("x", 1.5, 3)),
        ("low is an integer, but got True", lambda s: s.integer("x", True, 3)),
        ("at most 100000 values, but got 1000001", lambda s: s.integer("x", 0, 10**6)),
        ("monotone_memory is -1, 0 or 1, but got 2", lambda s: s.choice("x", [1], monotone_memory=2)),
        (
            "when= of knob 'x'.*: unknown knob 'ttp'; did you mean 'tp'",
            lambda s: s.flag("x", when=lambda ttp: True),
        ),
        ("^column 1: unknown knob 'ttp'", lambda s: s.flag("x", when="ttp > 1")),
        ("`tp \\* 2` is an integer, not a condition", lambda s: s.flag("x", when=s["tp"] * 2)),
        ("when= of knob 'x' must be an expression.*but got True", lambda s: s.flag("x", when=True)),
        ("unknown knob 'tq'; did you mean 'tp'", lambda s: s.require(lambda tq: tq > 1)),
        ("unknown knob 'micro'", lambda s: s.require(Space().choice("micro", [1]) > 1)),
        ("has the parameter '\\*knobs'", lambda s: s.require(lambda *knobs: True)),
        ("has the parameter '\\*\\*knobs'", lambda s: s.require(lambda **knobs: True)),
        ("mentions no knob", lambda s: s.require(lambda: True)),
        ("mentions no knob", lambda s: s.require("1 < 2")),
        ("Python evaluated it to a constant", lambda s: s.require(1 < 2)),
        ("but got None", lambda s: s.require(None)),
        ("but got 3", lambda s: s.require(3)),
        ("is an integer, not a condition", lambda s: s.require(s["tp"])),
        ("has no truth value", lambda s: s.require(lambda tp: s["pp"] > 1)),
        ("can never hold: tp is one of 1, 2, 4, 8", lambda s: s.require(s["tp"] > 8, "too many")),
        ("too many.* can never hold", lambda s: s.require(s["tp"] > 8, "too many")),
        ("can never hold", lambda s: s.require(s["precision"] == "fp8")),
        ("can never hold", lambda s: s.require(s["tp"] * s["pp"] == 3)),
        ("can never hold", lambda s: s.require(8 // (s["tp"] - s["tp"]) == 1)),
        ("can never hold", lambda s: s.require(lambda tp, pp: tp * pp == 3)),
        ("can never hold", lambda s: s.require(lambda tp: None)),
        ("can never hold", lambda s: s.require(lambda tp: 1 // (tp - tp))),
        ("unknown knob 'nope'", lambda s: s.derive("x", lambda nope: 1)),
        ("must be an expression, its text, or a callable, but got 8", lambda s: s.derive("x", 8)),
        ("has no value in any configuration", lambda s: s.derive("x", 1 // (s["tp"] * 0))),
        ("has no value in any configuration", lambda s: s.derive("x", lambda tp: None)),
        ("has no value in any configuration", lambda s: s.derive("x", lambda tp: float("nan"))),
        ("returns must be a bool.*but got \\[1\\]", lambda s: s.derive("x", lambda tp: [tp])),
        ("raised KeyError: 1 for tp=1", lambda s: s.derive("x", lambda tp: {}[tp])),
        ("raised TypeError: .* for tp=1", lambda s: s.require(lambda tp: tp + "a" > 1)),
        ("unknown knob 'tpp'; did you mean 'tp'", lambda s: s.fix("tpp", 1)),
        ("unknown knob 'tpp'; did you mean 'tp'", lambda s: s.override("tpp", [1])),
        ("is an integer, but got '1'", lambda s: s.fix("tp", "1")),
        ("is an integer, but got 1.5", lambda s: s.fix("tp", 1.5)),
        ("is an integer, but got True", lambda s: s.fix("tp", True)),
        ("is text, but got 16", lambda s: s.fix("precision", 16)),
        ("has no values", lambda s: s.override("tp", [])),
        ("must be a list, but got 3", lambda s: s.override("tp", 3)),
        ("lists 2 twice", lambda s: s.override("tp", [2, 2])),
    ],
)
def test_invalid_declarations_are_refused_and_change_nothing(space, message, change):
    refused(space, message, change)


def test_a_space_without_a_valid_point_is_refused_naming_what_contradicts(space):
    space.require(space["tp"] * space["pp"] >= 8, "enough devices")
    space.require(space["precision"] == "bf16")
    space.require(space["pp"] <= 2)
    refused(
        space,
        r"constraint `tp == 1` \(one\) leaves no valid configuration: it contradicts "
        r"`tp \* pp >= 8` \(enough devices\)$",
        lambda s: s.require(s["tp"] == 1, "one"),
    )
    refused(
        space,
        r"`tp == 2` leaves no valid configuration: it contradicts `tp \* pp >= 8` \(enough .* and `pp <= 2`$",
        lambda s: s.require(s["tp"] == 2),
    )
    assert len(space) == 3


def test_fix_and_override_that_leave_nothing_name_the_constraint(space):
    space.require(space["tp"] * space["pp"] <= 8, "devices")
    refused(space, r"with 'tp' set to 16: it contradicts `tp \* pp <= 8` \(devices\)", lambda s: s.fix("tp", 16))
    refused(space, r"with 'tp' set to 16, 32", lambda s: s.override("tp", [16, 32]))
    space.derive("dp", 8 // space["tp"])
    refused(space, r"derived knob 'dp' = `8 // tp` has no value", lambda s: s.fix("tp", 0))
    assert space["tp"].values == (1, 2, 4, 8)


def test_fix_leaves_one_value_and_keeps_the_place(space):
    space.fix("tp", 4)
    assert [knob.name for knob in space.knobs] == ["tp", "pp", "precision"]
    assert space["tp"].values == (4,) and space["tp"].default == 4
    assert [knob.name for knob in space.free] == ["pp", "precision"]
    assert {config["tp"] for config in space} == {4} and len(space) == 6
    space.fix("tp", 16)
    assert {config["tp"] for config in space} == {16}


def test_override_replaces_values_and_moves_the_default_to_the_nearest(space):
    tp = space["tp"]
    space.override("tp", [3, 6, 12])
    assert tp.values == (3, 6, 12) and tp.default == 3
    space.override("precision", ["fp8", "fp32"])
    assert space["precision"].values == ("fp8", "fp32") and space["precision"].default == "fp32"
    space.override("precision", ["fp16", "fp8"])
    assert space["precision"].default == "fp16"
    assert len(space) == 3 * 3 * 2
    space.choice("ratio", [0, 0.5, 1], default=0.5)
    space.override("ratio", [0, 1, 0.75])
    assert space["ratio"].values == (0.0, 1.0, 0.75) and space["ratio"].default == 0.75


def test_others_limit_what_a_knob_can_be_fixed_to():
    space = Space()
    space.choice("precision", ["fp32", "bf16"], others=["fp16"])
    space.fix("precision", "fp16")
    refused(space, "has no value 'fp8'; the nearest is 'fp", lambda s: s.fix("precision", "fp8"))
    space.override("precision", ["bf16", "fp32"])
    assert space["precision"].values == ("bf16", "fp32")


def test_a_value_is_taken_in_as_the_knob_holds_it(space):
    space.fix("tp", 2.0)
    space.fix("pp", np.int64(4))
    assert space.default() == {"tp": 2, "pp": 4, "precision": "fp32"}
    assert type(space.default()["tp"]) is int and type(space.default()["pp"]) is int


def test_fixing_a_derived_knob_constrains_it_and_fixing_again_replaces(space):
    space.derive("dp", 8 // (space["tp"] * space["pp"]))
    space.fix("dp", 4)
    assert {(c["tp"], c["pp"]) for c in space} == {(1, 2), (2, 1)}
    space.fix("dp", 8)
    assert {(c["tp"], c["pp"]) for c in space} == {(1, 1)}
    space.override("dp", [1, 2])
    assert {c["dp"] for c in space} == {1, 2}
    assert len(space.constraints) == 1
    refused(space, "`dp == 3`.* can never hold", lambda s: s.fix("dp", 3))
    refused(space, "is an integer, but got 'x'", lambda s: s.fix("dp", "x"))


def test_knobs_parse_what_a_person_types(space):
    space.flag("fusion")
    space.choice("ratio", [0, 0.5])
    space.derive("dp", 8 // space["tp"])
    parsed = {
        name: space[name].parse(text)
        for name, text in [
            ("tp", " 16 "),
            ("ratio", "1"),
            ("precision", "fp8"),
            ("fusion", "Yes"),
            ("dp", "4"),
        ]
    }
    assert parsed == {"tp": 16, "ratio": 1.0, "precision": "fp8", "fusion": True, "dp": 4}
    assert type(parsed["ratio"]) is float
    for name, text in [
        ("tp", "x"),
        ("tp", "1.5"),
        ("tp", ""),
        ("ratio", "nan"),
        ("fusion", "1"),
        ("fusion", "maybe"),
    ]:
        with pytest.raises(SpaceError, match=f"knob '{name}' is"):
            space[name].parse(text)


def test_a_lambda_is_shown_by_its_source(space):
    space.require(lambda tp, pp: tp > 1 or pp > 1, "parallel")
    assert space.constraints[0].text == "lambda tp, pp: tp > 1 or pp > 1"
    space.require(eval("lambda tp: tp < 8"))
    assert space.constraints[1].text == "the lambda(tp)"


def test_a_space_pickles_unless_it_holds_lambdas(space):
    space.derive("dp", 8 // space["tp"])
    space.require((space["dp"] > 1) | (space["precision"] == "bf16"))
    again = pickle.loads(pickle.dumps(space))
    assert list(again) == list(space) and again.to_dict() == space.to_dict()


def test_an_interrupted_change_is_undone(space):
    def interrupted(tp):
        raise KeyboardInterrupt

    before = space.to_dict()
    with pytest.raises(KeyboardInterrupt):
        space.require(interrupted)
    assert space.to_dict() == before and len(space) == 24


def test_the_example_in_the_docstring_of_space_is_true():
    assert doctest.testmod(redline.space.space).failed == 0
    assert doctest.testmod(redline.space.space).attempted >= 5


def test_a_range_of_floats_is_a_grid_with_both_ends():
    space = Space()
    scale = space.number("lr_scale", 1e-4, 1e-1, log=True)
    assert len(scale.values) == 25 and scale.values[0] == 1e-4 and scale.values[-1] == 1e-1 and scale.ordered
    ratios = [second / first for first, second in itertools.pairwise(scale.values)]
    assert max(ratios) / min(ratios) < 1.001
    assert space.number("momentum", 0, 1, count=5, default=0.5).values == (0.0, 0.25, 0.5, 0.75, 1.0)
    refused(space, "with log=True low must be above 0, but got 0.0", lambda s: s.number("x", 0, 1, log=True))
    refused(space, "low < high must hold, but got low=2.0, high=1.0", lambda s: s.number("x", 2, 1))
    refused(space, "count must be from 2 to", lambda s: s.number("x", 1, 2, count=1))
    refused(space, "differ by less than four digits", lambda s: s.number("x", 1, 1.001, count=99))


def test_a_rule_may_take_the_configuration_as_a_mapping(space):
    space.derive("ranks", lambda config: config["tp"] * config["pp"])
    space.require(lambda config: config["ranks"] <= 8)
    copied = Space.from_dict(space.to_dict())  # as text
    for each in (space, copied):
        each.require(lambda config: all(config[name] > 1 for name in ("tp", "pp")))
        assert {(c["tp"], c["pp"], c["ranks"]) for c in each} == {(2, 2, 4), (2, 4, 8), (4, 2, 8)}
    with pytest.raises(SpaceError, match=r"a mapping: lambda config: config\['NAME'\]"):
        space.require(lambda c: c["tp"] > 1)
    space.choice("config", [1, 2])
    space.require(lambda config: config > 1)  # a knob of that name comes first
    assert {c["config"] for c in space} == {2}


def test_a_tuple_as_a_value_is_refused_with_the_line_to_write(space):
    line = r"space.require_one_of\(\[\{'part1': 16, 'part2': 8\}, ...\]\)"
    refused(space, line, lambda s: s.choice("block", [(16, 8), (32, 4)]))
