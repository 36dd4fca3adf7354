"""What `bench/parallel.py` compares: programs that the ranks of one trial run, each timed alike.

Every side trains the same model on the same global batch of the same data. A program returns the milliseconds of each
measured optimizer step on its rank.
"""

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redline.models import Workload
from redline.models.batches import batch_slice, make_batch, to_device
from redline.runners.dry_run import join
from redline.runners.rank import RankContext

IMPORTS = ("accelerate", "transformers.trainer", "torch.distributed.fsdp", __name__)
"""What the sides import, for a host agent to import once."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way of training a workload on several ranks; called on each of them."""

    workload: Workload
    """What is trained."""
    micro_batch: int = 1
    """Samples in one forward pass of one replica."""
    precision: str = "fp32"
    """`fp32`, or `bf16` for autocast."""
    warmup: int = 3
    """Steps that do not count."""
    steps: int = 8
    """Steps that do."""

    def __call__(self, context: RankContext) -> list[float]:
        import torch

        for name, value in {
            "RANK": context.rank,
            "LOCAL_RANK": context.local_rank,
            "WORLD_SIZE": context.world_size,
            "LOCAL_WORLD_SIZE": context.world_size,
            "OMP_NUM_THREADS": torch.get_num_threads(),
        }.items():
            os.environ[name] = str(value)
        torch.manual_seed(0)
        join(context)
        device = torch.device(context.device_type, context.local_rank if context.device_type == "cuda" else None)
        context.phase("training")
        return self.train(context, device)[self.warmup :]

    def train(self, context: RankContext, device: Any) -> list[float]:
        """Trains for `warmup + steps` steps; the milliseconds of each."""
        step = self.make_step(context, device)
        taken = []
        for number in range(self.warmup + self.steps):
            begin = now(device)
            step(number)
            taken.append((now(device) - begin) * 1e3)
        return taken

    def make_step(self, context: RankContext, device: Any) -> Callable[[int], None]:
        """A function that does optimizer step s."""
        raise NotImplementedError

    def accumulate(self, context: RankContext) -> int:
        """Micro-batches of a replica's share."""
        return self.workload.global_batch // (context.world_size * self.micro_batch)

    def share(self, context: RankContext, step: int, device: Any) -> list[Any]:
        """A replica's micro-batches of a step."""
        whole = make_batch(self.workload, self.workload.global_batch, step % 8)
        size = self.workload.global_batch // context.world_size
        mine = to_device(batch_slice(whole, context.rank * size, (context.rank + 1) * size), device)
        return [batch_slice(mine, at, at + self.micro_batch) for at in range(0, size, self.micro_batch)]

    def autocast(self, device: Any) -> contextlib.AbstractContextManager:
        import torch

        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")


def now(device: Any) -> float:
    """Seconds, after all work issued so far."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


class PlainDDP(Side):
    """DistributedDataParallel in a loop as its tutorial has it, gradients accumulated under `no_sync`."""

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


def blocks_of(model: Any) -> set[str]:
    """Class names of the modules that transformers keeps in one piece, but for those that hold tied weights (BERT's
    embeddings): FSDP2 wants these in one group with what they are tied to."""
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
    """FSDP2 as accelerate sets it up: each block that transformers names sharded, and the whole around them.

    accelerate itself on GPUs. On a CPU it does not do FSDP, so there `fully_shard` is called as it would.
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
    """Layers cut over all ranks by torch's DTensor, by transformers' plan of the model: as torchtitan cuts its Llama."""

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
        # What is both embedding and head stays whole.
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


class Trainer(Side):
    """transformers.Trainer with its defaults: its data loader, its optimizer, its schedule, clipping at 1."""

    def train(self, context: RankContext, device: Any) -> list[float]:
        import transformers

        steps = self.warmup + self.steps
        share = [batch for number in range(min(steps, 8)) for batch in self._samples(number)]
        marks: list[float] = []

        class Marks(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                marks.append(now(device))

        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=self.micro_batch,
                gradient_accumulation_steps=self.accumulate(context),
                max_steps=steps + 1,
                bf16=self.precision == "bf16",
                use_cpu=device.type == "cpu",
                ddp_backend="gloo" if device.type == "cpu" else None,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            trainer = transformers.Trainer(
                model=self.workload.build_model({}), args=arguments, train_dataset=share, callbacks=[Marks()]
            )
            if trainer.accelerator.num_processes != context.world_size:
                raise RuntimeError(f"Trainer sees {trainer.accelerator.num_processes} of {context.world_size} ranks")
            trainer.train()
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(marks)]

    def _samples(self, step: int) -> list[dict[str, Any]]:
        whole = make_batch(self.workload, self.workload.global_batch, step)
        return [{name: value[at] for name, value in whole.items()} for at in range(self.workload.global_batch)]


@dataclass(frozen=True, kw_only=True)
class Redline(Side):
    """A configuration that redline proposed, trained as its trials are."""

    config: Any

    def make_step(self, context: RankContext, device: Any) -> Callable[[int], None]:
        from redline.training import Training

        training = Training(self.workload, self.config, device, rank=context.rank, world_size=context.world_size)

        def step(number: int) -> None:
            training.step()

        return step
