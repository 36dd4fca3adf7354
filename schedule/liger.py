"""Replaces norms, gated feed-forward modules and rotary embeddings by Liger-Kernel's Triton kernels.

A module's function is determined by running it on a few numbers, not by its name: Gemma's norm scales by 1 + weight,
and Llama's, with almost the same name, by weight. Weights, their names and the modules below stay the same objects.

Source: Hsu et al., Liger Kernel (2024), https://arxiv.org/abs/2410.10989.
"""

import copy
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..base._torch import buffers_of, children_of, parameters_of
from .comparison import departure
from .schedule import Schedule

CLOSE = 1e-5
"""Largest relative departure of a module from a formula: far above rounding in float32, far below another formula."""
_ROTARY = "apply_rotary_pos_emb"
"""Name of the function in transformers' attention modules that rotates queries and keys."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def replace_modules(sch: Schedule) -> list[str]:
    """Replaces the modules below `sch` that have a Liger kernel; call it before modules are sharded or traced.

    Returns:
        Paths of the replaced modules.
    """
    replaced = []
    for path, module in list(sch.module.named_modules()):
        replacement = _replacement(module) if path else None
        if replacement is not None:
            sch[path].replace(replacement)
            replaced.append(path)
    return replaced


def _replacement(old: nn.Module) -> nn.Module | None:
    """Returns a module that computes the same as `old` with Liger's kernel; None if Liger has none."""
    if (norm := rms_norm_of(old)) is not None:
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        with torch.device(old.weight.device):
            # In place, its backward would overwrite a gradient that a residual sum also needs.
            return LigerRMSNorm(len(old.weight), *norm, in_place=False)
    if is_layer_norm(old):
        return _adopt(LayerNorm, old)
    if (gated := gated_by(old)) is not None:
        return _adopt({"silu": SwiGLU, "gelu": GeGLU}[gated], old)
    if rotates(old):
        forward = forward_with(type(old).forward, _rotate)
        return _adopt(type(type(old).__name__, (type(old),), {"forward": forward}), old)
    return None


def rms_norm_of(old: nn.Module) -> tuple[float, float, str] | None:
    """Returns epsilon, offset and casting mode of an RMS norm: x / sqrt(mean(x**2) + epsilon) * (offset + weight).

    None for a module that computes something else.
    """
    weight, epsilon = _only_vector(old), getattr(old, "variance_epsilon", getattr(old, "eps", None))
    if weight is None or not isinstance(epsilon, float):
        return None
    generator = torch.Generator().manual_seed(0)
    # Small numbers, for which epsilon changes the result.
    inputs = 3 * epsilon**0.5 * torch.randn(4, len(weight), generator=generator)
    scale = torch.rand(len(weight), generator=generator) + 0.5

    def run(x: torch.Tensor) -> torch.Tensor:
        return _run(old, x, _parameters={"weight": scale})

    actual = run(inputs)
    for offset in (0.0, 1.0):
        expected = inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + epsilon) * (offset + scale)
        if departure(expected, actual) < CLOSE:
            # Llama's norm rounds to the format of the input before scaling, Gemma's after.
            return epsilon, offset, "gemma" if run(inputs.bfloat16()).dtype == torch.bfloat16 else "llama"
    return None


def is_layer_norm(old: nn.Module) -> bool:
    """True for a LayerNorm over the last dimension with a weight and a bias."""
    plain = type(old) is nn.LayerNorm and len(old.normalized_shape) == 1
    return plain and old.weight is not None and old.bias is not None


def gated_by(old: nn.Module) -> str | None:
    """Returns the activation of a module that computes down(act(gate(x)) * up(x)): `silu`, or `gelu` (tanh approximation).

    None for a module that computes something else.
    """
    if not set(_PROJECTIONS) <= children_of(old).keys() or not _takes_one(old) or parameters_of(old):
        return None
    # Multiplications by different primes in place of the projections: a swap of two of them shows in the result.
    inputs = torch.linspace(-1, 1, 9)
    stand_ins = {name: _Times(factor) for name, factor in zip(_PROJECTIONS, (2, 3, 5))}
    try:
        actual = _run(old, inputs, _modules={**children_of(old), **stand_ins})
    except (AttributeError, RuntimeError):  # the module reads attributes of its projections
        return None
    for act, name in ((F.silu, "silu"), (lambda values: F.gelu(values, approximate="tanh"), "gelu")):
        if departure(5 * act(2 * inputs) * 3 * inputs, actual) < CLOSE:
            return name
    return None


