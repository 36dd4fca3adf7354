"""Training a workload in one configuration: builds everything, then runs optimizer steps."""

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError, WorkloadError
from .batches import Batch, Step, each_tensor, make_batch, num_bytes, part, to_device
from .families import StandardSchedule, generic_schedule
from .workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_STEPS_OF_DATA = 8
"""Steps whose data is made ahead of time and then repeated."""
MAX_BYTES_OF_DATA = 64 * 1024 * 1024
"""Data kept on the device; more than this stays in host memory and is copied for each micro-batch."""
_NOT_YET = {"tp": 1, "pp": 1, "zero": 0, "sequence_parallel": False, "kernels": False, "offload": "none"}
"""Standard knobs that nothing follows yet, with the value at which they do nothing."""


class Training:
    """A workload's model, optimizer and data on a device, in one configuration.

    Steps are numbered from 0; the samples of step s depend on the seed and s alone, not on how they are cut
    into micro-batches or shared among ranks, so that losses of configurations can be compared.

    Args:
        workload: what is trained.
        config: its configuration. Knobs that it does not hold have their neutral value.
        device: where.
        seed: of weights and data.
        rank: this process among `world_size`, which hold a replica each. With more than one,
            `torch.distributed` must be initialised.
        world_size: processes.

    Raises:
        WorkloadError: the workload does not return what it must, or the configuration does not fit it.
        ScheduleError: its schedule cannot be applied.
    """

    model: "nn.Module"
    """The module, scheduled and materialised."""
    optimizer: "torch.optim.Optimizer"
    """The optimizer."""
    samples_per_step: int
    """Samples of one optimizer step over all ranks."""
    tokens_per_step: int | None
    """Tokens of one optimizer step over all ranks; None where samples are not made of tokens."""

    def __init__(
        self,
        workload: Workload,
        config: Mapping[str, Any],
        device: "torch.device",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        import torch

        self.workload = workload
        self.config = config
        self.device = torch.device(device)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._sizes()
        self._precision = _Precision(str(config.get("precision", "fp32")), self.device)
        self.model, self.optimizer = self._build()
        self.model.train()
        self._wrapped = self._replicate()
        self._loss_of = Step(workload, self.model, self._wrapped)
        self._data = self._make_data()
        self._step = 0
        # Dropout follows from the seed, and differs between replicas.
        torch.manual_seed(self._seed_of(rank))

    def step(self) -> "torch.Tensor":
        """Runs one optimizer step over the global batch.

        Returns:
            Its mean loss over all ranks, float32, a scalar on the device. Reading it waits for the device.
        """
        import torch

        batches = self._data[self._step % len(self._data)]
        self._step += 1
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            if not self._resident:
                batch = to_device(batch, self.device)
            with self._synchronised(number == len(batches) - 1):
                with self._precision.autocast():
                    loss = self._loss_of(batch)
                self._precision.scale(loss / len(batches)).backward()
            total += loss.detach().float()
        self._precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        total /= len(batches)
        if self._world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(total)
            total /= self._world_size
        return total

    def flops_per_step(self) -> float | None:
        """Model FLOPs of one optimizer step over all ranks, recomputation not included; None where the model
        cannot be traced (`workload.flops.reason` says why)."""
        per_sample = self.workload.flops.per_sample
        return None if per_sample is None else per_sample * self.samples_per_step

    def _seed_of(self, number: int) -> int:
        # NumPy's older generators take 32 bits.
        return (self._seed * 1_000_003 + number) % 2**31

    def _sizes(self) -> None:
        config, workload = self.config, self.workload
        followed = self.workload.schedule is not None and not isinstance(
            self.workload.schedule, StandardSchedule
        )
        for name, neutral in _NOT_YET.items():
            # A schedule of somebody's own may follow any knob but those that need a mesh.
            if config.get(name, neutral) != neutral and (name in ("tp", "pp") or not followed):
                raise WorkloadError(
                    f"knob '{name}' must be {neutral!r}: nothing follows {config[name]!r} yet"
                )
        ranks = self._world_size
        if config.get("dp", ranks) != ranks:
            raise WorkloadError(f"dp must be the number of ranks, {ranks}, but is {config['dp']}")
        share, rest = divmod(workload.global_batch, ranks)
        if rest:
            raise WorkloadError(
                f"the global batch must be a multiple of the ranks, {ranks}, but is {workload.global_batch}"
            )
        self._micro = int(config.get("micro_batch", share // int(config.get("grad_accum", 1))))
        self._accumulate = int(config.get("grad_accum", share // max(self._micro, 1)))
        if self._micro < 1 or self._accumulate < 1:
            raise WorkloadError(
                f"micro_batch and grad_accum must be at least 1, but are {self._micro} and "
                f"{self._accumulate} with {share} samples a rank"
            )
        if "grad_accum" not in config and self._micro * self._accumulate != share:
            raise WorkloadError(f"micro_batch must divide a rank's samples, {share}, but is {self._micro}")
        self.samples_per_step = self._micro * self._accumulate * ranks
        self.tokens_per_step = workload.seq_len * self.samples_per_step if workload.seq_len else None

    def _build(self) -> tuple["nn.Module", "torch.optim.Optimizer"]:
        import torch

        meta = torch.device("meta")
        try:
            return self._build_on(meta)
        except (ScheduleError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _of_meta(error):
                raise
            # Not every model can be made without its weights: its constructor may look at values, or be the
            # only place where they are set. Such a model is made in place; what is really wrong shows again.
        torch.manual_seed(self._seed)
        return self._build_on(self.device)

    def _build_on(self, where: "torch.device") -> tuple["nn.Module", "torch.optim.Optimizer"]:
        import torch

        from ..schedule import build, create_schedule

        with where:
            module = self.workload.build_model(self.config)
        stray = _stray_meta_tensor(module)
        if stray:
            raise ScheduleError(f"{stray} is a tensor on the meta device that is no parameter and no buffer")
        sch = create_schedule(module)
        (self.workload.schedule or generic_schedule)(sch, self.config)
        if self._precision.pure and not any(s.primitive == "cast" and not s.path for s in sch.tree.steps):
            sch.cast(torch.bfloat16)
        fused = bool(self.config.get("fused_optimizer", True))
        return build(
            sch,
            optimizer=lambda params: self.workload.make_optimizer(params, fused=fused),
            device=self.device,
            seed=self._seed,
        )

    def _replicate(self) -> "nn.Module":
        if self._world_size == 1:
            return self.model
        from torch.nn.parallel import DistributedDataParallel

        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(self.model, device_ids=devices)

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are averaged over the replicas with the last micro-batch only."""
        if self._world_size == 1 or last:
            return contextlib.nullcontext()
        return self._wrapped.no_sync()

    def _make_data(self) -> list[list[Batch]]:
        """For each step of the cycle this rank's micro-batches."""
        steps: list[Batch] = []
        held = 0
        share = self._micro * self._accumulate
        while len(steps) < MAX_STEPS_OF_DATA:
            # Made for all ranks and then cut, so that the samples do not depend on the number of ranks.
            whole = make_batch(self.workload, self.samples_per_step, self._seed_of(len(steps)))
            mine = part(whole, self._rank * share, (self._rank + 1) * share)
            if self._world_size > 1:
                mine = each_tensor(mine, lambda tensor: tensor.clone())
            held += num_bytes(whole)
            steps.append(mine)
            if held + num_bytes(whole) > MAX_BYTES_OF_DATA:
                break
        self._resident = held <= MAX_BYTES_OF_DATA
        if self._resident:
            steps = [to_device(each, self.device) for each in steps]
        elif self.device.type == "cuda":
            steps = [each_tensor(each, lambda tensor: tensor.pin_memory()) for each in steps]
        return [
            [
                part(each, number * self._micro, (number + 1) * self._micro)
                for number in range(self._accumulate)
            ]
            for each in steps
        ]


class _Precision:
    """The knob `precision`: autocast and gradient scaling."""

    def __init__(self, name: str, device: "torch.device") -> None:
        import torch

        known = {"fp32": None, "bf16": torch.bfloat16, "bf16_pure": None}
        if device.type == "cuda":
            known["fp16"] = torch.float16
        if name not in known:
            from ..errors import unknown

            raise WorkloadError(f"{unknown('precision', name, known)} These work on {device.type}.")
        self.pure = name == "bf16_pure"
        self._device = device
        self._dtype = known[name]
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        import torch

        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def scale(self, loss: "torch.Tensor") -> "torch.Tensor":
        return self._scaler.scale(loss) if self._scaler is not None else loss

    def step(self, optimizer: "torch.optim.Optimizer") -> None:
        if self._scaler is None:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        self._scaler.update()


def _stray_meta_tensor(module: "nn.Module") -> str:
    """The path of a meta tensor that `build` could not replace, as it is a plain attribute; or nothing."""
    import torch

    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                return f"{path}.{name}" if path else name
    return ""


def _of_meta(error: RuntimeError) -> bool:
    """Whether a value of a tensor on the meta device was asked for."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()
