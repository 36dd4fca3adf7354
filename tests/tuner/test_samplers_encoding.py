"""Encoding of configurations, distances, candidates, and the data given to models."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from redline.results import Trial
from redline.space import Config, Space
from redline.testing.samplers import (
    conditional_space,
    finished,
    plausible,
    small_space,
    vast_space,
    wide_space,
)
from redline.tuner.samplers.candidates import remaining, subsample
from redline.tuner.samplers.encoding import ABSENT, Encoding, observe

SPACES = [small_space(), wide_space(), conditional_space()]


class TestEncoding:
    @pytest.mark.parametrize("space", SPACES)
    def test_every_configuration_has_its_own_code_and_comes_back(self, space):
        encoding = Encoding(space)
        codes = [encoding.encode(config) for config in space]
        assert len({code.tobytes() for code in codes}) == len(space)
        assert [encoding.decode(code) for code in codes] == list(space)
        assert encoding.valid(codes) == list(space)
        assert encoding.valid(np.vstack([codes[-1], codes[0] + 1000, codes[0]])) == [
            space.at(len(space) - 1),
            space.at(0),
        ]
        assert np.array_equal(encoding.listed, codes)
        assert encoding.rows(space) == list(range(len(space)))

    def test_derived_and_single_valued_knobs_are_completed(self):
        space = Space()
        tp = space.choice("tp", [1, 2, 4])
        space.choice("precision", ["bf16"])
        space.derive("dp", 8 // tp)
        encoding = Encoding(space)
        assert encoding.names == ("tp",)
        config = encoding.decode(np.array([2]))
        assert dict(config) == {"tp": 4, "precision": "bf16", "dp": 2}

    def test_codes_that_break_a_rule_or_a_condition_have_no_configuration(self):
        encoding = Encoding(small_space())
        assert encoding.decode(np.array([1, 3, 0])) is None  # tp * micro_batch = 16
        encoding = Encoding(conditional_space())  # tp, sequence_parallel, checkpoint, offload
        assert encoding.decode(np.array([0, 1, 0, ABSENT])) is None
        assert encoding.decode(np.array([1, ABSENT, 0, ABSENT])) is None
        assert dict(encoding.decode(np.array([1, 1, 0, ABSENT]))) == {
            "tp": 2,
            "sequence_parallel": True,
            "checkpoint": False,
        }

    def test_values_the_space_does_not_know_have_no_code(self):
        wider = Space()
        wider.choice("tp", [1, 2, 4, 8])
        wider.choice("micro_batch", [1, 2, 4, 8])
        wider.flag("fusion")
        narrow = Space()
        narrow.choice("tp", [1, 2])
        encoding = Encoding(small_space())
        assert encoding.encode(wider.config(tp=8)) is None
        assert encoding.encode(narrow.config(tp=2)) is None


class TestCandidates:
    @given(st.integers(0, 2**31), st.integers(0, 12), st.data())
    def test_the_closest_is_the_nearest_valid_one_not_tried(self, seed, tried, data):
        space = small_space()
        encoding = Encoding(space)
        trials = finished(space.sample(tried, seed), plausible)
        code = np.array([data.draw(st.integers(0, int(size) - 1)) for size in encoding.sizes], dtype=np.int32)
        rng = np.random.default_rng(seed)
        left = [config for config in space if config not in {trial.config for trial in trials}]
        distance = {config: encoding.distances(encoding.encode(config)[None], code)[0] for config in left}
        candidates = remaining(encoding, trials, rng, sample=10)
        assert len(candidates) == len(left)
        chosen = candidates.closest(code, rng)
        assert distance[chosen] == pytest.approx(min(distance.values()))

    def test_in_a_vast_space_the_asked_point_is_taken_or_one_beside_it(self):
        space = vast_space()
        encoding = Encoding(space)
        rng = np.random.default_rng(0)
        code = np.array([3, 4, 5, 6, 7, 8], dtype=np.int32)
        asked = encoding.decode(code)
        assert remaining(encoding, [], rng, sample=16).closest(code, rng) == asked
        beside = remaining(encoding, finished([asked], plausible), rng, sample=16).closest(code, rng)
        assert sum(beside[name] != asked[name] for name in encoding.names) == 1
        assert max(abs(beside[name] - asked[name]) for name in encoding.names) == 1

    def test_thinning_keeps_what_is_next_to_the_best(self):
        space = wide_space()
        encoding = Encoding(space)
        trials = finished(space.sample(10, 0), plausible)
        seen = observe(encoding, trials)
        rng = np.random.default_rng(0)
        candidates = remaining(encoding, trials, rng, sample=1)
        fewer = subsample(candidates, 40, seen, rng)
        best = seen.codes[np.nanargmax(seen.objective)]
        nearest = np.sort(encoding.distances(candidates.codes, best))[:10]
        assert np.allclose(np.sort(encoding.distances(fewer.codes, best))[:10], nearest)
        assert 30 <= len(fewer) <= 40
        for i in range(len(fewer)):
            assert encoding.encode(fewer.config(i)).tolist() == fewer.codes[i].tolist()


class TestObservations:
    def observe(self, *measurements):
        space = wide_space()
        trials = [
            Trial(number=i, config=config, measurement=measurement)
            for i, (config, measurement) in enumerate(zip(space.sample(len(measurements), 0), measurements))
        ]
        return observe(Encoding(space), trials)


def test_a_configuration_with_other_derived_values_has_no_row():
    space = Space()
    micro = space.choice("micro_batch", [1, 2, 4])
    space.derive("grad_accum", 4 // micro)
    encoding = Encoding(space)
    strange = Config(micro_batch=2, grad_accum=7)
    assert encoding.rows([space.at(1), strange, Config(micro_batch=3), space.at(2)]) == [1, None, None, 2]
