"""Expressions are built by operators, cannot be converted to bool, and give the same results for scalars and columns."""

import pickle

import numpy as np
import pytest
from redline.base.errors import SpaceError
from redline.space import Expression, Space, maximum, minimum, parse


@pytest.fixture
def space():
    space = Space()
    space.choice("tp", [1, 2, 4, 8])
    space.choice("pp", [0, 1, 2])
    space.choice("ratio", [0, 0.25, 0.5])
    space.choice("precision", ["fp32", "bf16"])
    space.flag("fusion")
    return space


@pytest.fixture
def knobs(space):
    return [space[name] for name in ("tp", "pp", "ratio", "precision", "fusion")]


def test_operators_build_text(knobs):
    tp, pp, ratio, precision, fusion = knobs
    texts = {
        "8 // (tp * pp)": 8 // (tp * pp),
        "tp * pp <= 8": tp * pp <= 8,
        "tp > 1 | ~fusion": None,
        "(tp > 1) | ~fusion": (tp > 1) | ~fusion,
        "tp - (pp - 1)": tp - (pp - 1),
        "tp - pp - 1": tp - pp - 1,
        "(tp + pp) * 2": (tp + pp) * 2,
        "-tp ** 2": -(tp**2),
        "(-tp) ** 2": (-tp) ** 2,
        "2 ** -tp": 2**-tp,
        "(tp ** pp) ** 2": (tp**pp) ** 2,
        "tp ** pp ** 2": tp ** (pp**2),
        "min(tp, pp, 3)": minimum(tp, pp, 3),
        "max(tp + 1, 2) == 4": maximum(tp + 1, 2) == 4,
        "tp in [1, 2]": tp.isin([1, 2]),
        "tp not in [1, 2]": ~tp.isin([1, 2]),
        "(tp not in [1]) == fusion": ~tp.isin([1]) == fusion,
        "tp + 1 in [2, 3]": (tp + 1).isin([2, 3]),
        "(tp > 1) == fusion": (tp > 1) == fusion,
        "~(tp > 1) & fusion": ~(tp > 1) & fusion,
        "~(fusion & (tp == 1))": ~(fusion & (tp == 1)),
        "precision == 'bf16'": precision == "bf16",
        'precision != "it\'s"': precision != "it's",
        "ratio * 24 >= 6.5": ratio * 24 >= 6.5,
        "tp * -2 < -1": tp * -2 < -1,
        "tp / 2 % 3": tp / 2 % 3,
        "8 >= tp": None,
        "tp <= 8": tp <= 8,
        "(8 - tp) % pp": (8 - tp) % pp,
        "8 % tp": 8 % tp,
        "8 / tp": 8 / tp,
        "2 + tp": 2 + tp,
        "fusion & (tp > 2)": fusion & (tp > 2),
        "(tp > 2) & fusion | (pp == 0)": ((tp > 2) & fusion) | (pp == 0),
    }
    for text, expression in texts.items():
        if expression is not None:
            assert str(expression) == text
            assert repr(expression) == f"Expression({text!r})"


def test_names_come_in_the_order_of_mention(knobs):
    tp, pp, ratio, *_ = knobs
    assert (pp * tp + ratio * pp).names == ("pp", "tp", "ratio")


