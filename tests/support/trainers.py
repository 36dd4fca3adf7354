"""Programs that train with other frameworks, what is known of each, and their clocks.

The programs are in `tests/runners/command/programs`. A program writes when its steps ended and with which losses (`clock.py`
there); what redline measures of its command is compared with that. Its forward pass sleeps for a known time
(`cost.py` there).
"""

import contextlib
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from house import ROOT

PROGRAMS = ROOT / "tests" / "runners" / "command" / "programs"

seconds = runpy.run_path(str(PROGRAMS / "cost.py"))["seconds"]
"""Returns the duration of a forward pass with a number of samples."""


@dataclass(frozen=True)
class Step:
    end: float
    samples: int
    """Samples of all ranks."""
    losses: tuple[str, ...]
    """Losses of this rank's micro-batches, to the bit."""


@dataclass(frozen=True)
class Apart:
    activity: str
    start: float
    end: float


@dataclass(frozen=True)
class Clock:
    """What a rank has recorded; times are of `time.monotonic()`."""

    rank: int
    pid: int
    start: float
    steps: tuple[Step, ...]
    apart: tuple[Apart, ...]

    @property
    def losses(self) -> list[tuple[str, ...]]:
        return [step.losses for step in self.steps]

    def rate(self, after: int = 5, until: int | None = None, apart: bool = False) -> float:
        """Returns the samples per second of wall time between the ends of two steps, counted from 1.

        Time spent in evaluations, saves and generations counts only with `apart`.
        """
        steps = self.steps[:until]
        start, end = steps[after - 1].end, steps[-1].end
        other = sum(min(span.end, end) - span.start for span in self.apart if start <= span.start < end)
        return sum(step.samples for step in steps[after:]) / (end - start - (0 if apart else other))


@dataclass(frozen=True)
class Run:
    returncode: int
    output: str
    """Text of stdout and stderr."""
    clocks: tuple[Clock, ...]
    """Clocks in the order of ranks."""


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    command: str
    """With {python}, {programs}, {trial_dir}, {assets}, {batch}, {accumulate}, {global_batch}, {steps} and the `settings`."""
    prepare: str | None = None
    """A command that writes what the program reads to {assets}."""
    batch: int = 8
    """Micro-batch of a rank."""
    accumulate: int = 1
    steps: int = 40
    ranks: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)
    """Further placeholders and their defaults."""
    true_batch: int | None = None
    """Samples of a step where the program does not do what its arguments ask for."""
    losses: int | None = None
    """Losses that the clock gets in a step, where they are not one for each micro-batch."""
    optimizers: int = 1
    """Calls of `step` of torch's optimizers in a step."""
    activities: frozenset[str] = frozenset()
    """Activities besides training that the clock times."""
    needs: tuple[str, ...] = ()
    """Modules without which it cannot run."""
    unseen_steps: int = 0
    """Steps whose end cannot be seen."""
    slow: bool = False
    returncode: int = 0
    true_steps: int | None = None
    """Steps where it does not do `steps`."""
    message: str | None = None
    """Text that the output has."""

    def samples(self) -> int:
        """Returns the true samples of a step, over all ranks."""
        return self.true_batch or self.batch * self.accumulate * self.ranks

    def text(self, trial_dir: Path, assets: Path) -> str:
        """Returns the command with its settings filled in."""
        sizes = {"batch": self.batch, "accumulate": self.accumulate, "steps": self.steps, **self.settings}
        folders = {"programs": PROGRAMS, "trial_dir": trial_dir, "assets": assets}
        global_batch = self.batch * self.accumulate * self.ranks
        return self.command.format(python=sys.executable, global_batch=global_batch, **folders, **sizes)

    def write_assets(self, folder: Path) -> None:
        """Writes the files that the program reads, for the setting `assets`."""
        folder.mkdir()
        if self.prepare is not None:
            words = shlex.split(self.prepare.format(python=sys.executable, programs=PROGRAMS, assets=folder))
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, **ENVIRONMENT})
            assert done.returncode == 0, done.stdout + done.stderr

    def run(self, folder: Path, environment: Mapping[str, str] | None = None) -> Run:
        """Runs the command in a new `folder` and returns its output and its clocks.

        `environment` is added to this process's. Raises subprocess.TimeoutExpired after 5 minutes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        clocks, trial_dir = folder / "clocks", folder / "trial"
        clocks.mkdir()
        trial_dir.mkdir()
        self.write_assets(folder / "assets")
        environment = {
            **ENVIRONMENT,
            "CLOCK": str(clocks),
            "HF_MODULES_CACHE": str(folder / "modules"),
            **(environment or {}),
        }
        if any((BESIDE / module).is_dir() for module in self.needs):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(BESIDE)]))
        process = subprocess.Popen(
            shlex.split(self.text(trial_dir, folder / "assets")),
            cwd=trial_dir,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            # Ranks that outlive their launcher.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Run(process.returncode, output, read_clocks(clocks))


BESIDE = Path(sys.prefix, "beside")
"""Where trainers are that are installed without their own requirements (see the Makefile)."""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "PYTHONUNBUFFERED": "1",
}


def read_clocks(folder: Path) -> tuple[Clock, ...]:
    """Returns the clocks that the ranks of a program have written to `folder`, by rank."""
    return tuple(sorted((_clock(path) for path in folder.glob("*.jsonl")), key=lambda clock: clock.rank))


def _clock(path: Path) -> Clock:
    # A killed program leaves half a line.
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return Clock(
        rank=lines[0]["rank"],
        pid=lines[0]["pid"],
        start=lines[0]["start"],
        steps=tuple(Step(line["step"], line["samples"], tuple(line["losses"])) for line in lines if "step" in line),
        apart=tuple(Apart(line["apart"], line["from"], line["to"]) for line in lines if "apart" in line),
    )


def rows(*names: str) -> list:
    """Returns pytest's parameters for the programs of these names, or for all."""
    assert set(names) <= {program.name for program in TABLE}
    return [_row(program) for program in TABLE if not names or program.name in names]


