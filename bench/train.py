"""A training that is killed and resumed in other strategies, compared with an uninterrupted one, through the command
line.

    python bench/train.py                      # half an hour on two cores: ten minutes of training, twice
    python bench/train.py --steps 60 --turns 0

A small Llama is saved as a Hugging Face checkpoint and fine-tuned on English prose that Python ships (the topics of
`pydoc`) with a user's commands: `redline train` starts with tp=2, is killed (SIGKILL), continues with zero=3, is
killed, and ends with pp=2. Then dry runs of each strategy and short trainings in it alternate. Prints the differences of
the losses from those of the same training without an interruption, the cost of checkpoints, and the throughput of
trainings relative to the dry runs around them (median and each).
"""

import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import machine, parser

REDLINE = [sys.executable, "-m", "redline.cli"]
VOCABULARY = 2048
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
COMMON = ("precision=fp32", "fusion=false", "kernels=false", "checkpoint_ratio=0", "micro_batch=8")
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "tp=2": ("tp=2", "pp=1", "sequence_parallel=false"),
    "zero=3": ("zero=3", "tp=1", "pp=1"),
    "pp=2": ("pp=2", "tp=1", "virtual_stages=1", "pipeline_schedule=1f1b"),
}
STEPS_OF_A_TURN = 120
SAVES = 6
"""Minimum number of checkpoints of a part that is killed after two thirds of it."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=900, help="optimizer steps; 0 for the turns alone")
    options.add_argument("--turns", type=int, default=5, help="turns of dry run and training in each strategy")
    options.add_argument("--out", type=Path, default=Path("build/train"))
    arguments = options.parse_args()
    out = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    base = prepare(out)
    figures: dict[str, Any] = {"machine": machine()}
    if arguments.steps:
        figures |= interrupted(out, base, arguments.steps)
    if arguments.turns:
        ratios = {name: in_turns(out, base, name, arguments.turns) for name in STRATEGIES}
        figures["throughput_over_dry_run"] = {
            name: [statistics.median(turns), sorted(turns)] for name, turns in ratios.items()
        }
    print(json.dumps(figures, indent=1))


def interrupted(out: Path, base: Path, steps: int) -> dict[str, Any]:
    """Runs the training that is killed twice, and the uninterrupted one."""
    whole = out / "whole"
    train(out, base, whole, "tp=2", steps)
    parts = out / "parts"
    for number, name in enumerate(STRATEGIES, 1):
        last = number == len(STRATEGIES)
        train(out, base, parts, name, steps, resume=number > 1, kill_at=None if last else steps * number // 3)
    expected, found = curve(whole), curve(parts)
    pairs = [(expected[step][0], loss) for step, losses in found.items() for loss in losses]
    return {
        "steps": steps,
        "loss": [expected[1][0], expected[steps][0]],
        "largest_departure": max(abs(loss - other) / other for other, loss in pairs),
        "checkpoint_share_of_time": overhead(parts),
    }


def in_turns(out: Path, base: Path, name: str, turns: int) -> list[float]:
    """Returns the throughput of short trainings, each relative to the mean of the dry runs just before and after it."""
    ratios, before = [], dry_run(out, base, name)
    for turn in range(turns):
        folder = out / f"turn-{name.replace('=', '')}-{turn}"
        train(out, base, folder, name, STEPS_OF_A_TURN, minutes=1)
        after = dry_run(out, base, name)
        ratios.append(2 * steady(folder) / (before + after))
        before = after
    return ratios


def prepare(out: Path) -> Path:
    """Creates a corpus, a tokenizer for it, and a checkpoint to start from."""
    from pydoc_data.topics import topics

    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    corpus = out / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": each}) + "\n" for each in topics.values()), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    base = out / "base"
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>", pad_token="<|end|>"
    )
    fast.save_pretrained(base)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(base)
    return base


def dry_run(out: Path, base: Path, name: str) -> float:
    """Returns the tokens per second that `redline tune` measures for a strategy."""
    fixed = [each for knob in (*STRATEGIES[name], *COMMON) for each in ("--fix", knob)]
    folder = out / f"tune-{name.replace('=', '')}"
    shutil.rmtree(folder, ignore_errors=True)
    sizes = ("--seq-len", 128, "--global-batch", 16, "--devices", 2)
    run("tune", base, "--runner", "local", "--trials", 1, "--measure-time", "10s", *sizes, *fixed, "--out", folder)
    import yaml

    return float(yaml.safe_load((folder / "best.yaml").read_text())["best"]["throughput"])


def train(
    out: Path,
    base: Path,
    folder: Path,
    name: str,
    steps: int,
    *,
    resume: bool = False,
    kill_at: int | None = None,
    minutes: float = 0,
) -> None:
    """Runs `redline train`, or its first part up to a kill, with a checkpoint every few minutes or steps."""
    fixed = [each for knob in (*STRATEGIES[name], *COMMON) for each in ("--fix", knob)]
    if resume:
        words = [folder, "--resume", *fixed]
    else:
        data = ("--data", out / "corpus.jsonl", "--tokenizer", base, "--held-out", 0.05, "--eval-every", steps // 6)
        settings = out / "settings.yaml"
        settings.write_text(f"warmup: {steps // 20}\nlog_every: 1\nsave_minutes: {minutes}\n")
        learns = ("--steps", steps, "--lr", "1e-3", "--settings", settings)
        every = 0 if minutes else max(1, steps // (3 * SAVES))
        saves = ("--save-every", every)
        words = [base, "--from", base, *data, *learns, *saves, "--out", folder]
        words += ["--seq-len", 128, "--global-batch", 16, "--devices", 2, *fixed]
    if kill_at is None:
        run("train", *words)
        return
    process = subprocess.Popen([*REDLINE, "train", *map(str, words)], stdout=subprocess.DEVNULL)
    while max(curve(folder), default=0) < kill_at:
        time.sleep(0.2)
        if process.poll() is not None:
            raise SystemExit(f"the training ended before it was killed, with status {process.returncode}")
    process.send_signal(signal.SIGKILL)
    process.wait()
    print(f"killed at step {max(curve(folder))} under {name}", flush=True)


def run(*words: object) -> None:
    """Runs a command of redline."""
    print("redline " + " ".join(map(str, words)), flush=True)
    subprocess.run([*REDLINE, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the log of the training."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(each) for each in whole if each.endswith("\n")]


def curve(folder: Path) -> dict[int, list[float]]:
    """Returns the losses of each step, each time that it ran."""
    out: dict[int, list[float]] = {}
    for each in lines(folder):
        if each["kind"] == "step":
            out.setdefault(each["step"], []).append(each["loss"])
    return out


def steady(folder: Path) -> float:
    """Returns the median of tokens per second in the later two thirds of a training."""
    rates = [each["tokens_per_second"] for each in lines(folder) if each["kind"] == "step"]
    return statistics.median(rates[len(rates) // 3 :])


def overhead(folder: Path) -> float:
    """Share of time that a training with a checkpoint a minute would lose to checkpoints.

    The lost time is the stall, and the increase of step times while a checkpoint is written. Median over checkpoints.
    """
    saves = {each["step"]: each for each in lines(folder) if each["kind"] == "checkpoint" and not each["failure"]}
    times = {each["step"]: each["step_ms"] / 1e3 for each in lines(folder) if each["kind"] == "step"}
    costs = []
    for step, save in saves.items():
        usual = statistics.median(times[each] for each in range(step - 20, step + 20) if each in times)
        lost, left, after = save["stalled"], save["seconds"] - save["stalled"], step + 1
        while left > 0 and after in times:
            lost += times[after] - usual
            left -= times[after]
            after += 1
        costs.append(lost)
    return statistics.median(costs) / 60


if __name__ == "__main__":
    main()