def test_sum_and_numpy_scalars_take_part(knobs):
    tp, pp, *_ = knobs
    assert str(sum([tp, pp])) == "0 + tp + pp"
    assert str(np.int64(8) // tp) == "8 // tp"
    assert str(np.float32(0.5) <= tp) == "tp >= 0.5"


@pytest.mark.parametrize(
    "misuse",
    [
        lambda tp, pp, fusion: 1 < tp < 8,
        lambda tp, pp, fusion: tp > 1 and pp > 1,
        lambda tp, pp, fusion: not fusion,
        lambda tp, pp, fusion: fusion or pp > 1,
        lambda tp, pp, fusion: tp in [1, 2],
        lambda tp, pp, fusion: min(tp, pp),
        lambda tp, pp, fusion: 1 if tp > 1 else 2,
    ],
)
def test_boolean_conversions_are_refused_with_advice(knobs, misuse):
    tp, pp, _, _, fusion = knobs
    with pytest.raises(SpaceError, match=r"has no truth value.*& \| ~.*isin.*\(1 < a\) & \(a < 8\).*minimum"):
        misuse(tp, pp, fusion)


def test_an_expression_is_no_collection(knobs):
    with pytest.raises(SpaceError, match="cannot be iterated"):
        list(knobs[0])
    with pytest.raises(SpaceError, match="not a collection"):
        1 in knobs[0]  # noqa: B015


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda tp, precision, fusion: precision + 1, r"'\+' needs numbers, but `precision` is text"),
        (lambda tp, precision, fusion: precision < 1, "'<' needs numbers, but `precision` is text"),
        (
            lambda tp, precision, fusion: precision == 1,
            "`precision` is text and `1` is an integer: they are never",
        ),
        (lambda tp, precision, fusion: tp == "2", "never equal"),
        (lambda tp, precision, fusion: fusion == 1, "`fusion` is a flag and `1` is an integer"),
        (lambda tp, precision, fusion: tp != True, "never equal"),  # noqa: E712
        (
            lambda tp, precision, fusion: tp > 1 & fusion,
            "'&' joins conditions, but `1` is an integer; put comparisons",
        ),
        (
            lambda tp, precision, fusion: tp | fusion,
            "'|' joins conditions, but `tp` is an integer".replace("|", r"\|"),
        ),
        (lambda tp, precision, fusion: ~tp, "'~' joins conditions"),
        (lambda tp, precision, fusion: minimum(precision, 1), "'min' needs numbers"),
        (lambda tp, precision, fusion: minimum(tp), "two or more arguments, but got 1"),
        (lambda tp, precision, fusion: tp.isin([]), "at least one"),
        (lambda tp, precision, fusion: tp.isin(3), "takes a list"),
        (lambda tp, precision, fusion: tp.isin("12"), "takes a list"),
        (lambda tp, precision, fusion: tp.isin([1, "2"]), "`tp` is an integer, but got '2'"),
        (lambda tp, precision, fusion: tp * [1], "a value in an expression must be"),
        (lambda tp, precision, fusion: tp * float("nan"), "must be finite"),
        (lambda tp, precision, fusion: tp * 2**70, "must fit 64 bits"),
        (lambda tp, precision, fusion: tp**-1, "exponent of at least 0"),
    ],
)
def test_operands_that_do_not_fit_are_refused_when_they_are_joined(knobs, build, message):
    tp, _, _, precision, fusion = knobs
    with pytest.raises(SpaceError, match=message):
        build(tp, precision, fusion)


def test_flags_count_as_numbers_in_arithmetic(space):
    a, b = space.flag("a"), space.flag("b")
    at_most_one = a + b + space["fusion"] <= 1
    assert at_most_one.evaluate({"a": True, "b": False, "fusion": False}) is True
    assert at_most_one.evaluate({"a": True, "b": False, "fusion": True}) is False


