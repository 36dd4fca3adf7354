import pytest
import torch
from redline.models.data import TokenBatches


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_batches_follow_from_the_seed_alone(task):
    batches = TokenBatches(task=task, seq_len=20, vocab_size=300)
    first, again, other = batches(4, 7), batches(4, 7), batches(4, 8)
    assert set(first) == {"input_ids", "labels"}
    for key, value in first.items():
        assert value.shape == (4, 20) and value.dtype == torch.int64
        assert torch.equal(value, again[key])
        assert not torch.equal(value, other[key])


def test_causal_labels_are_the_inputs():
    batch = TokenBatches(task="causal", seq_len=20, vocab_size=300)(4, 0)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < 300


def test_every_sequence_has_the_same_number_of_masked_tokens():
    batches = TokenBatches(task="masked", seq_len=128, vocab_size=1000)
    batch = batches(64, 0)
    chosen = batch["labels"] != -100
    assert (chosen.sum(dim=1) == 19).all()  # 15 % of 128
    # Tokens that are not chosen are unchanged; of the chosen ones, 80 % are the mask token and 10 % unchanged.
    inputs, labels = batch["input_ids"][chosen], batch["labels"][chosen]
    count = len(labels)
    assert (inputs == 999).sum() / count == pytest.approx(0.8, abs=0.05)
    assert (inputs == labels).sum() / count == pytest.approx(0.1, abs=0.03)
