"""What a schedule costs: lines of code, time to apply, and time a step where nothing is applied.

python bench/schedule.py
"""

import argparse
import ast
import inspect
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import redline as rl
import torch
from redline.models.families import bert, schedule_of
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import block_fusion
import kernel_injection
import parameter_sharding
import transformer_parallel


def bert_large() -> nn.Module:
    """BERT-large with its masked-language-model head, on the meta device."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 30592}
    config = BertConfig(intermediate_size=4096, **sizes)
    with torch.device("meta"):
        return BertForMaskedLM(config)


def apply_seconds(ranks: int) -> dict[str, float]:
    """Seconds to schedule BERT-large for tensor and sequence parallelism, half of the blocks checkpointed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        model = bert_large()
        start = time.perf_counter()
        sch = rl.create_schedule(model, mesh)
        knobs = {"tp": ranks, "sequence_parallel": True, "checkpoint_ratio": 0.5}
        schedule_of("bert")(sch, knobs)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "steps": len(sch.tree.steps)}
    finally:
        dist.destroy_process_group()


def step_ratio(rounds: int) -> dict[str, float]:
    """Step time of a scheduled model with nothing applied over that of the original, interleaved."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(3, 512, (4, 64), device=device)
    batch = {"input_ids": tokens, "labels": tokens}
    built, _ = rl.build(rl.create_schedule(transformer_parallel.tiny("bert")), device=device)
    original = transformer_parallel.tiny("bert").to_empty(device=device)
    original.load_state_dict(built.state_dict())
    for (_, theirs), (_, ours) in zip(original.named_buffers(), built.named_buffers()):
        theirs.copy_(ours)
    times: dict[str, list[float]] = {"original": [], "scheduled": []}
    for number in range(rounds):
        pair = [("original", original), ("scheduled", built)]
        for label, model in pair if number % 2 else reversed(pair):
            start = time.perf_counter()
            model(**batch).loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 3:
                times[label].append(time.perf_counter() - start)
    medians = {label: statistics.median(values) for label, values in times.items()}
    ratios = [b / a for a, b in zip(times["original"], times["scheduled"])]
    quartiles = statistics.quantiles(ratios, n=4)
    # The median and its 95 % notch: on a machine that others use too, means say little.
    spread = 1.57 * (quartiles[2] - quartiles[0]) / len(ratios) ** 0.5
    return {
        "original_ms": medians["original"] * 1e3,
        "scheduled_ms": medians["scheduled"] * 1e3,
        "ratio": quartiles[1],
        "spread": spread,
    }


def lines() -> dict[str, int]:
    """Lines of code of the example schedules: what one writes beside an untouched model."""
    functions: dict[str, list[Any]] = {
        "kernel injection": [kernel_injection.flat],
        "block fusion": [block_fusion.linear_norm_activation, block_fusion.schedule],
        "parameter sharding": [parameter_sharding.schedule],
        "every parallel knob of BERT": [bert],
    }
    return {name: sum(_code_lines(each) for each in group) for name, group in functions.items()}


def _code_lines(thing: Any) -> int:
    """Lines of a function or module without docstrings, comments and blank lines."""
    source = inspect.getsource(thing)
    left = dict(enumerate(source.splitlines(), 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            for number in range(node.body[0].lineno, node.body[0].end_lineno + 1):
                left.pop(number, None)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in left.values())


def main() -> None:
    """Prints the figures; `--json` as one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="measured steps of each model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    out = {
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.processor() or platform.machine(),
        "lines": lines(),
        "apply": apply_seconds(8),
        "step": step_ratio(options.rounds + 3),
    }
    if options.json:
        print(json.dumps(out))
        return
    print(f"torch {out['versions']['torch']}, Python {out['versions']['python']}, {out['machine']}")
    for name, count in out["lines"].items():
        print(f"  {name:36} {count:4d} lines")
    apply, step = out["apply"], out["step"]
    print(
        f"  BERT-large, tensor parallel 8, on meta: {apply['seconds']:.2f} s for {apply['steps']} primitives "
        "(goal: under 2 s)"
    )
    print(
        f"  nothing applied: {step['scheduled_ms']:.1f} ms a step, original {step['original_ms']:.1f} ms, "
        f"ratio {step['ratio']:.3f} +- {step['spread']:.3f}"
    )


if __name__ == "__main__":
    main()
