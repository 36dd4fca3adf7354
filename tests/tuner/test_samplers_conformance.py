"""Every sampler keeps every promise of `SamplerConformance`."""

import pytest
from redline.tuner.samplers import make_sampler
from redline.tuner.samplers.conformance import SamplerConformance


class TestRandom(SamplerConformance):
    @pytest.fixture
    def make(self):
        return lambda space, seed: make_sampler("random", space, seed)


class TestGrid(SamplerConformance):
    @pytest.fixture
    def make(self):
        return lambda space, seed: make_sampler("grid", space, seed)


class TestTPE(SamplerConformance):
    @pytest.fixture
    def make(self):
        return lambda space, seed: make_sampler("tpe", space, seed)


class TestGP(SamplerConformance):
    @pytest.fixture
    def make(self):
        return lambda space, seed: make_sampler("gp", space, seed)


class TestHEBO(SamplerConformance):
    @pytest.fixture
    def make(self):
        pytest.importorskip("hebo", reason="HEBO is installed by `pip install --no-deps HEBO==0.3.6`")
        return lambda space, seed: make_sampler("hebo", space, seed, epochs=10)  # fewer: quicker


class TestBayes(SamplerConformance):
    @pytest.fixture
    def make(self):
        return lambda space, seed: make_sampler("bayes", space, seed)


class TestBayesWithPrior(SamplerConformance):
    @pytest.fixture
    def make(self):
        def prior(config):
            return 100.0 * config.get("micro_batch", 1) ** 0.5

        return lambda space, seed: make_sampler("bayes", space, seed, prior=prior)
