"""The text of a strategy per layer: parsing, printing, and refusals."""

import pytest
from hypothesis import given, settings, strategies as st
from redline.base.errors import UsageError
from redline.knobs.layers import BlockStrategy, canonical, of_blocks, text_of, uniform
from redline.knobs.strategy import Strategy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0-7:tp2,ckpt 9-31:-", "block 8 would have no strategy"),
        ("0-7:tp2 12:-", "blocks 8 to 11 would have no strategy"),
        ("0-7:tp2 7-9:-", "block 7 has a strategy already"),
        ("0-7:tp2 5-9:-", "blocks 5 to 7 have a strategy already"),
        ("0-7:tp2 3:-", "block 3 has a strategy already"),
        ("1-7:tp2", "block 0 would have no strategy"),
        ("0-7", "a colon and items are expected, such as 0-7:ckpt"),
        ("0-7:", "an item is expected, such as tp2, zero3 or ckpt, but here is ''"),
        ("0-7:tp2,", "an item is expected"),
        ("0-7:tp2;ckpt", "an item is expected, such as tp2, zero3 or ckpt, but here is 'tp2;ckpt'"),
        ("7-0:tp2", "a range goes up, but 7 is after 0"),
        ("0-x:tp2", "blocks are a number or a range such as 0-7, but here is '0-x'"),
        ("0:tp", "tp takes a number, such as tp2"),
        ("0:tp0", "tp is a whole number of at least 1, but here is 0"),
        ("0:zero4", "zero is a stage from 0 to 3, but here is 4"),
        ("0:ckpt1", "ckpt takes no number"),
        ("0:tp2,ckpt,tp4", "tp is given twice"),
        ("0-3:tp1 4-7:zero1,zero2", "zero is given twice for the blocks 4-7"),
        ("0:sp2", "sp was removed: the knob sp shares the sequences of all blocks"),
        ("0:offload", "offload was removed: the knob offload keeps the state of all blocks"),
        ("0:sq2", "unknown item 'sq'"),
        ("0:chkpt", "unknown item 'chkpt'; did you mean 'ckpt'?"),
        ("0-10000:-", "at most 10000 blocks"),
        ("  ", "is empty"),
    ],
)
def test_a_wrong_text_is_refused_in_words(text, problem):
    with pytest.raises(UsageError, match="^strategy: ") as caught:
        Strategy.of({"strategy": text})
    assert problem in str(caught.value)


layer = st.builds(BlockStrategy, tp=st.sampled_from([1, 2, 4]), zero=st.integers(0, 3), ckpt=st.booleans())


@settings(deadline=None)
@given(
    layers=st.lists(layer, min_size=1, max_size=40),
    tp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
)
def test_a_printed_strategy_is_read_back(layers, tp, zero):
    own = {"tp": tp, "zero": zero}
    text = text_of(layers, **own)
    assert of_blocks(text, len(layers), **own) == layers
    assert canonical(text) == text == Strategy.of({"strategy": f"  {text} "}).strategy
    alike = uniform(text, **own)
    first = layers[0]
    same = len(set(layers)) == 1 and first.tp == tp
    assert alike == (layers[0] if same else None)


def test_a_text_for_another_depth_is_refused_with_both_numbers():
    with pytest.raises(
        UsageError, match="its runs are for 8 blocks, but the model has 12: the last run must end at block 11"
    ):
        of_blocks("0-7:ckpt", 12)
