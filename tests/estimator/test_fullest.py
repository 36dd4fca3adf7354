"""The fullest rank of a configuration."""

import pytest
from redline.estimator import Estimator, TrainingSetup
from redline.estimator.document import fullest_rank
from redline.estimator.facts.model_facts import ModelFacts
from redline.estimator.hardware import find_hardware

SIZES = {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 11008, "precision": "bf16"}
MIXTURE = {"experts": 64, "experts_per_token": 4, "expert_intermediate": 1024}


def fullest(config, vocabulary=32000, **sizes):
    facts = ModelFacts.from_shape(**SIZES, vocabulary=vocabulary, **sizes)
    setup = TrainingSetup(devices=32, seq_len=4096, global_batch=256)
    return fullest_rank(Estimator(facts, find_hardware("h100-80gb"), setup), {"micro_batch": 1, **config})


def test_without_a_pipeline_all_ranks_are_equal():
    assert str(fullest({"tp": 8})) == "all ranks alike"


def test_the_first_rank_holds_the_most_micro_batches():
    found = fullest({"pp": 8, "checkpoint_ratio": 0.0})
    assert (found.rank, found.pp) == (0, 8)
    more = (found.mib - found.least_mib) / 1024
    assert more > 1 and str(found) == f"pipeline rank 0 of 8, with {more:.1f} GiB more than the emptiest"


def test_the_last_rank_has_a_large_head():
    assert fullest({"pp": 8, "checkpoint_ratio": 1.0}, vocabulary=512_000).rank == 7


def test_a_stage_that_is_given_more_blocks_is_the_fullest():
    assert fullest({"pp": 4, "checkpoint_ratio": 1.0, "stage_blocks": "6,14,6,6"}).rank == 1


def test_experts_get_unequal_rows():
    found = fullest({"ep": 8}, **MIXTURE)
    assert str(found) == "the one of 8 ranks whose experts get the most rows"
    assert found.to_dict()["why"] == str(found)
    assert "experts" not in str(fullest({}, **MIXTURE))


@pytest.mark.parametrize("config", [{"pp": 4}, {"pp": 8, "checkpoint_ratio": 0.5}, {"ep": 4}], ids=str)
def test_the_fullest_rank_s_peak_is_the_estimate_s(config):
    facts = ModelFacts.from_shape(**SIZES, vocabulary=32000, **(MIXTURE if "ep" in config else {}))
    estimator = Estimator(facts, find_hardware("h100-80gb"), TrainingSetup(devices=32, seq_len=4096, global_batch=256))
    table = estimator.table([{"micro_batch": 1, **config}])
    assert fullest(config, **(MIXTURE if "ep" in config else {})).mib == pytest.approx(
        float(table.fullest_memory_mib[0])
    )
