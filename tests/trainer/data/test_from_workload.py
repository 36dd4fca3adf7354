"""A workload's own batches as the data of a training."""

import pytest
import torch
from redline.models import workload
from redline.models.workload import Workload
from redline.trainer.data import FromWorkload
from redline.training import Training


@pytest.fixture
def numbers():
    """A workload whose samples contain their seed and place."""

    def batch(size, seed):
        return torch.full((size, 1), seed), torch.arange(size)

    return Workload(model=lambda: torch.nn.Linear(1, 1), batch=batch, loss=lambda out, batch: out.sum(), global_batch=6)


def test_a_step_s_samples_are_those_of_a_dry_run():
    made = workload("gpt2-tiny", seq_len=16, global_batch=4)
    training = Training(made, {"micro_batch": 2, "grad_accum": 2}, torch.device("cpu"), seed=5)
    data = FromWorkload(made, seed=5)
    for step in range(3):
        batch = data(4 * step, 4)
        wanted = made.batch(4, training.seed_of(step))
        assert all(torch.equal(batch[key], wanted[key]) for key in wanted)


def test_evaluation_has_samples_that_no_step_has(numbers):
    data = FromWorkload(numbers, seed=1, num_evaluation=8)
    trained = set(data(0, 600)[0].flatten().tolist())
    held = set(data.evaluation(0, 8)[0].flatten().tolist())
    assert len(held) == 2 and not held & trained
    with pytest.raises(IndexError, match="samples 6 to 9 were requested, but 8 are held out"):
        data.evaluation(6, 4)


def test_random_tokens_are_distinguished_from_a_users_samples(numbers):
    drawn = workload("gpt2-tiny", seq_len=16, global_batch=4)
    assert [FromWorkload(each).describe()["made_up"] for each in (drawn, numbers)] == [True, False]
