"""The train.py of an export for each trainer: measured by `bench/exports.py` and run by the tests of exports.

    torchrun --nproc-per-node 2 bench/export_trainers.py trainer trainer.yaml --model llama-tiny --steps 8

Each function trains a preset as in the documentation of its framework, with the weights and batches of the dry run, at
the micro-batch, accumulation, precision, optimizer and other settings in the file of the export. Settings that a file
leaves to its user (`--micro-batch`, `--grad-accum`, `--attention`), or that the framework does not have, are
arguments. Losses are gathered at the end; the last line of rank 0 is JSON:

    losses      of each optimizer step, the mean over micro-batches and ranks
    step_ms     of each optimizer step but the first, on the slowest rank: from the end of the one before to its own
    cpu_ms      CPU time of the same steps, on the rank with the most; it excludes waiting and other processes
    gradient    Euclidean norm of the first step's gradient, averaged over micro-batches and ranks
    optimizer   for each group of parameters: class, learning rate, betas, epsilon, weight decay, fused, tensors
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from redline.models import workload
from redline.models.batches import make_batch
from redline.schedule.materialise import materialise
from redline.training.training import MAX_STEPS_OF_DATA, seeded
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")


class Record:
    """Losses and step times of this rank."""

    def __init__(self) -> None:
        self.losses: list[list[Any]] = [[]]
        """Losses of the micro-batches of each optimizer step."""
        self.ends: list[float] = []
        """Times at the end of the optimizer steps, s."""
        self.used: list[float] = []
        """CPU time up to then, s."""
        self.gradient = 0.0
        """Norm of the gradient of the first step."""
        self.norm: Callable[[], float] | None = None
        """Function that returns the norm of the gradient if the state of the optimizer does not give it."""

    def begin(self) -> None:
        """Called before the first step: seeds dropout as in the replica of this rank in the dry run."""
        torch.manual_seed(RANK)

    def loss(self, value: torch.Tensor) -> None:
        self.losses[-1].append(value.detach().float())

    def end(self, optimizer: Any) -> None:
        """Called after an optimizer step."""
        if not self.ends:
            self.gradient = float(self.norm()) if self.norm else first_gradient(optimizer)
        if CUDA:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.used.append(time.process_time())
        self.losses.append([])

    def tell(self, optimizer: Any) -> None:
        """Prints the records of all ranks."""
        optimizer = unwrapped(optimizer)
        own_record = (
            [float(sum(step) / len(step)) for step in self.losses if step],
            [(end - begin) * 1e3 for begin, end in itertools.pairwise(self.ends)],
            [(end - begin) * 1e3 for begin, end in itertools.pairwise(self.used)],
        )
        ranks: list[Any] = [own_record] * WORLD_SIZE
        if WORLD_SIZE > 1:
            dist.all_gather_object(ranks, own_record)
        groups = [
            [type(optimizer).__name__, *(group[name] for name in ("lr", "betas", "eps", "weight_decay", "fused"))]
            + [len(group["params"])]
            for group in optimizer.param_groups
        ]
        summary = {
            "losses": [sum(each) / WORLD_SIZE for each in zip(*(losses for losses, _, _ in ranks))],
            "step_ms": [max(each) for each in zip(*(times for _, times, _ in ranks))],
            "cpu_ms": [max(each) for each in zip(*(used for _, _, used in ranks))],
            "gradient": self.gradient,
            "optimizer": groups,
        }
        if RANK == 0:
            print(json.dumps(summary), flush=True)


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the PyTorch optimizer inside that of a framework."""
    while type(optimizer).__module__.partition(".")[0] != "torch":
        optimizer = optimizer.optimizer
    return optimizer


def first_gradient(optimizer: Any) -> float:
    """Returns the norm of the gradient of AdamW's first step: its moving average started at zero."""
    optimizer = unwrapped(optimizer)
    norms = []
    for group in optimizer.param_groups:
        for each in group["params"]:
            norm = (optimizer.state[each]["exp_avg"].detach() / (1 - group["betas"][0])).double().norm()
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return float(torch.stack(norms).norm())


