"""An export trains in its framework what the dry run trained: on two ranks, step by step.

Each framework trains llama-tiny and bert-tiny with the file that an export wrote, started by the line that
the export names, in a script as in the framework's documentation (`bench/export_trainers.py`). Weights
have the dry run's seed; batches and dropout (BERT's) are the dry run's, too.

Losses may differ by as much as rounding permits (`schedule/comparison.py`). Frameworks sum gradients in another
order, so weights differ from the first update on; the tolerance of step s is 2^s - 1 times that of the first.
A gradient that consists of rounding errors moves its weight by a whole learning rate in either direction, but the
loss hardly depends on that weight.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numeric
import pytest
import redline
from redline.frameworks import render
from redline.frameworks.common import ADAMW
from redline.results import Measurement, Status, Trial

pytestmark = pytest.mark.slow
ROOT = Path(redline.__file__).parent
CONFIG = {
    "tp": 1, "pp": 1, "dp": 2, "zero": 0, "micro_batch": 4, "grad_accum": 2, "checkpoint_ratio": 0.0,
    "precision": "fp32", "attention": "sdpa", "fusion": False, "fused_optimizer": True,
}  # fmt: skip
SHARDED = {**CONFIG, "zero": 3, "precision": "bf16", "checkpoint_ratio": 1.0}
"""Sharded where a framework shards on a CPU; exports to other frameworks state that they do not."""
SEQ_LEN, GLOBAL_BATCH, STEPS = 64, 16, 3
FRAMEWORKS = {
    "python": "torch", "trainer": "transformers", "accelerate": "accelerate", "deepspeed": "deepspeed",
    "lightning": "lightning",
}  # fmt: skip
"""Targets, and the package that runs their files."""
RUNS = [
    pytest.param(target, model, config, marks=() if quick else pytest.mark.exhaustive, id=f"{target}, {model}, {name}")
    for target in FRAMEWORKS
    for model in ("llama-tiny", "bert-tiny")
    for name, config in (("whole", CONFIG), ("sharded", SHARDED))
    for quick in [model == "llama-tiny" and config is CONFIG and target in ("python", "trainer")]
]


def document(model):
    return {
        "asked": {
            "model": model,
            "workload": {"id": "3f2a", "spec": model},
            "seq_len": SEQ_LEN,
            "global_batch": GLOBAL_BATCH,
            "seed": 0,
            "devices": {"type": "cpu", "used": 2, "per_host": 2},
        }
    }


def workload(model):
    return redline.workload(model, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH)


def train(model, config=CONFIG, scale=1.0, shift=0, drawn=None, by_step=False):
    """Trains as a rank of a dry run. Returns losses, norm of the first gradient, and settings of the optimizer.

    Args:
        model: a preset.
        config: its configuration.
        scale: a wrong factor of the gradients.
        shift: number of steps by which the batches are shifted.
        drawn: a wrong seed of dropout.
        by_step: seed dropout by the step, as a resumable training does, instead of by all previous draws.
    """
    import torch
    import torch.distributed as dist
    from redline.training import Training
    from torch.distributed.tensor import DTensor

    training = Training(workload(model), config, torch.device("cpu"), rank=dist.get_rank(), world_size=2)
    losses, gradient = [], None
    training._step += shift
    if drawn is not None:
        torch.manual_seed(drawn)
    for step in range(STEPS):
        if by_step:
            training.reseed(step)
        losses.append(float(training.passes()))
        for each in training.model.parameters():
            each.grad.mul_(scale)
        if gradient is None:
            norms = [each.grad.double().norm() for each in training.model.parameters()]
            norms = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
            gradient = torch.stack(norms).norm()
        training.update()
    (group,) = training.optimizer.param_groups
    return losses, float(gradient), {name: group[name] for name in (*ADAMW, "fused")}


def tolerances(model, config=CONFIG):
    """Relative tolerances of each step's loss and of the first gradient's norm, by the rule above."""
    import torch
    from redline.schedule.comparison import allowance, loss_allowance

    rows = GLOBAL_BATCH * SEQ_LEN
    with torch.device("meta"):
        half = torch.bfloat16 if config["precision"] == "bf16" else None
        outputs = allowance(workload(model).build_model({"attention": "sdpa"}), rows, dtype=half)
    return [loss_allowance(outputs, rows) * (2**step - 1) for step in range(1, STEPS + 1)], outputs


@pytest.fixture(scope="module")
def dry_run(two):
    """Result of a preset's dry run, cached."""
    known = {}

    def of(model, config=CONFIG, by_step=False):
        key = model, config["zero"], by_step
        if key not in known:
            known[key] = two.run(train, model, config, 1.0, 0, None, by_step)[0]
        return known[key]

    return of


def departures(found, expected):
    return [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]


