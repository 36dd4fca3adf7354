"""Kernel injection: every LayerNorm of a BERT replaced by another implementation, in one line.

python examples/kernel_injection.py
"""

import time

import redline as rl
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM


class FlatLayerNorm(nn.LayerNorm):
    """A LayerNorm whose forward is one call of the native kernel: the place for a kernel of your own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)[0]


def flat(old: nn.LayerNorm) -> FlatLayerNorm:
    """The replacement; weights, hooks and the training mode come from the old module."""
    return FlatLayerNorm(old.normalized_shape, eps=old.eps)


def model() -> nn.Module:
    """A small BERT without memory."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    config = BertConfig(vocab_size=1024, **sizes)
    with torch.device("meta"):
        return BertForMaskedLM(config)


def main() -> None:
    """Verifies the schedule and times a training step with and without it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(0, 1024, (8, 64), device=device)
    batch = {"input_ids": tokens, "labels": tokens}

    sch = rl.create_schedule(model())
    with rl.verify(sch, batch, device=device):
        sch.replace_all(nn.LayerNorm, flat)

    plain, _ = rl.build(rl.create_schedule(model()), device=device)
    fast, _ = rl.build(sch, device=device)
    replaced = sum(isinstance(each, FlatLayerNorm) for each in fast.modules())
    print(f"verified; {replaced} modules replaced by one line")
    for label, each in (("original", plain), ("injected", fast)):
        print(f"{label:10} {step_ms(each, batch, device):8.1f} ms a step")


def step_ms(each: nn.Module, batch: dict[str, torch.Tensor], device: torch.device, steps: int = 8) -> float:
    """The fastest of some forward and backward passes, ms."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        each(**batch).loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
