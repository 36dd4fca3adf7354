"""`SamplerConformance` for every sampler."""

import pytest
from redline.testing.samplers import SamplerConformance
from redline.tuner.samplers import make_sampler, sampler_names
from tiers import tiered

QUICKER = {"hebo": {"epochs": 10}}


class TestEverySampler(SamplerConformance):
    @pytest.fixture(params=tiered([name for name in sampler_names() if name != "hebo"], ["hebo"]))
    def make(self, request):
        if request.param == "hebo":
            pytest.importorskip("hebo", reason="HEBO is installed by `pip install --no-deps HEBO==0.3.6`")
        return lambda space, seed: make_sampler(request.param, space, seed, **QUICKER.get(request.param, {}))


class TestBayesWithPrior(SamplerConformance):
    @pytest.fixture
    def make(self):
        def prior(config):
            return 100.0 * config.get("micro_batch", 1) ** 0.5

        return lambda space, seed: make_sampler("bayes", space, seed, prior=prior)
