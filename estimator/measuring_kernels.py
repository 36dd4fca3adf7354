"""Measures the kernels of this machine's GPU: products of many sizes, their sustained rate, fused attention."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .hardware import PRODUCT_LIMITS
from .kernels import HALF_LENGTH, Products, product_seconds

if TYPE_CHECKING:
    import torch

PRODUCT_SIZES = tuple(
    (m, n, k)
    for m in (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
    for n in (1024, 2048, 4096, 6144, 11008, 14336, 32768)
    for k in (1024, 2048, 4096, 8192, 14336)
)
"""(m, n, k) of products that are timed: rows of a batch, and the widths of dense models."""
LENGTHS = (1024, 4096, 16384)
"""Sequence lengths of attention that are timed."""
HEADS, HEAD_DIM = 16, 128
SUSTAINED_S = 8.0
"""Duration of products in a row, s, until clocks have settled; the last quarter counts."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Measured kernels of a GPU."""

    products: Products
    error: float
    """Median relative error of the fitted products."""
    attention: float | None
    """Share of the peak rate that forward and backward of fused causal attention reach together for long sequences; None if the
    device has no fused kernel."""


def measure_kernels(peak: float, bandwidth: float) -> Kernels:
    """Measures this process's current GPU; takes less than a minute.

    Args:
        peak: rate of 16-bit products that shares refer to, FLOP/s.
        bandwidth: bytes/s of its memory.
    """
    import torch

    on_device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    units = torch.cuda.get_device_properties(on_device).multi_processor_count
    seconds = [product_s(size, dtype, on_device) for size in PRODUCT_SIZES]
    products, error = fit_products(PRODUCT_SIZES, seconds, peak=peak, bandwidth=bandwidth, units=units)
    return Kernels(
        products=replace(products, sustained=sustained_share(max(PRODUCT_SIZES), dtype, on_device)),
        error=error,
        attention=attention_of({length: attention_s(length, dtype, on_device) for length in LENGTHS}, peak),
    )


def product_s(size: Sequence[int], dtype: "torch.dtype", on_device: "torch.device") -> float:
    """Seconds of a product of (m, k) with (k, n), alone and for a short time: median of repetitions."""
    import torch

    m, n, k = size
    left_operand, right_operand = (
        torch.randn(m, k, device=on_device).to(dtype),
        torch.randn(k, n, device=on_device).to(dtype),
    )
    product = torch.empty(m, n, device=on_device, dtype=dtype)

    def run() -> None:
        torch.mm(left_operand, right_operand, out=product)

    return _median_s(run)


def _median_s(run: object) -> float:
    from torch.utils.benchmark import Timer

    # Timer synchronises CUDA devices around each block of calls.
    timer = Timer("run()", globals={"run": run}, num_threads=1)
    return float(timer.blocked_autorange(min_run_time=0.03).median)


def sustained_share(
    size: Sequence[int], dtype: "torch.dtype", on_device: "torch.device", seconds: float = SUSTAINED_S
) -> float:
    """Share of the rate of a large product that is left after products in a row: power is limited, and clocks fall."""
    import torch

    alone = product_s(size, dtype, on_device)
    m, n, k = size
    left_operand, right_operand = (
        torch.randn(m, k, device=on_device).to(dtype),
        torch.randn(k, n, device=on_device).to(dtype),
    )
    product = torch.empty(m, n, device=on_device, dtype=dtype)
    calls = max(2, int(seconds / 4 / alone))
    taken = alone
    for _ in range(4):
        begin = time.perf_counter()
        for _ in range(calls):
            torch.mm(left_operand, right_operand, out=product)
        if on_device.type == "cuda":
            torch.cuda.synchronize(on_device)
        taken = (time.perf_counter() - begin) / calls
    return float(min(1.0, alone / taken))


def attention_s(length: int, dtype: "torch.dtype", on_device: "torch.device") -> float | None:
    """Seconds of forward and backward of fused causal attention over one sequence; None without a fused kernel."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def tensor() -> torch.Tensor:
        return torch.randn(1, HEADS, length, HEAD_DIM, device=on_device, dtype=dtype, requires_grad=True)

    query, key, value, output_gradient = tensor(), tensor(), tensor(), tensor().detach()

    def run() -> None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            scaled_dot_product_attention(query, key, value, is_causal=True).backward(output_gradient)

    try:
        run()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return None
    return _median_s(run)


def attention_of(seconds: Mapping[int, float | None], peak: float) -> float | None:
    """Share of the peak rate for long sequences, by the curve of `kernels.attention_share`; None without a kernel.

    Args:
        seconds: forward and backward by sequence length.
        peak: FLOP/s.
    """
    shares = []
    for length, taken in seconds.items():
        if taken is None:
            return None
        # Two products forward and five backward, half of them masked.
        flops = 7 * 2 * HEADS * HEAD_DIM * length**2 / 2
        shares.append(flops / taken / peak * (length + HALF_LENGTH) / length)
    return float(np.median(shares))


def fit_products(
    sizes: Sequence[Sequence[int]],
    seconds: Sequence[float],
    *,
    peak: float,
    bandwidth: float,
    units: int,
    width: int = 2,
) -> tuple[Products, float]:
    """Returns the parameters of products that are closest to measured times, and the median relative error.

    Minimises the squared logarithmic errors over the logarithms of the parameters.

    Args:
        sizes: (m, n, k) of each product.
        seconds: measured time of each.
        peak: FLOP/s that the rate refers to.
        bandwidth: bytes/s.
        units: multiprocessors.
        width: bytes of a number.
    """
    from scipy.optimize import least_squares

    m, n, k = (np.array(sizes_of_dimension, float) for sizes_of_dimension in zip(*sizes, strict=True))
    target = np.log(np.array(seconds))

    def errors(logs: np.ndarray) -> np.ndarray:
        like = _products(logs, units)
        taken = product_seconds(m, n, k, width=width, peak=peak, bandwidth=bandwidth, like=like, share=1.0)
        return np.asarray(np.log(taken) - target)

    start = np.log([0.8, 150.0, 3.0, 0.7, 0.05])
    fit = least_squares(errors, start, bounds=(np.log(_LOWEST), np.log(_HIGHEST)), diff_step=1e-4)
    return _products(fit.x, units), float(np.median(np.abs(np.expm1(fit.fun))))


_LOWEST = np.array([0.02, 1.0, 0.1, 0.02, 1e-4])
_HIGHEST = np.array([1.0, 5000.0, 1000.0, 1.0, 1.0])


def _products(logs: np.ndarray, units: int) -> Products:
    rate, lost, fixed_us, bandwidth, small = np.exp(logs).tolist()
    return Products(
        rate=rate, lost=lost, fixed_us=fixed_us, bandwidth=bandwidth, small=small, units=units, sustained=1.0
    )


def to_mapping(products: Products) -> dict[str, float]:
    """The parameters as a hardware file contains them."""
    return {name: round(float(getattr(products, name)), 5) for name in PRODUCT_LIMITS}