def rotates(old: nn.Module) -> bool:
    """True for an attention module whose forward calls transformers' rotary embedding."""
    forward = type(old).forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    rotate = getattr(forward, "__globals__", {}).get(_ROTARY)
    if _ROTARY not in names or not isinstance(rotate, FunctionType) or "forward" in old.__dict__:
        return False
    parameters = list(inspect.signature(rotate).parameters)[:4]
    return parameters == ["q", "k", "cos", "sin"] and _rotates_halves(rotate)


def forward_with(forward: Any, rotate: Callable[..., Any]) -> FunctionType:
    """Returns a copy of an attention module's forward that calls `rotate` as the rotary embedding."""
    globals_with_kernel = {**forward.__globals__, _ROTARY: rotate}
    copied = FunctionType(forward.__code__, globals_with_kernel, forward.__name__, None, forward.__closure__)
    copied.__defaults__, copied.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    return copied


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k: (samples, heads, tokens, features), overwritten; cos, sin: (samples or 1, tokens, features)."""
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)


def _rotates_halves(rotate: Callable[..., Any]) -> bool:
    """True if a function rotates the first half of each head's features with the second, of q and of k."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 3, 5, 8, generator=generator), torch.randn(1, 2, 5, 8, generator=generator)
    angle = torch.randn(1, 5, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    actual = rotate(q, k, cos, sin)
    expected = [t * cos[:, None] + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin[:, None] for t in (q, k)]
    return len(actual) == 2 and all(departure(*pair) < CLOSE for pair in zip(expected, actual))


class LayerNorm(nn.LayerNorm):
    """LayerNorm by Liger's kernel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from liger_kernel.ops import LigerLayerNormFunction

        return LigerLayerNormFunction.apply(input, self.weight, self.bias, self.eps)


class SwiGLU(nn.Module):
    """A feed-forward module gated by SiLU, by Liger's kernel; its backward overwrites the inputs of the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., features); returns the same shape."""
        from liger_kernel.ops import LigerSiLUMulFunction

        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x), 1.0, 1.0))


class GeGLU(nn.Module):
    """A feed-forward module gated by GELU in its tanh approximation, by Liger's kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., features); returns the same shape."""
        from liger_kernel.ops import LigerGELUMulFunction

        return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class _Times(nn.Module):
    """A multiplication in place of a projection."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def _adopt(kind: Any, old: nn.Module) -> nn.Module:
    """Returns a module of another class with the attributes, tensors and children of `old`."""
    adopted = kind.__new__(kind)
    adopted.__dict__ = dict(vars(old))
    for name, value in vars(old).items():
        if isinstance(value, dict):
            adopted.__dict__[name] = copy.copy(value)
    return adopted


def _run(module: nn.Module, x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """Returns the output of a module's own forward, without hooks, with other parameters or children."""
    twin = _adopt(type(module), module)
    twin.__dict__.update(attributes)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return type(module).forward(twin, x)


def _only_vector(module: nn.Module) -> torch.Tensor | None:
    """Returns a module's weight if it is a vector and the module's only tensor; None otherwise."""
    weight = parameters_of(module).get("weight")
    is_only_tensor = len(parameters_of(module)) == 1 and not children_of(module) and not buffers_of(module)
    return weight if is_only_tensor and weight is not None and weight.dim() == 1 and _takes_one(module) else None


def _takes_one(module: nn.Module) -> bool:
    """True if a module's own forward takes exactly one tensor."""
    return "forward" not in module.__dict__ and len(inspect.signature(type(module).forward).parameters) == 2
