"""One rank's training in one configuration: model, optimizer, mesh, passes, from its Strategy."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.device import liger_obstacle
from ..base.errors import UsageError, WorkloadError
from ..knobs.meaning import pipeline_schedule_of
from ..knobs.rules import RULES, RuleContext, refusal
from ..knobs.strategy import Strategy
from ..models.architecture import Architecture
from ..models.batches import batch_slice, each_tensor, make_batch, num_bytes, step_seed, to_device
from ..models.families import StandardSchedule, generic_schedule
from ..models.flops import flops_of
from ..models.lora import frozen_format, initialise_adapter, lora_of
from ..models.skeleton import experts_of
from ..models.spaces import runs_of
from ..models.workload import Batch, Workload
from .applying import has_replicas, share_out
from .passes import Accumulation, Pipelined, check_pipeline
from .precision import Precision, dtype_of
from .world import World

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..schedule import Schedule
    from .training_data import TrainingData


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStructure:
    """Repeated blocks, names and depth of a model as constructed."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks, in order."""
    names: Mapping[str, str]
    """Name of every parameter by each of its names: pipeline stages have tied parameters under several."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and of every persistent buffer, by that name."""
    frozen: frozenset[str]
    """Names of the parameters that are not trained."""
    depth: int
    """Number of modules that directly have a weight of at least two dimensions."""

    @staticmethod
    def of(module: "nn.Module", blocks: Sequence[str]) -> "ModelStructure":
        """Returns the structure of a model as constructed."""
        first_name: dict[Any, str] = {}
        names = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names[name] = first_name.setdefault(param, name)
        state = module.state_dict(keep_vars=True)
        shapes = {
            names.get(name, name): tuple(tensor.shape) for name, tensor in state.items() if hasattr(tensor, "shape")
        }
        deep = [
            submodule for submodule in module.modules() if any(p.dim() > 1 for p in submodule.parameters(recurse=False))
        ]
        frozen = frozenset(name for param, name in first_name.items() if not param.requires_grad)
        return ModelStructure(blocks=tuple(blocks), names=names, shapes=shapes, frozen=frozen, depth=max(1, len(deep)))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Name of every parameter, in the model's order."""
        return tuple(dict.fromkeys(self.names.values()))

    def group(self, name: str) -> int:
        """Index of a parameter's block; the number of blocks for one outside all blocks."""
        name = self.names.get(name, name)
        inside = (index for index, path in enumerate(self.blocks) if name.startswith(path + "."))
        return next(inside, len(self.blocks))


MAX_STEPS_OF_DATA = 8
"""Number of steps whose data is made in advance and then repeated."""
MAX_BYTES_OF_DATA = 64 * 1024 * 1024
"""Limit on data kept on the device; more stays in host memory and is copied for each micro-batch."""


SHORT_STEPS = (1, 2)
"""Micro-batches of two steps (`Training.short_step`) with the peak of memory: in the second, the optimizer's states and the
gradients of the first micro-batch exist while the second is computed."""


