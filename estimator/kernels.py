"""Time of single kernels: matrix products by their sizes, fused attention by its lengths, on each kind of device.

Products: an output of m x n is computed in tiles of a x b elements, each by one of U units that takes (k + l) of the inner
dimension's k steps' time, l for starting and ending; units work in waves, so a product takes

    t = t0 + max(ceil(ceil(m / a) ceil(n / b) / U) * 2 a b (k + l) / (F r (ab / 32768)^g / U), bytes / (B s))

with the best of a few tiles, F and B the datasheet's rates. r, l, t0, s and g are condensed from latencies of bf16 products that
aiconfigurator has measured (github.com/ai-dynamo/aiconfigurator, Apache-2.0: vLLM 0.14 on A100 SXM, 0.24 on H100 SXM and B200;
9,240 and twice 35,742 sizes); `docs/estimator.md` has their errors. Other devices have the numbers of their generation's.

Attention: a kernel's share of the peak at long sequences, from its authors' tables (FlashAttention: arXiv:2205.14135,
2: arXiv:2307.08691, 3: arXiv:2407.08608; cuDNN's are like the last), and less of it at short ones.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .hardware import Hardware

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))  # of CUTLASS's kernels, rows and columns
WHOLE_TILE = 32768.0
"""Elements of the largest tiles, which reach the full rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Matrix products of a kind of device."""

    rate: float
    """Share of the peak rate that infinitely large products reach, alone and for a short time."""
    lost: float
    """Inner dimension that takes as long as the start and end of a tile."""
    fixed_us: float
    """Time of the smallest product, us."""
    bandwidth: float
    """Share of the memory bandwidth that thin products reach."""
    small: float
    """Exponent of the slowdown of tiles smaller than the largest."""
    units: int
    """Multiprocessors."""
    sustained: float = 0.86
    """Share of that rate that a device sustains when it runs only products: power is limited, and clocks fall."""
    watts: float | None = None
    """Power at which `sustained` was measured, W; None if devices with these numbers are too different to scale it."""
    tflops: float = 0.0
    """Peak 16-bit product rate of the device at which it was measured, 1e12 FLOP/s."""


# The numbers of each device are fitted to 6,000 of aiconfigurator's latencies, `sustained` to whole runs (docs/estimator.md).
_A100 = Products(
    rate=0.961,
    lost=219.0,
    fixed_us=3.2,
    bandwidth=0.604,
    small=0.151,
    units=108,
    sustained=0.86,
    watts=400,
    tflops=312.0,
)
_OTHER = replace(_A100, watts=None)  # of other vendors
_CDNA3 = replace(_OTHER, sustained=0.60)
"""AMD's MI300: with 0.60 a Llama of 8B on one MI300X in bf16 takes 1.36 times as long as on an H200, where 1.32 to 1.40 were
measured (github.com/alpharomercoma/MI300X-vs-H200, REPORT.md; vendors' training containers)."""
_H100 = Products(
    rate=0.880,
    lost=196.0,
    fixed_us=2.7,
    bandwidth=0.796,
    small=0.009,
    units=132,
    sustained=0.77,
    watts=700,
    tflops=989.4,
)
_B200 = Products(
    rate=0.762,
    lost=116.0,
    fixed_us=2.5,
    bandwidth=0.659,
    small=0.017,
    units=148,
    sustained=0.84,
    watts=1000,
    tflops=2250.0,
)
MEASURED = {"a100": _A100, "h100": _H100, "b200": _B200}
_LIKE: dict[str, tuple[Products, int]] = {
    "v100": (_OTHER, 80), "t4": (_OTHER, 40), "a10g": (_OTHER, 80), "rtxa6000": (_OTHER, 84), "l4": (_OTHER, 58),
    "l40": (_OTHER, 142), "l40s": (_OTHER, 142), "rtx4090": (_OTHER, 128), "rtx5090": (_OTHER, 170), "h200": (_H100, 132),
    "h20": (_H100, 78), "gb200": (_B200, 148), "b300": (_B200, 148), "gb300": (_B200, 148), "mi300x": (_CDNA3, 304),
    "mi325x": (_CDNA3, 304), "mi250": (_CDNA3, 104), "mi355x": (_CDNA3, 256), "gaudi2": (_CDNA3, 24), "gaudi3": (_CDNA3, 64),
    "rtx3080": (_OTHER, 68), "rtx3090": (_OTHER, 82), "rtx4070": (_OTHER, 46), "rtx4080": (_OTHER, 76),
    "rtx4070laptop": (_OTHER, 36), "rtx4080laptop": (_OTHER, 58), "rtx4090laptop": (_OTHER, 76), "rtx5080": (_OTHER, 84),
    "rtxa5000": (_OTHER, 64), "rtx6000ada": (_OTHER, 142), "a10": (_OTHER, 72), "a40": (_OTHER, 84), "a800": (_A100, 108),
    "h800": (_H100, 132),
}  # fmt: skip
"""Devices whose products were not measured, with the chip of their generation and their number of multiprocessors."""
_ACHIEVED = {"a100": 0.87, "h100": 0.80, "b200": 0.78}
"""`Hardware.achievable` of the measured devices, by which that of another device scales its rate."""


STATIC = 0.25
"""Share of a device's power that memory and leakage take at any clock rate."""


def _sustained(base: Products, watts: float | None, tflops: float) -> float:
    """Share of the rate that another device of the generation sustains: clocks rise with the power above the static
    share to 0.42: between a third, where voltage rises with them, and one (fitted to GB200, GB300). A lower promised rate needs
    less limiting."""
    if base.watts is None or watts is None:
        return base.sustained
    dynamic = max(watts - STATIC * base.watts, 0.05 * watts) / (1 - STATIC) / base.watts
    return float(min(1.0, base.sustained * (dynamic * base.tflops / tflops) ** 0.42))


@lru_cache(maxsize=256)
def _products(chip: str, achievable: float, watts: float | None, tflops: float) -> Products:
    for generation in (chip, *(start for start in (*MEASURED, *_LIKE) if chip.startswith(start))):
        if generation in MEASURED:
            base, units, usual = MEASURED[generation], MEASURED[generation].units, _ACHIEVED[generation]
            break
        if generation in _LIKE:
            base, units = _LIKE[generation]
            usual = next(_ACHIEVED[name] for name, products in MEASURED.items() if products.rate == base.rate)
            break
    else:
        base, units, usual = _OTHER, _A100.units, _ACHIEVED["a100"]
    rate = min(base.rate * achievable / usual, 1.0)
    return replace(base, units=units, rate=rate, sustained=_sustained(base, watts, tflops))


def products_of(hardware: Hardware) -> Products:
    """Product parameters of a device: those of its chip, or of its generation, scaled by `achievable`."""
    return _products(hardware.chip, hardware.achievable, hardware.watts, hardware.rate("bf16") / 1e12)


def kinship(hardware: Hardware) -> str:
    """`measured`, if trainings of the device were measured; `sibling`, if those of its generation; otherwise
    `foreign`."""
    if hardware.unmeasured is None:
        return "measured"
    return "foreign" if products_of(hardware).watts is None else "sibling"


def product_seconds(
    m: "np.ndarray | float", n: "np.ndarray | float", k: "np.ndarray | float", *, width: float, peak: float, bandwidth: float,
    like: Products, share: float,
) -> np.ndarray:  # fmt: skip
    """Seconds of a product of (m, k) with (k, n).

    Args:
        width: bytes of a number.
        peak: FLOP/s of the device.
        bandwidth: bytes/s of its memory.
        like: product parameters of the device.
        share: sustained share of the rate.
    """
    best: Any = np.inf
    for a, b in TILES:
        waves = np.ceil(np.ceil(m / a) * np.ceil(n / b) / like.units)
        rate = peak * like.rate * share * (a * b / WHOLE_TILE) ** like.small
        time = waves * like.units * (2.0 * a * b * (k + like.lost)) / rate
        best = np.minimum(best, time)
    moved = width * (m * k + k * n + m * n) / (bandwidth * like.bandwidth)
    return like.fixed_us * 1e-6 + np.maximum(best, moved)


ATTENTION_SHARES: dict[str, dict[str, float]] = {
    "flash1": {"a100": 0.38, "h100": 0.22},
    "flash2": {"a100": 0.60, "h100": 0.37, "b200": 0.25, "mi300": 0.25},
    "flash3": {"a100": 0.60, "h100": 0.46, "b200": 0.52, "mi300": 0.25},
}
"""Share of the peak rate that forward and backward together reach with heads of 128 and long causal sequences; by the kernel's
generation and the chip's. cuDNN's and Transformer Engine's kernels are `flash3`."""
_OF_IMPLEMENTATIONS = {"sdpa": "flash3", "flash_attention_3": "flash3"}
"""Kernels of the values of the knob `attention`; `flash2` for others. PyTorch takes cuDNN's for `sdpa` where it is faster than
FlashAttention 2 (`sdpa` in docs/gpus.md)."""
HALF_LENGTH = 450.0
"""Sequence length in tokens at which attention has half of that rate."""
_GENERATIONS = {"v100": "a100", "h": "h100", "b": "b200", "gb": "b200", "rtx5": "b200", "mi": "mi300", "gaudi": "mi300"}


def kernel_of(implementation: str) -> str:
    """The kernel of an implementation, a value of the knob `attention`."""
    return _OF_IMPLEMENTATIONS.get(implementation, "flash2")


def attention_share(hardware: Hardware, kernel: str, keys: "float | np.ndarray", head_dim: int) -> Any:
    """Share of the peak rate that a fused attention kernel reaches, for `keys` keys in a call."""
    matches = (generation for start, generation in _GENERATIONS.items() if hardware.chip.startswith(start))
    generation = next(matches, "a100")
    shares = ATTENTION_SHARES[kernel]
    share = shares.get(generation, shares["h100"])
    return share * keys / (keys + HALF_LENGTH) * min(1.0, (head_dim / 128.0) ** 0.35)
