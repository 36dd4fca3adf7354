"""Operations on lazy tensors give the values of torch's, for any box, and read no more than the box needs."""

import pytest
import torch
from checkpoints import lazy
from hypothesis import given, settings, strategies as st
from redline.models.layouts import weights as operations
from redline.models.layouts.adapters import add_product


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


A, B, C = numbered(6, 8), numbered(6, 8) + 100, numbered(3, 6, 8)
CASES = {
    "stored": (lazy(A), A),
    "cat rows": (torch.cat([lazy(A), lazy(B)]), torch.cat([A, B])),
    "cat columns": (torch.cat([lazy(A), lazy(B)], dim=-1), torch.cat([A, B], dim=-1)),
    "stack": (torch.stack([lazy(A), lazy(B)], dim=1), torch.stack([A, B], dim=1)),
    "chunk": (torch.chunk(lazy(A), 3, dim=1)[1], torch.chunk(A, 3, dim=1)[1]),
    "uneven chunk": (torch.chunk(lazy(A), 3, dim=1)[2], torch.chunk(A, 3, dim=1)[2]),
    "split": (torch.split(lazy(A), [1, 2, 3])[2], torch.split(A, [1, 2, 3])[2]),
    "transpose": (torch.transpose(lazy(C), 0, 2), torch.transpose(C, 0, 2)),
    "select": (operations.select(lazy(C), 1, 4), C.select(1, 4)),
    "squeeze": (torch.chunk(lazy(C), 3)[2].squeeze(0), C[2]),
    "narrow": (operations.narrow(lazy(A), 0, 1, 4), A[1:5]),
    "cast": (operations.cast(lazy(A), torch.bfloat16), A.bfloat16()),
    "nested": (
        torch.split(torch.transpose(torch.cat([lazy(A), lazy(B)], dim=1), 0, 1), [6, 10])[0],
        torch.cat([A, B], dim=1).T[:6],
    ),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_holds_what_torch_gives(case, data):
    made, expected = CASES[case]
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    ends = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in made.shape]
    box = tuple(slice(*each) for each in ends)
    found = made.read(box)
    assert torch.equal(found, expected[box])
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.numel() * found.element_size()


def test_a_box_reads_its_share_of_every_part():
    log = []
    joined = torch.cat([torch.stack([lazy(each, log) for each in (A, B)]) for _ in range(2)], dim=1)
    assert joined.shape == (2, 12, 8)
    joined.read((slice(1, 2), slice(0, 3), slice(0, 4)))
    assert log == [3 * 4]


def test_a_merged_matrix_is_the_sum_in_every_box():
    up, down = torch.randn(6, 2), torch.randn(2, 8)
    for transposed in (False, True):
        base = torch.randn(8, 6) if transposed else torch.randn(6, 8)
        expected = base + 0.5 * ((up @ down).T if transposed else up @ down)
        made = add_product(lazy(base), lazy(up), lazy(down), 0.5, transposed=transposed)
        torch.testing.assert_close(made.read(), expected)
        torch.testing.assert_close(made.read((slice(1, 3), slice(2, 6))), expected[1:3, 2:6])