def _row(program: Program):
    missing = [module for module in program.needs if not _installed(module)]
    marks = [pytest.mark.skip(reason=f"needs {', '.join(missing)}")] if missing else []
    return pytest.param(program, id=program.name, marks=[*marks, pytest.mark.slow] if program.slow else marks)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # the package that the module is in


SCRIPT = "{python} {programs}/"
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 {programs}/"
LOOP = " --batch {batch} --steps {steps}"
ACCUMULATING = f"{LOOP} --accumulate {{accumulate}}"
TRAINER = (
    f"{SCRIPT}hf_trainer.py --output_dir {{trial_dir}}/model --use_cpu --report_to none --save_strategy no"
    " --per_device_train_batch_size {batch} --gradient_accumulation_steps {accumulate} --max_steps {steps}"
)
EVALUATION = frozenset({"evaluation"})

TABLE = (
    Program(
        name="nanogpt",
        command=f"{SCRIPT}nanogpt.py --batch_size={{batch}} --max_iters={{steps}}"
        " --gradient_accumulation_steps={accumulate} --out_dir={trial_dir}",
        accumulate=2,
        activities=EVALUATION | {"saving"},
    ),
    Program(name="ddp", command=f"{TORCHRUN}ddp.py{ACCUMULATING}", accumulate=2, ranks=2, slow=True),
    Program(name="trainer", command=TRAINER, accumulate=2, slow=True),
    Program(
        name="trainer-evaluating",
        command=f"{TRAINER} --eval_on_start true --eval_strategy steps --eval_steps 15 --per_device_eval_batch_size 4",
        accumulate=2,
        activities=EVALUATION,
        slow=True,
    ),
    Program(
        # accelerate takes a tenth off the batch until it fits: 32, 28, 25, 22, 19, 17, 15.
        name="trainer-auto-find-batch-size",
        command=f"{TRAINER} --auto_find_batch_size true --largest_batch 16",
        batch=32,
        true_batch=15,
        slow=True,
    ),
    Program(name="trainer-compiled", command=f"{TRAINER} --torch_compile true", accumulate=2, slow=True),
    Program(
        name="accelerate",
        command=f"{{python}} -m accelerate.commands.launch --cpu --num_processes 1 --mixed_precision no"
        f" {{programs}}/accelerate_loop.py{ACCUMULATING}",
        accumulate=4,
        slow=True,
    ),
    Program(
        name="lightning",
        command=f"{SCRIPT}lightning_fit.py{ACCUMULATING}",
        accumulate=2,
        activities=EVALUATION,
        needs=("lightning",),
        slow=True,
    ),
    Program(
        name="lightning-cli",
        command=f"{SCRIPT}lightning_cli.py fit --trainer.default_root_dir {{trial_dir}} --trainer.max_steps {{steps}}"
        " --trainer.accumulate_grad_batches {accumulate} --data.batch_size {batch}",
        accumulate=4,
        activities=EVALUATION,
        needs=("lightning", "jsonargparse"),
        slow=True,
    ),
    Program(
        name="stalls",
        command=f"{SCRIPT}stalls.py{LOOP} --shard {{shard}}",
        steps=65,
        settings={"shard": 64},
    ),
    Program(name="stalls-worker", command=f"{SCRIPT}stalls.py{LOOP} --shard 64 --workers 1", steps=65, slow=True),
    Program(name="gan", command=f"{SCRIPT}gan.py{LOOP}", losses=3, optimizers=2, slow=True),
    Program(
        name="two-optimizers",
        command=f"{SCRIPT}two_optimizers.py{ACCUMULATING}",
        accumulate=2,
        optimizers=2,
        slow=True,
    ),
    Program(
        name="amp",
        command=f"{SCRIPT}amp.py -b {{batch}} --grad-accum-steps {{accumulate}} --epochs 1 --steps {{steps}}"
        " --amp --amp-dtype bfloat16",
        accumulate=2,
        activities=EVALUATION,
        slow=True,
    ),
    Program(name="spawn", command=f"{SCRIPT}spawn.py{LOOP}", ranks=2, slow=True),
    Program(name="shell-script", command="sh {programs}/launch.sh {batch} {steps} {python}", optimizers=2, slow=True),
    Program(name="compiled-step", command=f"{SCRIPT}compiled_step.py{LOOP}", unseen_steps=1, slow=True),
    Program(
        name="compiled-step-and-model", command=f"{SCRIPT}compiled_step.py{LOOP} --model", unseen_steps=1, slow=True
    ),
    Program(
        name="compiled-step-eager",
        command=f"{SCRIPT}compiled_step.py{LOOP} --model --backend eager",
        unseen_steps=1,
        slow=True,
    ),
    Program(name="numpy", command=f"{SCRIPT}numpy_loop.py{LOOP}", optimizers=0),
    Program(
        name="reinforce",
        command=f"{SCRIPT}reinforce.py{LOOP} --updates 2",
        activities=frozenset({"generation"}),
        slow=True,
    ),
    Program(name="checkpointing", command=f"{SCRIPT}checkpointing.py{LOOP}", slow=True),
    Program(
        name="optimizer-in-backward", command=f"{SCRIPT}checkpointing.py{LOOP} --in-backward", optimizers=10, slow=True
    ),
    Program(
        name="oom-of-rank-1",
        command=f"{TORCHRUN}failures.py oom{LOOP}",
        ranks=2,
        returncode=1,
        true_steps=10,
        message="torch.OutOfMemoryError: CUDA out of memory",
        slow=True,
    ),
    Program(
        name="oom-and-exit-0",
        command=f"{SCRIPT}failures.py swallowed{LOOP}",
        true_steps=10,
        message="torch.OutOfMemoryError: CUDA out of memory",
        slow=True,
    ),
    Program(
        # The batch at which it ran out of memory is skipped.
        name="oom-handled",
        command=f"{SCRIPT}failures.py handled{LOOP}",
        true_steps=39,
        message="out of memory, batch skipped",
        slow=True,
    ),
    Program(
        name="oom-of-a-thread",
        command=f"{SCRIPT}failures.py thread{LOOP}",
        message="torch.OutOfMemoryError: CUDA out of memory",
        slow=True,
    ),
    Program(
        name="error",
        command=f"{SCRIPT}failures.py raises{LOOP}",
        returncode=1,
        true_steps=10,
        message="ValueError: expected 10 classes",
        slow=True,
    ),
    *(
        Program(
            name=f"deepspeed-zero-{stage}",
            command=f"{TORCHRUN}zero.py{ACCUMULATING} --stage {stage}",
            accumulate=2,
            ranks=2,
            needs=("deepspeed",),
            slow=True,
        )
        for stage in (0, 2, 3)
    ),
    Program(
        name="trl-sft",
        command="{python} -m trl.cli.main sft --model_name_or_path {assets}/model --trust_remote_code"
        " --dataset_name {assets}/data --output_dir {trial_dir}/model --use_cpu --bf16 false --report_to none"
        " --save_strategy no --eval_strategy steps --eval_steps 15 --per_device_eval_batch_size 4"
        " --per_device_train_batch_size {batch} --gradient_accumulation_steps {accumulate} --max_steps {steps}",
        prepare="{python} {programs}/trl_assets.py {assets}",
        accumulate=2,
        activities=EVALUATION,
        needs=("trl",),
        slow=True,
    ),
    Program(
        name="torchtitan",
        command=f"{TORCHRUN}titan.py --module titan --config tiny --dump_folder {{trial_dir}} --debug.seed 0"
        " --training.local_batch_size {batch} --training.global_batch_size {global_batch} --training.steps {steps}",
        accumulate=2,
        steps=20,
        ranks=2,
        needs=("torchtitan", "triton"),
        slow=True,
    ),
    Program(
        # Its training is bounded by tokens: 40 steps of two micro-batches of 8 samples.
        name="litgpt",
        command=f"{SCRIPT}litgpt_pretrain.py pretrain pythia-14m --data litgpt_pretrain.Tokens --out_dir {{trial_dir}}/model"
        " --model_config.name tiny --model_config.n_layer 2 --model_config.n_embd 32 --model_config.n_head 2"
        " --model_config.block_size 16 --model_config.vocab_size 128 --model_config.padded_vocab_size 128"
        " --precision 32-true --devices 1 --logger_name csv --eval.interval 15 --eval.max_iters 2"
        " --optimizer litgpt_pretrain.TimedAdamW --train.lr_warmup_steps 5 --train.max_tokens {tokens}"
        " --train.micro_batch_size {batch} --train.global_batch_size {global_batch}",
        accumulate=2,
        settings={"tokens": 40 * 8 * 2 * 16},
        losses=1,
        needs=("litgpt",),
        slow=True,
    ),
    Program(
        name="megatron",
        command="{python} -m torch.distributed.run --standalone --nproc-per-node 1 {programs}/megatron_loop.py"
        f"{ACCUMULATING}",
        accumulate=2,
        optimizers=2,
        needs=("megatron.core",),
        slow=True,
    ),
)
