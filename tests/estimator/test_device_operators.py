"""Operators that keep other tensors on a GPU are traced as there: what they keep equals what torch's own kernels keep."""

import pytest
import torch
from redline.estimator.facts.device_operators import CPU, CUDA, CUDA_7, function_mode
from redline.estimator.hardware import named_hardware
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LENGTH, HEADS, KV_HEADS, SIZE = 64, 8, 2, 16


def kept_bytes(run, inputs):
    """Bytes of the storages that autograd keeps of a pass, without its inputs'."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    for each in inputs:
        kept.pop(each.untyped_storage().data_ptr(), None)
    return sum(kept.values()), out


def attended_by_one_kernel(query, key, value, causal, run):
    return run()


def tensors(dtype, kv_heads=KV_HEADS):
    torch.manual_seed(0)
    return [torch.randn(2, heads, LENGTH, SIZE).to(dtype).requires_grad_() for heads in (HEADS, kv_heads, kv_heads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_attention_without_a_kernel_keeps_what_torchs_products_keep(dtype):
    inputs = tensors(dtype)

    def run():
        return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    with sdpa_kernel(SDPBackend.MATH):
        expected, exact = kept_bytes(run, inputs)
    with function_mode(CUDA_7, attended_by_one_kernel, lambda *products: None):
        found, traced = kept_bytes(run, inputs)
    scores = 4 * 2 * HEADS * LENGTH**2
    assert scores < expected < 2 * scores
    assert found == pytest.approx(expected, rel=0.02)  # the scores' marks of masked rows are a bit each
    assert traced.dtype == exact.dtype and traced.shape == exact.shape


@pytest.mark.parametrize(
    ("device", "dtype", "kv_heads", "fused"),
    [
        (CUDA, torch.bfloat16, KV_HEADS, True),
        (CUDA, torch.float32, KV_HEADS, False),
        (CUDA, torch.float32, HEADS, True),
        (CUDA_7, torch.float16, KV_HEADS, False),
        (CUDA_7, torch.float16, HEADS, True),
        (CPU, torch.float32, KV_HEADS, True),
    ],
)
def test_attention_is_one_kernel_where_torch_has_one(device, dtype, kv_heads, fused):
    calls = []

    def attended(query, key, value, causal, run):
        calls.append(causal)
        return run()

    query, key, value = tensors(dtype, kv_heads)
    with function_mode(device, attended, lambda *products: None):
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=kv_heads < HEADS)
    assert calls == [True] * fused


def test_16_bit_logits_keep_their_logarithms_and_a_copy_under_autocast():
    """`cross_entropy` of 16-bit logits on CUDA has logarithms of 16 bits."""
    logits, labels = torch.randn(32, 100, dtype=torch.bfloat16, requires_grad=True), torch.arange(32)
    with function_mode(CUDA, attended_by_one_kernel, lambda *products: None), torch.autocast("cpu", torch.bfloat16):
        kept, loss = kept_bytes(lambda: F.cross_entropy(logits, labels, ignore_index=-100), [logits, labels])
    assert loss.dtype == torch.float32
    assert 6 * logits.numel() <= kept <= 6 * logits.numel() + 64
    expected = F.nll_loss(torch.log_softmax(logits, -1).float(), labels)
    torch.testing.assert_close(loss, expected)


def test_a_gpu_that_lists_no_bf16_has_no_flash_attention():
    assert [named_hardware(name).operators for name in ("h100-80gb", "v100-32gb", "t4")] == [CUDA, CUDA_7, CUDA_7]