def test_scalars_and_columns_give_the_same_values(knobs):
    tp, pp, *_ = knobs
    expression = (8 // (tp * pp)) ** 2 - minimum(tp, 3 * pp) % 2
    columns = {"tp": np.array([1, 2, 4, 8]), "pp": np.array([1, 2, 1, 2])}
    assert expression.evaluate(columns).tolist() == [63, 4, 3, 0]
    for tp_value, pp_value, expected in zip([1, 2, 4, 8], [1, 2, 1, 2], [63, 4, 3, 0]):
        assert expression.evaluate({"tp": tp_value, "pp": pp_value}) == expected


def test_division_by_zero_has_no_value_and_makes_a_condition_false(knobs):
    tp, pp, *_ = knobs
    columns = {"tp": np.array([8, 8]), "pp": np.array([0, 2])}
    for quotient in (tp // pp, tp % pp, tp / pp):
        assert quotient.evaluate({"tp": 8, "pp": 0}) is None
        assert quotient.evaluate(columns).mask.tolist() == [True, False]
        for condition in (quotient >= 0, ~(quotient < 0), quotient.isin([0, 2, 4])):
            assert not condition.evaluate({"tp": 8, "pp": 0})
            assert condition.evaluate(columns).tolist()[0] is False


def test_a_side_without_a_value_decides_nothing_in_and_and_or(knobs):
    _, pp, *_ = knobs
    either = (pp == 0) | (8 // pp == 4)
    both = (pp != 0) & (8 // pp == 4)
    assert [either.evaluate({"pp": value}) for value in (0, 1, 2)] == [True, False, True]
    assert [both.evaluate({"pp": value}) for value in (0, 1, 2)] == [False, False, True]
    column = {"pp": np.array([0, 1, 2])}
    assert either.evaluate(column).tolist() == [True, False, True]
    assert (~both).evaluate(column).tolist() == [True, True, False]


def test_integers_never_wrap(knobs):
    tp, _, *_ = knobs
    big = 2**62
    for expression, exact in (
        (tp * big, lambda tp: tp * big),
        (tp + (big + (big - 1)), lambda tp: tp + 2 * big - 1),
        (-tp - big - big, lambda tp: -tp - 2 * big),
        ((tp + 1) ** 62, lambda tp: (tp + 1) ** 62),
        (tp**70, lambda tp: tp**70),
    ):
        column = np.ma.masked_array(expression.evaluate({"tp": np.array([0, 1, 2, 4])}))
        for at, value in enumerate([0, 1, 2, 4]):
            expected = exact(value)
            scalar = expression.evaluate({"tp": value})
            if abs(expected) < 2**63:
                assert scalar == expected == int(column[at])
            else:
                assert scalar is None and column[at] is np.ma.masked


def test_a_power_is_bounded_in_time_and_size(knobs):
    tp, *_ = knobs
    assert (tp ** (tp**20)).evaluate({"tp": 8}) is None
    assert (tp ** (tp**20)).evaluate({"tp": np.array([8, 1])}).tolist() == [None, 1]
    assert (2.5 ** (tp * 10**6)).evaluate({"tp": 8}) is None
    assert ((tp - 3) ** 0.5).evaluate({"tp": 1}) is None
    assert (tp ** (0 - tp)).evaluate({"tp": 2}) is None


def test_integers_and_floats_compare_alike_everywhere(knobs):
    tp, *_ = knobs
    condition = tp * (2**53 + 1) == 2.0**53
    assert condition.evaluate({"tp": 1}) is bool(condition.evaluate({"tp": np.array([1])})[0])


def test_bounds_hold_the_rounded_quotient_of_floats():
    space = Space()
    x = space.choice("x", [1.0, 2.0])
    step = space.choice("step", [0.1, 0.2])
    assert (x // step).evaluate({"x": 1.0, "step": 0.1}) == 9.0  # although 1.0 / 0.1 is 10.0
    low, high = (x // 0.1).bounds(lambda name: (1.0, 1.0))
    assert low <= 9.0 <= high
    space.require(x // step == 9)
    assert [dict(config) for config in space] == [{"x": 1.0, "step": 0.1}, {"x": 2.0, "step": 0.2}]


def test_evaluating_needs_every_knob(knobs):
    with pytest.raises(SpaceError, match="needs a value for pp"):
        (knobs[0] * knobs[1]).evaluate({"tp": 1})


def test_depth_is_limited_at_construction(knobs):
    expression = knobs[0]
    with pytest.raises(SpaceError, match="nested 200 deep"):
        for _ in range(300):
            expression = expression + 1


def test_expressions_pickle(knobs):
    tp, pp, _, precision, fusion = knobs
    expression = ((tp * pp <= 8) | ~fusion) & precision.isin(["bf16"])
    again = pickle.loads(pickle.dumps(expression))
    assert again.identical(expression) and isinstance(again, Expression)
    assert again.evaluate({"tp": 8, "pp": 2, "fusion": False, "precision": "bf16"}) is True


def test_identical_distinguishes_trees(knobs):
    tp, pp, *_ = knobs
    assert (tp + 1).identical(tp + 1)
    assert not (tp + 1).identical(1 + tp)
    assert not (tp + 1).identical(tp + 1.0)
    assert not (tp - (pp - 1)).identical(tp - pp - 1)
    assert not tp.isin([1, 2]).identical(tp.isin([2, 1]))


def test_text_of_every_expression_here_reads_back(space, knobs):
    tp, pp, ratio, precision, fusion = knobs
    for expression in (
        -(-tp),  # noqa: B002
        -(2**tp),
        (-2) ** tp,
        2 ** (-tp),
        ~(~fusion),
        ~(tp.isin([1]) & fusion),
        ~tp.isin([-1]),
        precision == "a\\'\"\n\t\x07é\U0001f600",
        precision == "",
        ratio * 1e-9 + 1e300,
        tp - -1,
        tp * (-1 - pp),
        (tp == 1) == (pp == 1),
        (tp + (pp + 1)) * (tp * (pp * 2)),
        minimum(tp, -pp) ** maximum(1, 2, tp),
        ((fusion | (tp > 1)) & fusion) | fusion,
        precision.isin(["x", None]),
        precision == None,  # noqa: E711
        (tp < pp) != True,  # noqa: E712
        ~(tp < pp),
        8 // (tp // pp),
        8 // tp // pp,
        tp % (pp % 2),
        tp / (pp / 2),
    ):
        again = parse(expression.text, space.by_name)
        assert again.identical(expression), expression.text
