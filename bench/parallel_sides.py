"""The sides of `bench/parallel.py`: programs that the ranks of a trial run, each timed alike.

Every side trains the same model on the same global batch of the same data. A program returns the milliseconds of each
measured optimizer step on its rank.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redline.models import Workload
from redline.models.batches import batch_slice, make_batch, to_device
from redline.runners.trial.dry_run import join
from redline.runners.trial.rank import RankContext

IMPORTS = ("accelerate", "transformers.trainer", "torch.distributed.fsdp", __name__)
"""Modules that a host agent imports once for all sides."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way of training a workload on several ranks; called on each of them."""

    workload: Workload
    micro_batch: int = 1
    """Samples in a forward pass of a replica."""
    precision: str = "fp32"
    """`fp32`, or `bf16` for autocast."""
    warmup: int = 3
    """Steps that are not measured."""
    steps: int = 8
    """Steps that are measured."""

    def __call__(self, context: RankContext) -> list[float]:
        device = join_as_by_torchrun(context)
        context.phase("training")
        return self.train(context, device)[self.warmup :]

    def train(self, context: RankContext, device: Any) -> list[float]:
        """Trains for `warmup + steps` steps and returns the milliseconds of each."""
        step = self.make_step(context, device)
        taken = []
        for number in range(self.warmup + self.steps):
            begin = now(device)
            step(number)
            taken.append((now(device) - begin) * 1e3)
        return taken

    def make_step(self, context: RankContext, device: Any) -> Callable[[int], None]:
        """Returns a function that runs optimizer step s."""
        raise NotImplementedError

    def accumulate(self, context: RankContext) -> int:
        """Returns the micro-batches in the share of a replica."""
        return self.workload.global_batch // (context.world_size * self.micro_batch)

    def share(self, context: RankContext, step: int, device: Any) -> list[Any]:
        """Returns the micro-batches of a replica in a step."""
        whole = make_batch(self.workload, self.workload.global_batch, step % 8)
        size = self.workload.global_batch // context.world_size
        local_batch = to_device(batch_slice(whole, context.rank * size, (context.rank + 1) * size), device)
        return [batch_slice(local_batch, at, at + self.micro_batch) for at in range(0, size, self.micro_batch)]

    def autocast(self, device: Any) -> contextlib.AbstractContextManager:
        import torch

        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")


def join_as_by_torchrun(context: RankContext) -> Any:
    """As `join`, with the environment that torchrun gives a rank, which other libraries read; returns the rank's device."""
    import os

    import torch

    for name, value in {
        "RANK": context.rank,
        "LOCAL_RANK": context.local_rank,
        "WORLD_SIZE": context.world_size,
        "LOCAL_WORLD_SIZE": context.local_world_size,
        "OMP_NUM_THREADS": torch.get_num_threads(),
    }.items():
        os.environ[name] = str(value)
    torch.manual_seed(0)
    join(context)
    on_cpu = context.device_type == "cpu"
    return torch.device(context.device_type, None if on_cpu else context.local_rank)


def now(device: Any) -> float:
    """Returns the time in seconds after all work issued so far."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


class PlainDDP(Side):
    """DistributedDataParallel with the loop of its tutorial; gradients are accumulated under `no_sync`."""

    def make_step(self, context: RankContext, device: Any) -> Callable[[int], None]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(self.workload.build_model({}).to(device).train(), device_ids=ids)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        count = self.accumulate(context)

        def step(number: int) -> None:
            for at, batch in enumerate(self.share(context, number, device)):
                with model.no_sync() if at + 1 < count else contextlib.nullcontext():
                    with self.autocast(device):
                        loss = model(**batch).loss / count
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


class TransformersTrainer(Side):
    """`transformers.Trainer` with its own loader, optimizer, schedule and clipping, data parallel."""

    def train(self, context: RankContext, device: Any) -> list[float]:
        import itertools
        import tempfile

        import transformers

        begins: list[float] = []
        total = self.warmup + self.steps
        batches = (
            dict(make_batch(self.workload, self.workload.global_batch, number)) for number in range(min(total, 8))
        )
        samples = [
            {name: values[row] for name, values in batch.items()}
            for batch in batches
            for row in range(self.workload.global_batch)
        ]

        class StepClock(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                begins.append(now(device))

        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=self.micro_batch,
                gradient_accumulation_steps=self.accumulate(context),
                max_steps=total + 1,
                bf16=self.precision == "bf16",
                use_cpu=device.type == "cpu",
                ddp_backend="gloo" if device.type == "cpu" else None,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            model = self.workload.build_model({})
            transformers.Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[StepClock()]).train()
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(begins)]


def blocks_of(model: Any) -> set[str]:
    """Returns the class names of the modules that transformers does not split, except those with tied weights.

    FSDP2 requires these (BERT's embeddings) in one group with the modules they are tied to.
    """
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    names = set(model._no_split_modules or ())
    return {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in names and not any(id(each) in tied for each in module.parameters())
    }


class FSDP2(Side):
    """FSDP2 as accelerate configures it: each block that transformers names is sharded, and the whole model around
    them.

    On GPUs it is accelerate itself. On a CPU accelerate does not support FSDP, so `fully_shard` is called in the same
    way.
    """

    def make_step(self, context: RankContext, device: Any) -> Callable[[int], None]:
        import torch

        model = self.workload.build_model({}).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if device.type == "cuda":
            from accelerate import Accelerator, FullyShardedDataParallelPlugin

            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=sorted(blocks_of(model)),
            )
            accelerator = Accelerator(
                fsdp_plugin=plugin, mixed_precision=self.precision if self.precision == "bf16" else "no"
            )
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            from torch.distributed.fsdp import fully_shard

            blocks = blocks_of(model)
            for module in list(model.modules()):
                if type(module).__name__ in blocks:
                    fully_shard(module)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        count = self.accumulate(context)

        def step(number: int) -> None:
            for at, batch in enumerate(self.share(context, number, device)):
                model.set_requires_gradient_sync(at + 1 == count)
                with self.autocast(device):
                    loss = model(**batch).loss / count
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


class TensorParallel(Side):
    """Layers sharded over all ranks by torch's DTensor with transformers' plan of the model, as torchtitan does for
    Llama.
    """

    def make_step(self, context: RankContext, device: Any) -> Callable[[int], None]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model = self.workload.build_model({}).to(device).train()
        styles = {
            "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
            "colwise": ColwiseParallel(),
            "rowwise": RowwiseParallel(),
            "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        }
        mesh = init_device_mesh(context.device_type, (context.world_size,))
        # A tied embedding and head is not sharded.
        tied = model.config.tie_word_embeddings
        plan = {path: style for path, style in model.tp_plan.items() if not tied or "layers" in path}
        parallelize_module(model, mesh, {path: styles[style] for path, style in plan.items()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        whole = self.workload.global_batch

        def step(number: int) -> None:
            batch = to_device(make_batch(self.workload, whole, number % 8), device)
            for at in range(0, whole, self.micro_batch):
                with self.autocast(device):
                    loss = model(**batch_slice(batch, at, at + self.micro_batch)).loss * self.micro_batch / whole
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


@dataclass(frozen=True, kw_only=True)
class Redline(Side):
    """A configuration proposed by redline, trained as in its trials."""

    config: Any

    def make_step(self, context: RankContext, device: Any) -> Callable[[int], None]:
        from redline.training import Training

        training = Training(self.workload, self.config, device, rank=context.rank, world_size=context.world_size)

        def step(number: int) -> None:
            training.step()

        return step
