"""Cost and gain of a schedule: nothing applied, each primitive, each fused part, and tracing and verification of a
block.

    python bench/schedule.py                                                   # everything, some minutes on two cores
    python bench/schedule.py --only fused --rounds 20
    python bench/schedule.py --out bench/results/schedule.json --write bench/results/schedule.md

Ratios are medians over alternating turns, with the 95 % notch of the median: means are not meaningful on a machine
with other load.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redline as rl
import torch
import transformers
from torch import nn

WARM_UP = 3
BERT_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# Timing


def seconds(run: Callable[[], Any]) -> float:
    """Returns the seconds of a call, including the work on the device."""
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(one: Callable[[], Any], other: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Returns the median times of both, in ms, and the ratio of the second to the first with its notch."""
    times: list[tuple[float, float]] = []
    for number in range(rounds + WARM_UP):
        if number % 2:
            first, second = seconds(one), seconds(other)
        else:
            second, first = seconds(other), seconds(one)
        times.append((first, second))
    times = times[WARM_UP:]
    quartiles = statistics.quantiles([b / a for a, b in times], n=4)
    return {
        "one_ms": statistics.median(a for a, _ in times) * 1e3,
        "other_ms": statistics.median(b for _, b in times) * 1e3,
        "ratio": quartiles[1],
        "notch": 1.57 * (quartiles[2] - quartiles[0]) / len(times) ** 0.5,
    }


def passes(model: nn.Module, *given: Any, **named: Any) -> Callable[[], None]:
    """Returns a function that runs a forward and a backward pass."""

    def run() -> None:
        out = model(*given, **named)
        out = out.loss if hasattr(out, "loss") else out[0] if isinstance(out, tuple) else out
        (out if out.dim() == 0 else out.sum()).backward()

    return run


# Measurements


def nothing(rounds: int) -> dict[str, Any]:
    """Step time of a scheduled BERT with nothing applied, relative to the original."""
    config = transformers.BertConfig(
        vocab_size=1024, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
    )
    original = transformers.BertForMaskedLM(config).to(DEVICE)
    scheduled, _ = rl.build(rl.create_schedule(copy.deepcopy(original)))
    tokens = torch.randint(3, 1024, (4, 64), device=DEVICE)
    given = {"input_ids": tokens, "labels": tokens}
    return in_turns(passes(original, **given), passes(scheduled, **given), 4 * rounds)


APPLIED: dict[str, Callable[[Any], Any]] = {
    "hook": lambda sch: sch["output"].hook("fwd_post", lambda module, args, output: None),
    "checkpoint": lambda sch: sch.checkpoint(),
    "cast": lambda sch: sch["output"].cast(torch.bfloat16),
    "replace": lambda sch: sch["output.LayerNorm"].replace(lambda old: nn.LayerNorm(old.normalized_shape, eps=old.eps)),
    "trace": lambda sch: sch.trace(flatten=True),
    "find": lambda sch: sch.find("linear|dense"),
    "decompose": lambda sch: sch.decompose("linear"),
    "fuse": lambda sch: sch.fuse(sch.find("dropout.*")[0], compiler="none"),
    "fused_attention": lambda sch: sch.fused_attention(),
}
"""Primitives, applied to the schedule of one BERT-large block."""
OF_GRAPHS = ("find", "decompose", "fuse", "fused_attention")


def primitives(rounds: int) -> dict[str, float]:
    """Milliseconds to apply each primitive to a block of BERT-large, and seconds to apply tp=8 to all of BERT-large."""
    out: dict[str, float] = {}
    for name, apply in APPLIED.items():
        times = []
        for _ in range(max(rounds // 4, 3)):
            sch = block_of_bert("meta")
            if name in OF_GRAPHS:
                sch.trace(flatten=True)
            times.append(seconds(lambda sch=sch, apply=apply: apply(sch)))
        out[name] = statistics.median(times) * 1e3
    return out


def block_of_bert(device: str) -> Any:
    """Returns the schedule of one block of BERT-large, with attention in plain operations and an example of its call."""
    config = transformers.BertConfig(**BERT_LARGE, attn_implementation="eager")
    with torch.device(device):
        from transformers.models.bert.modeling_bert import BertLayer

        sch = rl.create_schedule(BertLayer(config))
        sch.tree.examples[""] = ((torch.randn(2, 32, 1024),), {})
    return sch


def tensor_parallel() -> dict[str, float]:
    """Seconds to schedule BERT-large over 8 ranks, with half of the blocks checkpointed."""
    from redline.models.families import schedule_of
    from redline.schedule.parallel.collectives import PlannedMesh

    with torch.device("meta"):
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(**BERT_LARGE, num_hidden_layers=24, vocab_size=30592)
        )
    sch = rl.create_schedule(model, PlannedMesh(tp=8))
    knobs = {"tp": 8, "sequence_parallel": True, "checkpoint_ratio": 0.5}
    return {"seconds": seconds(lambda: schedule_of("bert")(sch, knobs)), "steps": len(sch.tree.steps)}


def bert_large_block(rounds: int) -> dict[str, float]:
    """Seconds to trace one block of BERT-large and to verify it, with 2 samples of 32 tokens on real weights."""
    traced, verified = [], []
    for _ in range(3):
        sch = block_of_bert("cpu")
        traced.append(seconds(lambda sch=sch: sch.copy().trace(flatten=True)))

        def whole(sch: Any = sch) -> None:
            with rl.verify(sch, sch.tree.examples[""][0]):
                sch.trace(flatten=True).fused_attention()

        verified.append(seconds(whole))
    return {"trace_seconds": statistics.median(traced), "seconds": statistics.median(verified)}


class First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, tokens, features); returns the same shape."""
        return self.inner(x)[0]


def attention(dropout: float) -> nn.Module:
    """BERT-large's attention in plain operations."""
    from transformers.models.bert.modeling_bert import BertAttention

    rates = {"attention_probs_dropout_prob": dropout, "hidden_dropout_prob": dropout}
    return First(BertAttention(transformers.BertConfig(**BERT_LARGE, **rates, attn_implementation="eager")))