class Training:
    """A workload's model, optimizer and data on a device, in one configuration.

    Steps are numbered from 0. The samples of step s depend only on the seed and s, not on micro-batches or replicas,
    so that losses of configurations can be compared. The workload's own samples are repeated after a few steps,
    because a dry run times steps and not the data.

    Args:
        workload: the one to train.
        config: its configuration. Missing knobs have their neutral value.
        device: device of this rank.
        seed: seed of weights and data.
        rank: rank of this process among `world_size`. With more than one, `torch.distributed` must be initialised.
        world_size: number of processes, tp * sp * cp * pp * dp.
        own_data: make the workload's own data of the first few steps, which dry runs repeat; False if `passes` gets
            the data of every step.
        collective_timeout_s: timeout of collectives of its mesh, s; None leaves torch's default.
        kernels: replaces modules for the knob of that name; None for Liger-Kernel's where they run.

    Raises:
        WorkloadError: a function of the workload returns an invalid value, or the configuration does not fit it.
        ScheduleError: its schedule cannot be applied.
    """

    strategy: Strategy
    """Standard knobs of the configuration."""
    model: "nn.Module"
    """This rank's part of the model, scheduled and materialised."""
    optimizer: "torch.optim.Optimizer"
    first_numbers: Mapping[tuple[int, str], Any]
    """Numbers of its groups before any step, as `group_numbers` returns them."""
    world: World
    """Position of this rank."""
    precision: Precision
    outline: ModelStructure
    """The model before its schedule rewrote it."""
    compiled: bool
    """True if its schedule uses torch.compile."""
    micro_batch: int
    """Samples of one forward pass of one replica."""
    grad_accum: int
    """Micro-batches of one optimizer step."""
    samples_per_step: int
    """Samples of one optimizer step over all ranks."""
    tokens_per_step: int | None
    """Tokens of one optimizer step over all ranks; None if samples have no tokens."""

    def __init__(
        self,
        workload: Workload,
        config: Mapping[str, Any],
        device: "torch.device",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        own_data: bool = True,
        collective_timeout_s: float | None = None,
        kernels: "Callable[[Schedule], object] | None" = None,
    ) -> None:
        import torch

        self.workload = workload
        self.config = config
        self.device = torch.device(device)
        self._seed = seed
        if (lora := lora_of(workload)) is not None and lora.quantize:
            raise WorkloadError(
                f"lora quantize={lora.quantize} is estimated, but not trained here: `redline estimate` predicts it, and "
                "LLaMA-Factory, Axolotl and LitGPT train it; without quantize the frozen weights have 16 bits"
            )
        self.strategy = checked_strategy(workload, config, world_size)
        self.world = World.of(config, rank, world_size)
        self.micro_batch, self.grad_accum = self.strategy.micro_batch, self.strategy.grad_accum
        self.samples_per_step = self.micro_batch * self.grad_accum * self.strategy.dp
        self.tokens_per_step = workload.seq_len * self.samples_per_step if workload.seq_len else None
        self.precision = Precision(self.strategy.precision, self.device, world_size)
        self._mesh = self.world.mesh(self.device, collective_timeout_s)
        self._kernels = kernels
        self.model, self.optimizer = self._build()
        self.first_numbers = group_numbers(self.optimizer)  # before steps, to see later which of them steps change
        self.model.train()
        self._resident = False
        self.data = self._make_data() if own_data else []
        """This replica's own data: micro-batches of each step, which are repeated."""
        self._step = 0
        self.reseed(0)

    def step(self) -> "torch.Tensor":
        """Runs one optimizer step over the global batch.

        Returns:
            Its mean loss over the global batch, the same on all ranks, float32, a scalar on the device. Reading it
                waits for the device.
        """
        total = self.passes()
        self.update()
        return total

    def update(self, adjust: Callable[[], None] = lambda: None) -> None:
        """Runs the optimizer's part of a step; the gradients are gone after it.

        Args:
            adjust: called before with the unscaled gradients in place; may change them.
        """
        self.precision.unscale(self.optimizer)  # before clipping, which needs the true norm
        adjust()
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def short_step(self, micro_batches: int) -> "torch.Tensor":
        """As `step`, of the first micro-batches unless a pipeline orders them; from two on its memory is that of a step."""
        if self.world.pp > 1:
            return self.step()
        total = self.passes([to_device(batch, self.device) for batch in self.data[0][:micro_batches]])
        self.update()
        return total

    def passes(
        self,
        batches: list[Batch] | None = None,
        watch: Callable[[Any], None] | None = None,
        factors: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Runs the forward and backward passes of a step, without the optimizer's part: gradients stay in place. If
        gradients are switched off (`torch.no_grad`), only the forward passes run.

        Args:
            batches: this replica's micro-batches, on the device; None for those of the next step.
            watch: called with the model's output for each of them; in a pipeline, on the last stage.
            factors: factor of the loss of each micro-batch, shape [grad_accum], on the device; None for 1.

        Returns:
            As `step`.
        """
        on_device = True
        if batches is None:
            assert self.data, "a training without its own data needs the data of every step"
            on_device = self._resident
            batches = self.data[self._step % len(self.data)]
            self._step += 1
        with self.precision.products():
            total = self._passes(batches, None if on_device else self.device, watch, factors)
        return self.over_replicas(total) / self.world.replicas

    def over_replicas(self, value: "torch.Tensor") -> "torch.Tensor":
        """Sums a value over replicas, in place; all ranks call it."""
        if self._mesh is not None and self.world.replicas > 1:
            import torch.distributed as dist

            dist.all_reduce(value, group=self._mesh.get_group("dp"))
        return value

    def share(self, samples: Callable[[int, int], Batch], start: int) -> Batch:
        """Returns this replica's samples of a step.

        Args:
            samples: `samples(start, count)` returns the samples at `count` positions from `start` on.
            start: position of the step's first sample.
        """
        count = self.micro_batch * self.grad_accum
        return samples(start + self.world.dp_rank * count, count)

    def pinned_share(self, samples: Callable[[int, int], Batch], start: int) -> Batch:
        """As `share`; for a GPU in pinned memory, from which copies are asynchronous."""
        share = self.share(samples, start)
        return each_tensor(share, lambda tensor: tensor.pin_memory()) if self.device.type == "cuda" else share

    def fetch(self, reader: Executor, samples: "TrainingData", start: int) -> Future[Batch]:
        """Reads `pinned_share` in a thread, or at once if these samples are only made in the main thread."""
        if not samples.in_main_thread:
            return reader.submit(self.pinned_share, samples, start)
        done: Future[Batch] = Future()
        done.set_result(self.pinned_share(samples, start))
        return done

    def micro_batches(self, share: Batch) -> list[Batch]:
        """Cuts a replica's samples for `passes`: into micro-batches; for a pipeline, into one batch."""
        if self.world.pp > 1:
            return [share]
        return [
            batch_slice(share, number * self.micro_batch, (number + 1) * self.micro_batch)
            for number in range(self.grad_accum)
        ]

    def flops_per_step(self) -> float | None:
        """Model FLOPs of one optimizer step over all ranks, without recomputation; None if the model cannot be traced
        (`flops_of(workload).reason` has the reason).
        """
        per_sample = flops_of(self.workload).per_sample
        return None if per_sample is None else per_sample * self.samples_per_step

    def reseed(self, step: int) -> None:
        """Seeds dropout by the seed, the step and this rank's position. Replicas and stages differ; ranks that share
        a layer draw the same numbers except where its schedule forks their streams.
        """
        import torch

        place = self.world.replica * self.world.pp + self.world.pp_rank
        torch.manual_seed((self.seed_of(place) * 1_000_003 + step) % 2**63 if step else self.seed_of(place))

    def seed_of(self, number: int) -> int:
        """Seed of a step's data, by the step's number."""
        return step_seed(self._seed, number)

    def _make_model(self) -> "nn.Module":
        """Returns the model on the meta device if it is an architecture whose rules initialise all of it there; otherwise the
        module that the workload's function makes on the CPU.
        """
        import torch

        from ..schedule.materialise import uninitialised

        # The CPU's random numbers are the same for all devices and all configurations.
        cpu = torch.device("cpu")
        if isinstance(self.workload.model, Architecture):
            with seeded(self._seed, cpu), torch.device("meta"):
                module = self.workload.build_model(self.config)
            if uninitialised(module, initialise_adapter) is None:
                return module
        with seeded(self._seed, cpu), cpu:
            return self.workload.build_model(self.config)

    def _build(self) -> tuple["nn.Module", "torch.optim.Optimizer"]:
        import torch

        from ..schedule import build, create_schedule
        from ..schedule.liger import replace_modules
        from ..schedule.primitives.formats import store_frozen

        module = self._make_model()
        sch = create_schedule(module, self._mesh)
        schedule = self.workload.schedule or generic_schedule
        standard = schedule if isinstance(schedule, StandardSchedule) else generic_schedule
        self.outline = ModelStructure.of(module, [block.path for block in standard.blocks(sch)])
        if schedule is standard and self.strategy.kernels and (self._kernels or not liger_obstacle(self.device.type)):
            (self._kernels or replace_modules)(sch)  # before it is cut
        schedule(sch, self.config)
        # After the schedule: sharding over replicas sees the parameters that tensor parallelism has left on this rank.
        self._distribute(sch)
        self.compiled = any(step.primitive in ("compile", "fuse") for step in sch.tree.steps)
        if self.precision.pure and not any(s.primitive == "cast" and not s.path for s in sch.tree.steps):
            sch.cast(torch.bfloat16)
        if frozen := frozen_format(self.workload, self.strategy.precision):
            store_frozen(sch, dtype_of(frozen))
        if not any(step.primitive == "float8" for step in sch.tree.steps):
            self.precision.convert([sch[path] for path in self.outline.blocks])
        fused = self.strategy.fused_optimizer is not False
        loss, self._passes = self._passes_of(module)
        return build(
            sch,
            optimizer=lambda params: self.workload.make_optimizer(params, fused=fused),
            loss=loss,
            device=self.device,
            seed=self._seed,
            init=initialise_adapter,
        )

    def _passes_of(self, module: "nn.Module") -> "tuple[Callable[..., torch.Tensor] | None, Accumulation | Pipelined]":
        """Returns the loss for building a pipeline, if the workload has its own, and the passes of a step."""
        if self.world.pp > 1:
            passes = Pipelined(self.workload, module, self.precision)
            return passes.loss if self.workload.loss is not None else None, passes
        return None, Accumulation(self.workload, module, self.precision, self.strategy.hsdp)

    def _distribute(self, sch: "Schedule") -> None:
        """Adds the common part of every model's schedule: replicas, the pipeline's order, offloading.

        A user's schedule may have done any of it.
        """
        done = {step.primitive for step in sch.tree.steps if not step.path}
        if self.world.pp > 1:
            check_pipeline(self.workload, len(sch.tree.cuts), self.world.pp)
            if "pipeline" not in done:
                # The standard split of the batch: its micro-batches are the pipeline's.
                held = (len(sch.tree.cuts) + 1) // self.world.pp
                kind = pipeline_schedule_of({**self.config, "virtual_stages": held}, self.grad_accum)
                sch.pipeline(kind, self.grad_accum)
        whole_experts = self.strategy.etp == 1
        if (self.strategy.ep > 1 or whole_experts) and "shard_experts" not in done:
            sch.shard_experts(self.strategy.ep, whole=whole_experts)
        if self.strategy.capacity_factor and "limit_experts" not in done:
            sch.limit_experts(self.strategy.capacity_factor)
        if self.strategy.offload == "optimizer" and "offload" not in done:
            sch.offload("optimizer")
        if has_replicas(sch) and "shard_data" not in done:
            share_out(sch, self.strategy, self.outline.blocks)

    def _make_data(self) -> list[list[Batch]]:
        """This replica's micro-batches of each step of the cycle; for a pipeline, one batch per step."""
        steps: list[Batch] = []
        held = 0
        while len(steps) < MAX_STEPS_OF_DATA:
            share = self._share_of(len(steps))
            held += num_bytes(share)
            steps.append(share)
            if held + num_bytes(share) > MAX_BYTES_OF_DATA:
                break
        self._resident = held <= MAX_BYTES_OF_DATA
        if self._resident:
            steps = [to_device(batch, self.device) for batch in steps]
        elif self.device.type == "cuda":
            steps = [each_tensor(batch, lambda tensor: tensor.pin_memory()) for batch in steps]
        return [self.micro_batches(batch) for batch in steps]

    def _share_of(self, step: int) -> Batch:
        """This replica's samples of a step, on the CPU."""
        # Made for all replicas and then cut, so that samples do not depend on the number of replicas.
        global_batch = make_batch(self.workload, self.samples_per_step, self.seed_of(step))
        share = self.share(lambda start, count: batch_slice(global_batch, start, start + count), 0)
        return each_tensor(share, lambda tensor: tensor.clone()) if self.world.dp > 1 else share


def checked_strategy(workload: Workload, config: Mapping[str, Any], ranks: int = 1) -> Strategy:
    """Returns the strategy of a configuration of a workload on `ranks` ranks.

    The samples of a step are the workload's global batch, unless both `micro_batch` and `grad_accum` are knobs.

    Raises:
        WorkloadError: a knob has an invalid value, or the configuration breaks one of `redline.knobs.rules.RULES`.
    """
    try:
        strategy = Strategy.of(config, devices=ranks, global_batch=workload.global_batch)
    except UsageError as error:
        raise WorkloadError(str(error)) from None
    by_layer = strategy.strategy is not None or strategy.stage_blocks is not None
    runs = runs_of(workload)._asdict() if by_layer else {}
    context = RuleContext(
        devices=ranks,
        seq_len=workload.seq_len,
        tokens=workload.seq_len is not None,
        own_loss=workload.loss is not None,
        no_stage_blocks=getattr(workload.schedule, "no_stage_blocks", ""),
        experts=experts_of(workload) if strategy.needs_experts else None,
        **runs,
    )
    own_schedule = workload.schedule is not None and not isinstance(workload.schedule, StandardSchedule)
    if own_schedule and by_layer:
        knob = "stage_blocks" if strategy.strategy is None else "strategy"
        raise WorkloadError(f"{knob}: the workload has a schedule of its own, which does not follow it")
    if reason := refusal(strategy, context, [rule for rule in RULES if not (rule.of_stages and own_schedule)]):
        raise WorkloadError(reason)
    return strategy


@contextmanager
def streams_kept(device: "torch.device") -> Iterator[None]:
    """Restores the global generators of PyTorch, NumPy and Python at the end."""
    import numpy
    import torch

    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


@contextmanager
def undone(training: Training) -> Iterator[None]:
    """Restores at the end all that passes change apart from gradients: random streams, and the model's buffers, such as
    running means of norms.
    """
    import torch

    buffers = [(buffer, buffer.detach().clone()) for buffer in training.model.buffers()]
    try:
        with streams_kept(training.device):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def seeded(seed: int, device: "torch.device") -> Iterator[None]:
    """Seeds these generators within the context."""
    import numpy
    import torch

    with streams_kept(device):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        yield


NUMBERS = (int, float, bool)
"""Kinds of numbers that optimizers keep."""


def group_numbers(optimizer: "torch.optim.Optimizer") -> dict[tuple[int, str], Any]:
    """Returns the numbers in an optimizer's groups, by group and key, without the learning rates."""
    return {
        (number, key): value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "lr" and type(value) in NUMBERS
    }
