"""What the observer saw, in words."""

import pytest
from redline.cli.outcome import batch_text, binding, formats_text, parts_text

SHARES = {"forward": 0.4, "backward": 0.5, "optimizer": 0.09, "data": 0.009, "other": 0.001}


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({}, "the forward and backward passes"),
        ({"shares": {**SHARES, "data": 0.2}}, "the data loader"),
        ({"stalled": 0.2}, "stalls"),
        ({"shares": {**SHARES, "optimizer": 0.4}}, "the optimizer's step"),
        ({"shares": {**SHARES, "other": 0.4}}, "work outside of passes and optimizer"),
        ({"stalled": 0.2, "shares": {**SHARES, "data": 0.2}}, "the data loader"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_limits_a_training_is_the_part_that_is_too_large(changed, limit):
    assert binding({"shares": SHARES, "stalled": 0.01, **changed}).startswith(limit)


def test_shares_batch_and_formats_are_put_into_words():
    assert parts_text({"shares": SHARES}) == "backward 50 %, forward 40 %, optimizer 9 %, waiting for batches 1 %"
    step = {"samples_per_step": 64.0, "micro_batch": 8, "backwards": 4, "ranks": 2}
    assert batch_text(step) == "64: 4 passes of 8 on 2 ranks"
    assert batch_text({**step, "samples_per_step": None}) == "not known"
    assert batch_text({**step, "micro_batch": None}) == "64"
    assert formats_text({"trained": {"float32": 1200}, "products": "bfloat16"}) == (
        "1,200 in float32; matrix products in bfloat16"
    )
