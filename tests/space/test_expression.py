"""Expressions are built by operators, cannot be converted to bool, and give the same results for scalars and columns."""

import pickle

import numpy as np
import pytest
from redline.base.errors import SpaceError
from redline.space import Expression, Space, minimum


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


def test_a_side_without_a_value_decides_nothing_in_and_and_or(knobs):
    _, pp, *_ = knobs
    either = (pp == 0) | (8 // pp == 4)
    both = (pp != 0) & (8 // pp == 4)
    assert [either.evaluate({"pp": value}) for value in (0, 1, 2)] == [True, False, True]
    assert [both.evaluate({"pp": value}) for value in (0, 1, 2)] == [False, False, True]
    column = {"pp": np.array([0, 1, 2])}
    assert either.evaluate(column).tolist() == [True, False, True]
    assert (~both).evaluate(column).tolist() == [True, True, False]


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
