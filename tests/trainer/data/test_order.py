"""The order of samples: a permutation per epoch, computed from the place, the same in all versions."""

import numpy as np
import pytest
from redline.trainer.data.order import HashedDraw, Split, mix, shuffled


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9, 63, 64, 65, 1000, 4097])
def test_an_epoch_holds_every_sample_once(n):
    for epoch in (0, 1, 7):
        found = shuffled(np.arange(epoch * n, (epoch + 1) * n), n, seed=3)
        assert sorted(found.tolist()) == list(range(n))


def test_the_order_is_what_it_was_when_this_was_written():
    # Checkpoints hold a position; the samples before it must be the same in any later version.
    assert shuffled(np.arange(12), 10, seed=0).tolist() == [7, 3, 5, 0, 1, 6, 4, 2, 9, 8, 2, 1]
    assert shuffled(np.array([0, 10**12, 10**15]), 10**9 + 7, seed=2**40).tolist() == [874128791, 341314132, 660872468]
    assert int(mix(1, -2, 3)) == 9821610737291740061


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = shuffled(np.arange(2000), 1000, seed=0).reshape(2, 1000)
    other = shuffled(np.arange(1000), 1000, seed=1)
    for one, two in ((first, second), (first, other)):
        assert (one == two).sum() < 10  # about one of a thousand by chance
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15


def test_hashed_numbers_are_even_and_belong_to_their_sample():
    draw = HashedDraw(0, 1, np.arange(100))
    first, second = draw.uniform((100, 50)), draw.uniform((100, 50))
    assert first.min() >= 0 and first.max() < 1
    assert abs(first.mean() - 0.5) < 0.02 and abs(first.var() - 1 / 12) < 0.005
    assert len(first.unique()) == 5000 and not (first == second).any()
    alone = HashedDraw(0, 1, np.array([42]))
    assert alone.uniform((1, 30)).equal(first[42:43, :30])
    ints = draw.below(7, (100, 50))
    assert sorted(ints.unique().tolist()) == list(range(7))


@pytest.mark.parametrize(
    ("samples", "share"), [(2, 0.5), (3, 0.5), (10, 0.1), (100, 0.05), (1000, 0.3), (99_999, 0.01)]
)
def test_held_out_samples_are_never_trained_on(samples, share):
    split = Split.of(samples, share)
    training = split.training_ids(np.arange(split.training))
    held = split.evaluation_ids(np.arange(split.evaluation))
    assert sorted([*training.tolist(), *held.tolist()]) == list(range(samples))
    assert split.evaluation == max(1, round(samples * share))