class Task:
    """A preset with the weights and the batches of its dry run, with seed 0."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.record = Record()
        self.workload = workload(options.model, seq_len=options.seq_len, global_batch=options.global_batch)

    def model(self) -> torch.nn.Module:
        with seeded(0, torch.device("cpu")), torch.device("meta"):
            model = self.workload.build_model({"attention": self.options.attention}).train()
        materialise(model, DEVICE, 0, hub=model)
        # For the Trainer, which otherwise takes their loss to be a sum over labels.
        if self.workload.model.task in ("masked", "seq2seq"):
            model.accepts_loss_kwargs = False
        if self.options.checkpoint:
            model.gradient_checkpointing_enable()
        return model

    def micro_batches(self, size: int, accumulate: int) -> list[list[dict[str, torch.Tensor]]]:
        """Returns the micro-batches of this rank for each optimizer step."""
        whole = [self._whole(step) for step in range(self.options.steps)]
        share = size * accumulate
        return [
            [
                {name: value[at : at + size] for name, value in batch.items()}
                for at in range(RANK * share, (RANK + 1) * share, size)
            ]
            for batch in whole
        ]

    def samples(self, size: int, accumulate: int) -> list[dict[str, torch.Tensor]]:
        """Returns all samples, in the order in which batches assigned to the ranks in turn give each its micro-batches."""
        order = [
            (rank * accumulate + micro) * size + sample
            for micro in range(accumulate)
            for rank in range(WORLD_SIZE)
            for sample in range(size)
        ]
        whole = [self._whole(step) for step in range(self.options.steps)]
        return [{name: value[at] for name, value in batch.items()} for batch in whole for at in order]

    def _whole(self, step: int) -> dict[str, torch.Tensor]:
        return make_batch(self.workload, self.workload.global_batch, step % MAX_STEPS_OF_DATA)


def redline(task: Task) -> None:
    """The loop of a dry run, for the comparison of CPU time."""
    from redline.training import Training

    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if CUDA else "gloo")
    names = ("micro_batch", "grad_accum", "attention")
    config = {name: getattr(task.options, name) for name in names if getattr(task.options, name)}
    config |= {"dp": WORLD_SIZE, "fused_optimizer": task.options.fused}
    training = Training(task.workload, config, DEVICE, rank=RANK, world_size=WORLD_SIZE)
    for _ in range(task.options.steps):
        task.record.loss(training.step())
        task.record.end(training.optimizer)
    task.record.tell(training.optimizer)


def trainer(task: Task) -> None:
    """transformers.Trainer."""
    import transformers

    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    parse = parser.parse_json_file if task.options.file.endswith(".json") else parser.parse_yaml_file
    (arguments,) = parse(task.options.file)
    arguments.max_steps = task.options.steps
    # Settings of the comparison, not of the training: the order of the data, and no checkpoint at the end.
    arguments.train_sampling_strategy = "sequential"
    arguments.save_strategy = transformers.trainer_utils.SaveStrategy.NO
    arguments.disable_tqdm = True

    class Recorded(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            # The Trainer has divided it by the micro-batches, or by the labels of all of them on all ranks.
            task.record.loss(loss * self.args.gradient_accumulation_steps)
            return loss

    class Marks(transformers.TrainerCallback):
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                task.record.begin()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **given: Any) -> None:
            task.record.end(given["optimizer"])

    made = Recorded(
        model=task.model(),
        args=arguments,
        train_dataset=task.samples(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps),
        callbacks=[Marks()],
    )
    made.train()
    task.record.tell(made.optimizer)


def accelerate(task: Task) -> None:
    """accelerate, with the loop of its documentation; the settings of its file come from `accelerate launch`."""
    from accelerate import Accelerator

    size, accumulate = task.options.micro_batch, task.options.grad_accum
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    assert accelerator.num_processes == WORLD_SIZE, f"{accelerator.num_processes} of {WORLD_SIZE} processes"
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=task.options.fused or None)
    loader = torch.utils.data.DataLoader(task.samples(size, accumulate), batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        if number == 0:
            task.record.begin()  # only here, because starting a loader draws a seed
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            task.record.loss(loss)
        if accelerator.sync_gradients:
            task.record.end(optimizer)
    task.record.tell(optimizer)


def deepspeed(task: Task) -> None:
    """DeepSpeed's engine."""
    import deepspeed as framework

    framework.init_distributed(dist_backend="nccl" if CUDA else "gloo")
    model = task.model()
    engine, optimizer, _, _ = framework.initialize(
        model=model, model_parameters=model.parameters(), config=task.options.file
    )
    if engine.zero_optimization_stage() > 0:
        task.record.norm = engine.get_global_grad_norm
    batches = task.micro_batches(engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    task.record.begin()
    for step in batches:
        for batch in step:
            loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            task.record.loss(loss)
        task.record.end(optimizer)
    task.record.tell(optimizer)


def lightning(task: Task) -> None:
    """Lightning, whose LightningCLI reads the file."""
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.strategies import ModelParallelStrategy

    size, accumulate = task.options.micro_batch, task.options.grad_accum

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()

        def configure_model(self) -> None:
            if not isinstance(self.trainer.strategy, ModelParallelStrategy) or isinstance(self.model, FSDPModule):
                return
            lists = [each for each in self.model.modules() if isinstance(each, torch.nn.ModuleList)]
            blocks = max(lists, key=len)
            for each in [*blocks, self.model]:
                fully_shard(each, mesh=self.device_mesh["data_parallel"], reshard_after_forward=task.options.reshard)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # LightningCLI replaces it by that of the file, unless the file has none.
            assert isinstance(self.trainer.strategy, ModelParallelStrategy), "the file has no optimizer"
            return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01, fused=task.options.fused or None)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 0:
                task.record.begin()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            task.record.loss(loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % accumulate == 0:
                task.record.end(self.optimizers())

    class Batches(torch.utils.data.IterableDataset):
        """The micro-batches of this rank: Lightning's own sampler would assign samples in another order."""

        def __iter__(self) -> Iterator[Any]:
            return iter([batch for step in task.micro_batches(size, accumulate) for batch in step])

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Batches(), batch_size=None)

    cli = LightningCLI(
        Module,
        Data,
        run=False,
        save_config_callback=None,
        args=["--config", task.options.file, "--trainer.max_steps", str(task.options.steps)],
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    task.record.tell(cli.trainer.optimizers[0])


TRAINERS = {each.__name__: each for each in (redline, trainer, accelerate, deepspeed, lightning)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("file", nargs="?", help="what redline export wrote; not read by accelerate's own script")
    parser.add_argument("--model", required=True, help="a preset")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--attention", help="default: the model's")
    parser.add_argument("--micro-batch", type=int, help="accelerate and lightning leave it to the data")
    parser.add_argument("--grad-accum", type=int, help="likewise")
    parser.add_argument("--fused", action="store_true", help="accelerate leaves the optimizer to its user")
    parser.add_argument(
        "--checkpoint", action="store_true", help="recompute all blocks; the Trainer's file says so itself"
    )
    parser.add_argument(
        "--reshard", action="store_true", help="free gathered weights after each block: lightning leaves it"
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    options = parser.parse_args()
    # Losses may be equal only through the recorded state of the dry run, not through a common default seed.
    random.seed()
    torch.manual_seed(random.randrange(2**31))
    with tempfile.TemporaryDirectory() as folder:
        if options.file:
            options.file = os.path.abspath(options.file)
        os.chdir(folder)  # for checkpoints and logs of frameworks
        TRAINERS[options.trainer](Task(options))
    # Frameworks keep process groups until the end; gloo's threads, which may then still own tensors, abort a few per
    # cent of the processes at exit (PyTorch's pull request 179291).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
