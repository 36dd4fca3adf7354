"""Knobs are converted to Optuna distributions that contain their values."""

import warnings

import optuna
import pytest
from hypothesis import given, strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from redline.results.ledger import distribution


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2, 4, 8), IntDistribution(1, 8, log=True)),
        ((8, 4, 2, 1), IntDistribution(1, 8, log=True)),
        ((0, 1, 2, 3), IntDistribution(0, 3)),
        ((1, 2, 7), IntDistribution(1, 7)),
        ((3,), IntDistribution(3, 3)),
        ((0, 0.25, 0.5, 0.75, 1), FloatDistribution(0, 1)),
        ((0.001, 0.01, 0.1), FloatDistribution(0.001, 0.1, log=True)),
        ((0.0, 1 / 3, 1.0), FloatDistribution(0, 1)),
        ((0.5,), FloatDistribution(0.5, 0.5)),
        ((1e-09, 8388609.0), FloatDistribution(1e-09, 8388609.0)),
        ((False, True), CategoricalDistribution((False, True))),
        (("eager", "sdpa"), CategoricalDistribution(("eager", "sdpa"))),
        ((None, 1), CategoricalDistribution((None, 1))),
        ((2**60, 2**61), CategoricalDistribution((2**60, 2**61))),
        ((float("inf"), 1.0), CategoricalDistribution((float("inf"), 1.0))),
    ],
)
def test_a_knob_is_shown_as_what_it_is(values, expected):
    assert distribution(values) == expected


@given(
    st.one_of(
        st.lists(st.integers(), min_size=1, max_size=6, unique=True),
        st.lists(st.floats(allow_nan=False), min_size=1, max_size=6, unique=True),
        st.lists(st.integers(-50, 50).map(lambda i: i / 10), min_size=1, max_size=6, unique=True),
        st.lists(st.text(), min_size=1, max_size=6, unique=True),
        st.lists(st.booleans(), min_size=1, max_size=2, unique=True),
    )
)
def test_any_value_fits_its_distribution_and_comes_back(values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = distribution(values)
        kept = optuna.distributions.json_to_distribution(optuna.distributions.distribution_to_json(found))
    assert kept == found
    for value in values:
        internal = found.to_internal_repr(value)
        assert found._contains(internal)
        assert found.to_external_repr(internal) == value