def cases() -> dict[str, tuple[nn.Module, tuple[Any, ...], Callable[[Any], Any]]]:
    """Returns the fused cases: a module, its inputs, and the fusion."""
    from transformers.activations import NewGELUActivation

    def hidden(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, requires_grad=True)

    parts = {
        "attention of 512 tokens": (attention(0.0), (hidden(2, 512, 1024),), lambda s: s.fused_attention()),
        "attention of 512 tokens, dropout": (attention(0.1), (hidden(2, 512, 1024),), lambda s: s.fused_attention()),
        "GELU by tanh, in plain operations": (NewGELUActivation(), (hidden(2, 512, 4096),), lambda s: s.fused_gelu()),
    }
    return {name: (module.to(DEVICE), given, apply) for name, (module, given, apply) in parts.items()}


def fused(rounds: int) -> dict[str, Any]:
    """Forward and backward passes of modules, original and fused."""
    out = {}
    for name, (module, given, apply) in cases().items():
        sch = rl.create_schedule(copy.deepcopy(module))
        sch.trace(flatten=True, examples=given)
        apply(sch)
        out[name] = in_turns(passes(module, *given), passes(rl.build(sch)[0], *given), rounds)
    return out


SECTIONS: dict[str, Callable[[int], Any]] = {
    "nothing": nothing,
    "primitives": primitives,
    "tensor_parallel": lambda rounds: tensor_parallel(),
    "bert_large_block": bert_large_block,
    "fused": fused,
}


# Output


def tables(found: dict[str, Any]) -> str:
    """Returns the figures in Markdown."""
    lines = []
    if step := found.get("nothing"):
        lines += [
            f"Nothing applied: a step of a small BERT takes {step['ratio']:.3f} ± {step['notch']:.3f} of the original's time."
        ]
    if block := found.get("bert_large_block"):
        lines += [
            f"One block of BERT-large is traced in {block['trace_seconds']:.2f} s; traced, fused and verified in "
            f"{block['seconds']:.1f} s."
        ]
    if whole := found.get("tensor_parallel"):
        lines += [
            f"BERT-large over 8 tensor-parallel ranks: {whole['steps']:.0f} primitives in {whole['seconds']:.2f} s."
        ]
    if each := found.get("primitives"):
        names = ", ".join(f"`{name}` {value:.2g}" for name, value in each.items())
        lines += [f"Milliseconds to apply to one block of BERT-large: {names}."]
    if rows := found.get("fused"):
        table = ["| forward and backward | original, ms | fused, ms | ratio |", "|---|---|---|---|"]
        for name, row in rows.items():
            table.append(
                f"| {name} | {row['one_ms']:.2f} | {row['other_ms']:.2f} | {row['ratio']:.2f} ± {row['notch']:.2f} |"
            )
        lines.append("\n".join(table))
    about = found["about"]
    lines.append(
        f"`python bench/schedule.py --write bench/results/schedule.md` on {about['device']}: Python {about['python']}, torch "
        f"{about['torch']}, transformers {about['transformers']}, float32."
    )
    return "\n\n".join(lines)


def device_name() -> str:
    """Returns the name of the device."""
    if DEVICE.type == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), {torch.get_num_threads()} threads"


def main() -> None:
    """Measures, prints, and writes if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="turns of each pair")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="repeatable")
    parser.add_argument("--out", type=Path, help="a JSON file; sections that are not run are kept in it")
    parser.add_argument("--write", type=Path, help="a Markdown file")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.out and options.out.exists():
        found = json.loads(options.out.read_text(encoding="utf-8"))
    found["about"] = {
        "device": device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for name in options.only or SECTIONS:
        torch.manual_seed(0)
        found[name] = SECTIONS[name](options.rounds)
        print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = tables(found)
    print("\n" + text)
    if options.write:
        options.write.write_text(f"# Cost of a schedule and gain of fusion\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
