"""Throughput of `transformers.Trainer` with its default settings, which a scaling can be compared with.

It is measured on the devices at hand: ranks train the workload with Trainer's own data loader, optimizer, schedule and clipping,
data parallel, 8 samples a rank at once or as many as it has. On described hardware it is predicted with Trainer's conventions.
"""

import itertools
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.device import detect, usable_cores
from ..models import Workload
from ..models.architecture import Architecture
from ..models.batches import make_batch
from ..models.spaces import TRAINER_MICRO_BATCH
from ..results import Status
from ..runners.rank import RankContext

WARMUP, STEPS = 3, 8
"""Steps before the measured ones, and measured steps."""
DIFFERENT = 8
"""Different batches."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class TrainerSteps:
    """Program of a rank: trains by `transformers.Trainer` and returns the milliseconds of each measured step."""

    workload: Workload
    micro_batch: int
    """Samples in a forward pass of a replica."""
    precision: str = "fp32"
    """`fp32`, or `bf16` for autocast."""
    warmup: int = WARMUP
    steps: int = STEPS

    def __call__(self, context: RankContext) -> list[float]:
        from ..runners.dry_run import join_as_by_torchrun

        device = join_as_by_torchrun(context)
        context.phase("training")
        return self.train(context, device)

    def train(self, context: RankContext, device: Any) -> list[float]:
        """Milliseconds of each measured step on `device`."""
        import time

        import torch
        import transformers

        total, marks = self.warmup + self.steps, list[float]()
        samples = [each for number in range(min(total, DIFFERENT)) for each in self._samples(number)]

        class Marks(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                marks.append(time.perf_counter())

        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=self.micro_batch,
                gradient_accumulation_steps=self.workload.global_batch // (context.world_size * self.micro_batch),
                max_steps=total + 1,
                bf16=self.precision == "bf16",
                use_cpu=device.type == "cpu",
                ddp_backend="gloo" if device.type == "cpu" else None,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            trainer = transformers.Trainer(
                model=self.workload.build_model({}), args=arguments, train_dataset=samples, callbacks=[Marks()]
            )
            if trainer.accelerator.num_processes != context.world_size:
                raise RuntimeError(f"Trainer sees {trainer.accelerator.num_processes} of {context.world_size} ranks")
            trainer.train()
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(marks)][self.warmup :]

    def _samples(self, step: int) -> list[dict[str, Any]]:
        size = self.workload.global_batch
        whole = dict(make_batch(self.workload, size, step))
        return [{name: value[at] for name, value in whole.items()} for at in range(size)]


def usual_micro_batch(workload: Workload, devices: int) -> int:
    """Samples that each rank of a Trainer takes at once: its default, or the largest smaller number that divides a rank's share
    of the global batch; 0 if the devices do not divide that."""
    share, left = divmod(workload.global_batch, devices)
    if left:
        return 0
    return max(size for size in range(1, min(TRAINER_MICRO_BATCH, share) + 1) if share % size == 0)


def measured(workload: Workload, devices: int, memory_limit_mib: float | None = None) -> tuple[float | None, str]:
    """Throughput of Trainer on `devices` devices of this machine in the unit of the workload; or None, and the reason."""
    import cloudpickle

    from ..runners.host import PLAIN_IMPORTS, HostAgent
    from ..runners.job import Job, Rendezvous

    if not isinstance(workload.model, Architecture) or workload.loss is not None:
        return None, "Trainer is the baseline of transformers' models with their own loss"
    size = usual_micro_batch(workload, devices)
    if not size:
        return None, f"Trainer on {devices} devices cannot share a global batch of {workload.global_batch}"
    device = detect()
    on_cpu = device.type == "cpu"
    program = TrainerSteps(workload=workload, micro_batch=size, precision="fp32" if on_cpu else "bf16")
    agent = HostAgent([*PLAIN_IMPORTS, *workload.imports, "accelerate", "transformers.trainer", __name__])
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = agent.run(
                Job(
                    program=cloudpickle.dumps(program),
                    ranks=devices,
                    rendezvous=Rendezvous(world_size=devices),
                    device_type=device.type,
                    threads=max(1, usable_cores() // devices) if on_cpu else None,
                    memory_limit_mib=memory_limit_mib,
                    timeout_s=TIMEOUT_S,
                    log=str(Path(folder, "log")),
                )
            )
        finally:
            agent.close()
    if outcome.status is not Status.OK:
        return None, f"Trainer on {devices} devices: {outcome.status}: {outcome.reason}"
    step_ms = max(statistics.median(rank.report) for rank in outcome.ranks)
    units = workload.global_batch * (workload.seq_len or 1)
    return units / step_ms * 1e3, ""


def predicted(request: Any) -> tuple[float | None, str]:
    """Predicted throughput of Trainer's default settings; or None, and the reason.

    Args:
        request: an estimate request with `framework="trainer"`.
    """
    default: Mapping[str, Any] = request.space.default()
    plain = {name: value for name, value in default.items() if name not in ("kernels", "fusion")}
    found = request.estimator({**plain, "fusion": False, "kernels": False})
    if not found.fits:
        return None, f"Trainer on {request.devices} devices is predicted not to fit"
    return found.throughput, ""
