"""Cost of a schedule and gain of fusion: nothing applied, BERT-large over 8 ranks, one block traced, and each fused part.

    python bench/schedule.py --write bench/results/schedule.md     # some minutes on two cores

Ratios are medians over alternating turns, with the 95 % notch of the median: means are not meaningful on a machine
with other load.
"""

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import redline as rl
import torch
import transformers
from common import machine, markdown, parser
from torch import nn

WARM_UP = 3
BERT_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Turns(NamedTuple):
    """Medians over turns."""

    first_ms: float
    second_ms: float
    ratio: float
    """Of the second to the first."""
    notch: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.notch:.3f}"


def seconds(run: Callable[[], Any]) -> float:
    """Returns the seconds of a call, including the work on the device."""
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> Turns:
    """Returns the times of two calls that alternate."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + WARM_UP):
        times = [seconds(run) for run in ((first, second) if number % 2 else (second, first))]
        pairs.append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    pairs = pairs[WARM_UP:]
    quartiles = statistics.quantiles([after / before for before, after in pairs], n=4)
    medians = [statistics.median(column) * 1e3 for column in zip(*pairs, strict=True)]
    return Turns(*medians, quartiles[1], 1.57 * (quartiles[2] - quartiles[0]) / len(pairs) ** 0.5)


def passes(model: nn.Module, *args: Any, **kwargs: Any) -> Callable[[], None]:
    """Returns a function that runs a forward and a backward pass."""

    def run() -> None:
        output = model(*args, **kwargs)
        output = output.loss if hasattr(output, "loss") else output[0] if isinstance(output, tuple) else output
        (output if output.dim() == 0 else output.sum()).backward()

    return run


def nothing(rounds: int) -> Turns:
    """Step time of a scheduled BERT with nothing applied, relative to the original."""
    config = transformers.BertConfig(
        vocab_size=1024, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
    )
    original = transformers.BertForMaskedLM(config).to(DEVICE)
    scheduled, _ = rl.build(rl.create_schedule(copy.deepcopy(original)))
    tokens = torch.randint(3, 1024, (4, 64), device=DEVICE)
    batch = {"input_ids": tokens, "labels": tokens}
    return in_turns(passes(original, **batch), passes(scheduled, **batch), 4 * rounds)


def tensor_parallel() -> tuple[int, float]:
    """Primitives that schedule BERT-large over 8 ranks, with half of the blocks checkpointed, and their seconds."""
    from redline.models.families import schedule_of
    from redline.schedule.parallel.collectives import PlannedMesh

    config = transformers.BertConfig(**BERT_LARGE, num_hidden_layers=24, vocab_size=30592)
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    sch = rl.create_schedule(model, PlannedMesh(tp=8))
    knobs = {"tp": 8, "sequence_parallel": True, "checkpoint_ratio": 0.5}
    taken = seconds(lambda: schedule_of("bert")(sch, knobs))
    return len(sch.tree.steps), taken


def one_block() -> tuple[float, float]:
    """Seconds to trace one block of BERT-large, and to trace, fuse and verify it on 2 samples of 32 tokens."""
    from transformers.models.bert.modeling_bert import BertLayer

    sch = rl.create_schedule(BertLayer(transformers.BertConfig(**BERT_LARGE, attn_implementation="eager")))
    sch.tree.examples[""] = ((torch.randn(2, 32, 1024),), {})
    traced = statistics.median(seconds(lambda: sch.copy().trace(flatten=True)) for _ in range(3))

    def verified() -> None:
        with rl.verify(sch, sch.tree.examples[""][0]):
            sch.trace(flatten=True).fused_attention()

    return traced, seconds(verified)


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


def fused(rounds: int) -> dict[str, Turns]:
    """Forward and backward passes of modules, original and fused."""
    from transformers.activations import NewGELUActivation

    cases: dict[str, tuple[nn.Module, int, Callable[[Any], Any]]] = {
        "attention of 512 tokens": (attention(0.0), 1024, lambda sch: sch.fused_attention()),
        "attention of 512 tokens, dropout": (attention(0.1), 1024, lambda sch: sch.fused_attention()),
        "GELU by tanh, in plain operations": (NewGELUActivation(), 4096, lambda sch: sch.fused_gelu()),
    }
    turns = {}
    for name, (module, width, fuse) in cases.items():
        module = module.to(DEVICE)
        hidden = torch.randn(2, 512, width, device=DEVICE, requires_grad=True)
        sch = rl.create_schedule(copy.deepcopy(module))
        sch.trace(flatten=True, examples=(hidden,))
        fuse(sch)
        turns[name] = in_turns(passes(module, hidden), passes(rl.build(sch)[0], hidden), rounds)
    return turns


def main() -> None:
    """Measures, prints, and writes if requested."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=30, help="turns of each pair")
    options.add_argument("--write", type=Path, help="a Markdown file")
    arguments = options.parse_args()
    torch.manual_seed(0)
    steps, sharded_s = tensor_parallel()
    traced_s, verified_s = one_block()
    rows = [
        (name, f"{turns.first_ms:.2f}", f"{turns.second_ms:.2f}", turns)
        for name, turns in fused(arguments.rounds).items()
    ]
    text = "\n\n".join((
        "# Cost of a schedule and gain of fusion",
        f"Nothing applied: a step of a small BERT takes {nothing(arguments.rounds)} of the original's time.",
        f"One block of BERT-large is traced in {traced_s:.2f} s; traced, fused and verified in {verified_s:.1f} s.",
        f"BERT-large over 8 tensor-parallel ranks: {steps} primitives in {sharded_s:.2f} s.",
        markdown(("forward and backward", "original, ms", "fused, ms", "ratio"), rows),
        f"`python bench/schedule.py --write bench/results/schedule.md`, float32, {torch.get_num_threads()} threads on "
        f"{machine()}",
    ))  # fmt: skip
    print(text)
    if arguments.write:
        arguments.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