def exported(target, model, folder, config=CONFIG, steps=STEPS, options=()):
    """Runs an export by the line it names. Returns the values that its training printed."""
    measured = Measurement(status=Status.OK, throughput=1.0, unit="tokens/s", devices=2)
    made = render(target, Trial(number=0, config=config, measurement=measured), document(model))
    name = {"python": "train.py", "deepspeed": "deepspeed.json"}.get(target, f"{target}.yaml")
    (folder / name).write_text(made.text)
    start = made.use[-1].removeprefix("Start: ")
    more = ["--steps", str(steps), *options]
    if target == "python":
        more += ["--log-every", "1"]
    else:
        # The script takes as arguments the settings that users would write into their own.
        script = f"{ROOT / 'bench' / 'export_trainers.py'} {target} {name}"
        start = re.sub(r"train\.py\b.*", script, start)
        more += ["--model", model, "--seq-len", str(SEQ_LEN), "--global-batch", str(GLOBAL_BATCH)]
        more += ["--attention", "sdpa", "--micro-batch", "4", "--grad-accum", "2", "--fused"]
        more += ["--checkpoint"] if config["checkpoint_ratio"] and target != "trainer" else []
        more += ["--reshard"] if config["zero"] == 3 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # The package's folder replaces an installed package.
    environment["PYTHONPATH"] = f"{ROOT.parent}:{os.environ.get('PYTHONPATH', '')}"
    # Each run uses its own port.
    start = start.replace("torchrun ", "torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 ", 1)
    done = subprocess.run(
        ["bash", "-c", f'{start} "$@"', "bash", *more],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if target == "python":
        return {"losses": [float(each) for each in re.findall(r"loss (\S+)", done.stdout)]}
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    return json.loads(line)


@pytest.mark.parametrize(("target", "model", "config"), RUNS)
def test_an_export_trains_what_the_dry_run_trained(target, model, config, dry_run, tmp_path):
    pytest.importorskip(FRAMEWORKS[target])
    losses, gradient, optimizer = dry_run(model, config, target == "python")
    allowed, allowed_gradient = tolerances(model, config)
    found = exported(target, model, tmp_path, config)
    for step, departs in enumerate(departures(found["losses"], losses)):
        # The script prints six decimals.
        printed = 5e-7 / abs(losses[step]) if target == "python" else 0.0
        numeric.within(departs, allowed[step] + printed, f"the loss of step {step + 1}")
    if target == "python":
        return
    numeric.within(abs(found["gradient"] / gradient - 1), allowed_gradient, "the norm of the first gradient")
    for kind, lr, betas, eps, weight_decay, fused, _ in found["optimizer"]:
        assert kind == "AdamW"
        assert (lr, tuple(betas), eps, fused) == (
            optimizer["lr"], tuple(optimizer["betas"]), optimizer["eps"], optimizer["fused"],
        )  # fmt: skip
        # The Trainer does not decay biases and norms, as its file states.
        spared = {0.0} if target == "trainer" else set()
        assert weight_decay in {optimizer["weight_decay"], *spared}
    assert found["optimizer"][0][4] == optimizer["weight_decay"]


def test_a_script_that_continues_follows_its_learning_rate(tmp_path):
    options = ("--lr", "1e-2", "--warmup", "8")
    whole = exported("python", "llama-tiny", tmp_path, steps=5, options=options)["losses"]
    kept = (*options, "--checkpoints", "kept")
    parts = [exported("python", "llama-tiny", tmp_path, steps=steps, options=kept)["losses"] for steps in (2, 5)]
    assert [*parts[0], *parts[1]] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("model", ["llama-tiny", "bert-tiny"])
def test_another_training_is_told_from_it(model, dry_run, two):
    """The tolerances above detect another training. The learning rate is compared itself: it hardly affects these losses."""
    losses, gradient, _ = dry_run(model)
    allowed, allowed_gradient = tolerances(model)
    doubled = two.run(train, model, CONFIG, 2.0)[0][1]  # a sum over two micro-batches instead of their mean
    numeric.caught(abs(doubled / gradient - 1), allowed_gradient, "the norm of twice the gradient")
    later = two.run(train, model, CONFIG, 1.0, 1)[0][0]
    numeric.caught(departures(later, losses)[0], allowed[0], "the first loss on another batch")
    other = two.run(train, model, CONFIG, 1.0, 0, 99)[0][0]
    if model == "bert-tiny":
        numeric.caught(departures(other, losses)[0], allowed[0], "the first loss with other dropout")
    else:
        assert other == losses  # the model has no dropout


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama-tiny", "bert-tiny"])
def test_a_dry_run_tells_the_loss_that_exports_are_held_to(model, dry_run):
    from redline.base.device import detect
    from redline.runners.place.local import LocalRunner
    from redline.runners.runner import TrialRequest, TrialTerms
    from redline.runners.trial.timing import TimingPlan
    from redline.space import Config

    terms = TrialTerms(device=detect(), devices=2, threads=1, plan=TimingPlan(seconds=0.1))
    with LocalRunner(workload(model), terms) as runner:
        measured = runner.run(TrialRequest(config=Config(CONFIG), number=0))
    assert measured.status is Status.OK, measured.reason
    assert measured.loss == dry_run(model)[0][0]
