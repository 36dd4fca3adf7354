"""Random spaces, compared with a brute-force evaluation of the same rules."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from redline.base.errors import SpaceError
from redline.space import Config, Expression, Space, enumeration, maximum, minimum, parse

NOTHING = object()  # the oracle's "no value"


@dataclass
class Term:
    """An expression and its oracle, which computes the expected value in plain Python."""

    expression: Any
    oracle: Callable[[dict], Any]
    names: frozenset = frozenset()
    kind: str = "integer"


def arithmetic(sign: str, a: Any, b: Any) -> Any:
    if a is NOTHING or b is NOTHING:
        return NOTHING
    try:
        out = {
            "+": lambda: a + b,
            "-": lambda: a - b,
            "*": lambda: a * b,
            "/": lambda: a / b,
            "//": lambda: a // b,
            "%": lambda: a % b,
            "**": lambda: power(a, b),
            "min": lambda: min(a, b),
            "max": lambda: max(a, b),
        }[sign]()
    except (ZeroDivisionError, OverflowError):
        return NOTHING
    if out is NOTHING or isinstance(out, complex):
        return NOTHING
    if isinstance(out, float):
        return out if math.isfinite(out) else NOTHING
    if isinstance(a, float) or isinstance(b, float):
        return float(out)
    return out if abs(out) < 2**63 else NOTHING


def power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        if b < 0 or (abs(a) > 1 and b > 64):
            return NOTHING
        return a**b
    return float(a) ** float(b)


def both(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    return NOTHING if a is NOTHING or b is NOTHING else True


def negated(a: Any) -> Any:
    return NOTHING if a is NOTHING else not a


APPLY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "min": minimum,
    "max": maximum,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


@st.composite
def numbers(draw, knobs, depth=2):
    """Draws a numeric term over the knobs."""
    numeric = [knob for knob in knobs if knob.kind in ("integer", "number")]
    if depth == 0 or draw(st.booleans()):
        if numeric and draw(st.integers(0, 3)):
            knob = draw(st.sampled_from(numeric))
            return Term(knob, lambda env, name=knob.name: env[name], frozenset({knob.name}))
        value = draw(st.sampled_from([0, 1, 2, 3, -1, -2, 8, 64, 0.5, -0.25, 3.0, 2**40]))
        return Term(value, lambda env, value=value: value)
    a, b = draw(numbers(knobs, depth - 1)), draw(numbers(knobs, depth - 1))
    assume(isinstance(a.expression, Expression) or isinstance(b.expression, Expression))
    sign = draw(st.sampled_from(["+", "-", "*", "*", "//", "%", "/", "**", "min", "max"]))
    if sign == "**" and type(b.expression) is int:
        assume(b.expression >= 0)
    return Term(
        APPLY[sign](a.expression, b.expression),
        lambda env: arithmetic(sign, a.oracle(env), b.oracle(env)),
        a.names | b.names,
    )


@st.composite
def conditions(draw, knobs, depth=2):
    """Draws a condition over the knobs."""
    if depth and draw(st.integers(0, 2)) == 0:
        a, b = draw(conditions(knobs, depth - 1)), draw(conditions(knobs, depth - 1))
        if draw(st.booleans()):
            return Term(a.expression & b.expression, lambda env: both(a.oracle(env), b.oracle(env)), a.names | b.names)
        return Term(
            a.expression | b.expression,
            lambda env: negated(both(negated(a.oracle(env)), negated(b.oracle(env)))),
            a.names | b.names,
        )
    if depth and draw(st.integers(0, 4)) == 0:
        a = draw(conditions(knobs, depth - 1))
        return Term(~a.expression, lambda env: negated(a.oracle(env)), a.names)
    knob = draw(st.sampled_from(knobs))
    name = knob.name
    if knob.kind == "flag":
        return Term(knob == True, lambda env: env[name] is True, frozenset({name}))  # noqa: E712
    if knob.kind == "text":
        value = draw(st.sampled_from([*knob.values, "other"])) if knob.values else "other"
        return Term(knob == value, lambda env: env[name] == value, frozenset({name}))
    if draw(st.integers(0, 4)) == 0:
        values = draw(st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=1, max_size=3))
        return Term(knob.isin(values), lambda env: env[name] in values, frozenset({name}))
    a, b = draw(numbers(knobs, 2)), draw(numbers(knobs, 1))
    assume(isinstance(a.expression, Expression) or isinstance(b.expression, Expression))
    sign = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!=", "=="]))

    def oracle(env):
        left, right = a.oracle(env), b.oracle(env)
        if left is NOTHING or right is NOTHING:
            return NOTHING
        return {
            "<": left < right,
            "<=": left <= right,
            ">": left > right,
            ">=": left >= right,
            "==": left == right,
            "!=": left != right,
        }[sign]

    return Term(APPLY[sign](a.expression, b.expression), oracle, a.names | b.names)


@dataclass
class Model:
    """A space and the same rules for the oracle."""

    space: Space
    rules: list = field(default_factory=list)  # ("knob", name, values, when) | ("derived", name, term)
    constraints: list = field(default_factory=list)

    def configurations(self, constraints=None, start=0):
        """Returns every valid configuration, found by trying all combinations."""
        chosen = [rule for rule in self.rules if rule[0] == "knob"]
        found = {}
        for picked in itertools.product(*(rule[2] for rule in chosen)):
            wanted = dict(zip((rule[1] for rule in chosen), picked))
            env = self._complete(wanted)
            if env is None:
                continue
            terms = self.constraints if constraints is None else constraints
            if all(not term.names <= env.keys() or term.oracle(env) is True for term in terms):
                order = [r[1] for r in self.rules if r[0] == "knob"] + [r[1] for r in self.rules if r[0] == "derived"]
                config = Config({name: env[name] for name in order if name in env})
                found[config] = None
        return list(found)

    def _complete(self, wanted):
        env = {}
        for kind, name, *rest in self.rules:
            if kind == "knob":
                when = rest[1]
                if when is None or (when.names <= env.keys() and when.oracle(env) is True):
                    env[name] = wanted[name]
            elif rest[0].names <= env.keys():
                value = rest[0].oracle(env)
                if value is NOTHING:
                    return None
                env[name] = value + 0.0 if isinstance(value, float) else value
        return env


DOMAINS = st.one_of(
    st.lists(st.integers(-3, 9), min_size=1, max_size=5, unique=True),
    st.sampled_from([[1, 2, 4, 8], [1, 2, 3, 4, 6], [0, 1], [7]]),
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, -2.0]), min_size=1, max_size=3, unique=True),
    st.just([False, True]),
    st.lists(st.sampled_from(["bf16", "fp32", "fp8", None]), min_size=1, max_size=3, unique=True),
)


def as_predicate(term: Term) -> Callable:
    """Returns the term as a Python callable whose parameters are its knobs. Division by zero raises."""
    names = sorted(term.names)

    def call(env):
        value = term.oracle(env)
        if value is NOTHING:
            raise ZeroDivisionError
        return value

    # Parameters must have the knobs' names, so the lambda is written out.
    return eval(f"lambda {', '.join(names)}: call(dict({', '.join(f'{n}={n}' for n in names)}))", {"call": call})


@st.composite
def models(draw, callables=True):
    space = Space()
    model = Model(space)
    for at in range(draw(st.integers(2, 5))):
        name = f"k{at}"
        if at >= 2 and draw(st.integers(0, 3)) == 0:
            term = draw(numbers(list(space.knobs)))
            if term.names and isinstance(term.expression, Expression):
                rule = as_predicate(term) if callables and draw(st.booleans()) else term.expression
                try:
                    space.derive(name, rule)
                except SpaceError:
                    before = Model(space, [*model.rules, ("derived", name, term)], model.constraints)
                    assert before.configurations() == []
                    continue
                model.rules.append(("derived", name, term))
                continue
        when = None
        if at and draw(st.integers(0, 3)) == 0:
            when = draw(conditions(list(space.knobs), 1))
        values = draw(DOMAINS)
        rule = None if when is None else when.expression
        if when is not None and callables and draw(st.booleans()):
            rule = as_predicate(when)
        knob = space.choice(name, values, when=rule)
        model.rules.append(("knob", name, knob.values, when))
    for _ in range(draw(st.integers(0, 3))):
        term = draw(conditions(list(space.knobs)))
        rule = as_predicate(term) if callables and draw(st.integers(0, 3)) == 0 else term.expression
        try:
            space.require(rule)
        except SpaceError as error:
            if "can never hold" in str(error):
                alone = model.configurations([term])
                assert not any(term.names <= config.keys() for config in alone)
            else:
                assert model.configurations([*model.constraints, term]) == []
            continue
        model.constraints.append(term)
    return model


FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


@FUZZ
@given(models())
def test_enumeration_is_what_trying_every_combination_finds(model):
    check_enumeration(model)


def check_enumeration(model):
    expected = model.configurations()
    space = model.space
    assert sorted(map(repr, space)) == sorted(map(repr, expected))
    assert len(space) == len(expected)
    assert len({config.id for config in space}) == len(expected)


@FUZZ
@given(models(), st.randoms())
def test_membership_index_and_columns_agree_with_the_enumeration(model, random):
    space = model.space
    listed = list(space)
    columns = space.columns()
    for at in random.sample(range(len(listed)), min(12, len(listed))):
        config = listed[at]
        assert config in space
        assert space.explain(config) == "valid"
        assert space.index(config) == at
        assert space.at(at) == config
        assert space.config(**{k: v for k, v in config.items() if not space[k].derived}) == config
        for knob in space.free:
            code = columns[knob.name][at]
            assert (code == -1) == (knob.name not in config)
            assert code == -1 or knob.values[code] == config[knob.name]
    for knob in space.free:
        assert len(columns[knob.name]) == len(listed)
    valid = set(listed)
    chosen = [rule for rule in model.rules if rule[0] == "knob"]
    for _ in range(12):
        env = model._complete({rule[1]: random.choice(rule[2]) for rule in chosen})
        if env is not None:
            config = Config({knob.name: env[knob.name] for knob in space.knobs if knob.name in env})
            assert (config in space) == (config in valid)
            assert (space.explain(config) == "valid") == (config in valid)


@FUZZ
@given(models(), st.integers(0, 100), st.integers(0, 5))
def test_samples_are_distinct_members_and_reproducible(model, count, seed):
    space = model.space
    picked = space.sample(count, seed)
    assert len(picked) == min(count, len(space))
    assert len(set(picked)) == len(picked)
    assert all(config in space for config in picked)
    assert picked == space.sample(count, seed)


@FUZZ
@given(models(), st.integers(1, 20), st.integers(0, 5))
def test_unlistable_spaces_are_sampled_from_the_valid_set(model, count, seed):
    space = model.space
    expected = set(model.configurations())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enumeration, "MAX_ROWS", 3)
        space._valid = None
        picked = space.sample(count, seed)
        assert space.default() in expected
    assert len(set(picked)) == len(picked)
    assert set(picked) <= expected
    assert picked


@FUZZ
@given(models())
def test_the_default_changes_as_few_knobs_as_any_configuration(model):
    space = model.space

    def changes(config):
        return sum(name in config and config[name] != space[name].default for name in config if not space[name].derived)

    assert changes(space.default()) == min(changes(config) for config in space)


@FUZZ
@given(models(callables=False))
def test_a_space_survives_the_way_to_text_and_back(model):
    space = model.space
    again = Space.from_dict(space.to_dict())
    assert again.to_dict() == space.to_dict()
    assert [knob.name for knob in again.knobs] == [knob.name for knob in space.knobs]
    assert list(again) == list(space)


def plain_knobs():
    space = Space()
    space.choice("a", [1, 2, 4, 0])
    space.choice("b", [3, -2, 7])
    space.choice("x", [0.5, 2.0, -1.25])
    return list(space.knobs)


@FUZZ
@given(st.data())
def test_text_reads_back_as_the_same_tree(data):
    knobs = plain_knobs()
    expression = data.draw(st.one_of(conditions(knobs, 3), numbers(knobs, 3))).expression
    assume(isinstance(expression, Expression))
    again = parse(expression.text, {knob.name: knob for knob in knobs})
    assert again.identical(expression)
    assert again.text == expression.text


@FUZZ
@given(st.data())
def test_scalars_columns_and_bounds_agree(data):
    knobs = plain_knobs()
    term = data.draw(st.one_of(conditions(knobs, 3), numbers(knobs, 3)))
    assume(isinstance(term.expression, Expression) and term.names)
    points = list(itertools.product(*(knob.values for knob in knobs)))
    columns = {knob.name: np.array(column) for knob, column in zip(knobs, zip(*points))}
    vector = term.expression.evaluate(columns)
    vector = np.broadcast_to(vector, (len(points),)) if not isinstance(vector, np.ma.MaskedArray) else vector
    with np.errstate(all="ignore"):
        low, high = term.expression.bounds(lambda name: next(k for k in knobs if k.name == name).hull())
    for at, point in enumerate(points):
        env = dict(zip((knob.name for knob in knobs), point))
        expected, scalar = term.oracle(env), term.expression.evaluate(env)
        if expected is NOTHING:
            assert scalar is None
            assert vector[at] is np.ma.masked or not vector[at]
        else:
            assert scalar == expected
            assert type(scalar) is type(expected)
            assert vector[at] == expected
            assert low <= expected <= high
