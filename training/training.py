"""One rank's training in one configuration: model, optimizer, mesh, passes, from its Strategy."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.device import liger_obstacle
from ..base.errors import ScheduleError, UsageError, WorkloadError
from ..knobs.meaning import pipeline_schedule_of
from ..knobs.rules import RULES, RuleContext, refusal
from ..knobs.strategy import Strategy
from ..models.batches import batch_slice, each_tensor, make_batch, num_bytes, to_device
from ..models.families import StandardSchedule, generic_schedule, indices_of
from ..models.flops import flops_of
from ..models.skeleton import experts_of
from ..models.workload import Batch, Workload
from .applying import share_out
from .passes import Accumulation, Pipelined, check_pipeline
from .precision import Precision
from .seeds import step_seed
from .world import World

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStructure:
    """The repeated blocks, names and depth of a model as its constructor made it."""

    blocks: tuple[str, ...]
    """Paths of the repeated blocks, in order."""
    names: Mapping[str, str]
    """The name of every parameter by each of its names: pipeline stages hold tied ones under several."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every parameter and of every buffer that belongs to its state, by that name."""
    frozen: frozenset[str]
    """Names of the parameters that are not trained."""
    depth: int
    """Modules that hold a weight of at least two dimensions themselves."""

    @staticmethod
    def of(module: "nn.Module", blocks: Sequence[str]) -> "ModelStructure":
        """The outline of a model as its constructor made it."""
        first: dict[Any, str] = {}
        names = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names[name] = first.setdefault(param, name)
        state = module.state_dict(keep_vars=True)
        shapes = {names.get(name, name): tuple(each.shape) for name, each in state.items() if hasattr(each, "shape")}
        deep = [each for each in module.modules() if any(p.dim() > 1 for p in each.parameters(recurse=False))]
        frozen = frozenset(name for param, name in first.items() if not param.requires_grad)
        return ModelStructure(blocks=tuple(blocks), names=names, shapes=shapes, frozen=frozen, depth=max(1, len(deep)))

    def group(self, name: str) -> int:
        """The number of the block that a parameter lies in; as many as there are blocks for one in none."""
        name = self.names.get(name, name)
        inside = (at for at, path in enumerate(self.blocks) if name.startswith(path + "."))
        return next(inside, len(self.blocks))


MAX_STEPS_OF_DATA = 8
"""Steps whose data is made ahead of time and then repeated."""
MAX_BYTES_OF_DATA = 64 * 1024 * 1024
"""Data kept on the device; more than this stays in host memory and is copied for each micro-batch."""


class Training:
    """A workload's model, optimizer and data on a device, in one configuration.

    Steps are numbered from 0; the samples of step s depend on the seed and s alone, not on how they are cut
    into micro-batches or shared among ranks, so that losses of configurations can be compared. Those that the
    workload itself makes are repeated after a few steps: a dry run times steps and not its data.

    Args:
        workload: what is trained.
        config: its configuration. Knobs that it does not hold have their neutral value.
        device: where.
        seed: of weights and data.
        rank: this process among `world_size`. With more than one, `torch.distributed` must be initialised.
        world_size: processes, tp * sp * cp * pp * dp of them.
        own_data: make the workload's own data of the first few steps, which dry runs repeat; False where `passes` is given
            that of every step.
        collective_timeout_s: how long a rank may wait for others in a collective of its mesh, s; None leaves
            torch's default.

    Raises:
        WorkloadError: the workload does not return what it must, or the configuration does not fit it.
        ScheduleError: its schedule cannot be applied.
    """

    strategy: Strategy
    """The standard knobs of the configuration."""
    model: "nn.Module"
    """The module, scheduled and materialised: this rank's part of it."""
    optimizer: "torch.optim.Optimizer"
    """The optimizer."""
    world: World
    """What this rank is."""
    precision: Precision
    """The number formats."""
    outline: ModelStructure
    """The model before its schedule rewrote it."""
    compiled: bool
    """Whether torch.compile is part of its schedule."""
    micro_batch: int
    """Samples of one forward pass of one replica."""
    grad_accum: int
    """Micro-batches of one optimizer step."""
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
        own_data: bool = True,
        collective_timeout_s: float | None = None,
    ) -> None:
        import torch

        self.workload = workload
        self.config = config
        self.device = torch.device(device)
        self._seed = seed
        self.strategy = checked_strategy(workload, config, world_size)
        self.world = World.of(config, rank, world_size)
        self.micro_batch, self.grad_accum = self.strategy.micro_batch, self.strategy.grad_accum
        self.samples_per_step = self.micro_batch * self.grad_accum * self.strategy.dp
        self.tokens_per_step = workload.seq_len * self.samples_per_step if workload.seq_len else None
        self.precision = Precision(self.strategy.precision, self.device, world_size)
        self._mesh = self.world.mesh(self.device, collective_timeout_s)
        self.model, self.optimizer = self._build()
        self.model.train()
        self._resident = False
        self._data = self._make_data() if own_data else []
        self._step = 0
        self.reseed(0)

    def step(self) -> "torch.Tensor":
        """Runs one optimizer step over the global batch.

        Returns:
            Its mean loss over the global batch, the same on all ranks, float32, a scalar on the device. Reading
            it waits for the device.
        """
        total = self.passes()
        self.update()
        return total

    def update(self, adjust: Callable[[], None] = lambda: None) -> None:
        """The optimizer's part of a step; the gradients are gone after it.

        Args:
            adjust: called before, with the gradients as they are of the loss; may change them.
        """
        self.precision.unscale(self.optimizer)
        adjust()
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def short_step(self, micro_batches: int) -> "torch.Tensor":
        """As `step`, of the first so many micro-batches unless a pipeline orders them; from two on its memory is that of a step."""
        if self.world.pp > 1:
            return self.step()
        total = self.passes([to_device(each, self.device) for each in self._data[0][:micro_batches]])
        self.update()
        return total

    def passes(
        self,
        batches: list[Batch] | None = None,
        watch: Callable[[Any], None] | None = None,
        factors: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """The forward and backward passes of a step, without the optimizer's part: gradients stay in place. Where
        gradients are switched off (`torch.no_grad`), the forward passes alone.

        Args:
            batches: this replica's micro-batches, on the device; None for those of the next step.
            watch: called with what the model returned for each of them; in a pipeline, on the last stage.
            factors: what the loss of each micro-batch is multiplied by, of shape [grad_accum], on the device; None for 1.

        Returns:
            As `step`.
        """
        on_device = True
        if batches is None:
            assert self._data, "a training without data of its own is given that of every step"
            on_device = self._resident
            batches = self._data[self._step % len(self._data)]
            self._step += 1
        with self.precision.products():
            total = self._passes(batches, None if on_device else self.device, watch, factors)
        return self.over_replicas(total) / self.world.replicas

    def over_replicas(self, value: "torch.Tensor") -> "torch.Tensor":
        """The sum of what each replica has, in place; all ranks call it."""
        if self._mesh is not None and self.world.replicas > 1:
            import torch.distributed as dist

            dist.all_reduce(value, group=self._mesh.get_group("dp"))
        return value

    def share(self, samples: Callable[[int, int], Batch], first: int) -> Batch:
        """This replica's samples of a step.

        Args:
            samples: `samples(start, count)` are those at `count` positions from `start` on.
            first: where those of the step begin.
        """
        mine = self.micro_batch * self.grad_accum
        return samples(first + self.world.dp_rank * mine, mine)

    def micro_batches(self, share: Batch) -> list[Batch]:
        """A replica's samples as `passes` takes them: micro-batch by micro-batch; for a pipeline, as one batch."""
        if self.world.pp > 1:
            return [share]
        return [
            batch_slice(share, number * self.micro_batch, (number + 1) * self.micro_batch)
            for number in range(self.grad_accum)
        ]

    def flops_per_step(self) -> float | None:
        """Model FLOPs of one optimizer step over all ranks, recomputation not included; None where the model
        cannot be traced (`flops_of(workload).reason` says why)."""
        per_sample = flops_of(self.workload).per_sample
        return None if per_sample is None else per_sample * self.samples_per_step

    def reseed(self, step: int) -> None:
        """Has dropout follow from the seed, the step and this rank's place. Replicas and stages differ; the ranks that share
        a layer draw alike except where its schedule forks their streams."""
        import torch

        place = self.world.replica * self.world.pp + self.world.pp_rank
        torch.manual_seed((self.seed_of(place) * 1_000_003 + step) % 2**63 if step else self.seed_of(place))

    def seed_of(self, number: int) -> int:
        """The seed of a step's data, by its number."""
        return step_seed(self._seed, number)

    def _build(self) -> tuple["nn.Module", "torch.optim.Optimizer"]:
        from ..schedule import deferred

        try:
            with seeded(self._seed, self.device):
                return self._build_within(deferred(self.device))
        except ScheduleError:
            # Not every model can be made without its weights: its constructor may look at values. Such a model is
            # made in place; what is really wrong shows again.
            pass
        with seeded(self._seed, self.device):
            return self._build_within(self.device)

    def _build_within(self, making: AbstractContextManager[Any]) -> tuple["nn.Module", "torch.optim.Optimizer"]:
        """Builds a model whose constructor runs in the context `making`."""
        import torch

        from ..schedule import build, create_schedule
        from ..schedule.deferred import stray
        from ..schedule.liger import replace_modules

        with making:
            module = self.workload.build_model(self.config)
        if left := stray(module):
            raise ScheduleError(f"{left} is a tensor on the meta device that is no parameter and no buffer")
        sch = create_schedule(module, self._mesh)
        schedule = self.workload.schedule or generic_schedule
        standard = schedule if isinstance(schedule, StandardSchedule) else generic_schedule
        self.outline = ModelStructure.of(module, [each.path for each in standard.blocks(sch)])
        if schedule is standard and self.strategy.kernels and not liger_obstacle(self.device.type):
            replace_modules(sch)  # before it is cut
        schedule(sch, self.config)
        self._distribute(sch)
        self.compiled = any(step.primitive in ("compile", "fuse") for step in sch.tree.steps)
        if self.precision.pure and not any(s.primitive == "cast" and not s.path for s in sch.tree.steps):
            sch.cast(torch.bfloat16)
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
        )

    def _passes_of(self, module: "nn.Module") -> "tuple[Callable[..., torch.Tensor] | None, Accumulation | Pipelined]":
        """The loss that a pipeline is built with, where the workload has one of its own; and how steps are made."""
        if self.world.pp > 1:
            passes = Pipelined(self.workload, module, self.precision)
            return passes.loss if self.workload.loss is not None else None, passes
        return None, Accumulation(self.workload, module, self.precision, self.strategy.exchange)

    def _distribute(self, sch: "Schedule") -> None:
        """What every model's schedule needs besides its own: replicas, the pipeline's order, offloading.

        A schedule of somebody's own may have done any of it.
        """
        done = {step.primitive for step in sch.tree.steps if not step.path}
        if self.world.pp > 1:
            check_pipeline(self.workload, len(sch.tree.cuts), self.world.pp)
            if "pipeline" not in done:
                # The standard way of splitting the batch: its micro-batches are the pipeline's.
                held = (len(sch.tree.cuts) + 1) // self.world.pp
                kind = pipeline_schedule_of({**self.config, "virtual_stages": held}, self.grad_accum)
                sch.pipeline(kind, self.grad_accum)
        if self.strategy.ep > 1 and "shard_experts" not in done:
            sch.shard_experts(self.strategy.ep)
        if self.strategy.offload == "optimizer" and "offload" not in done:
            sch.offload("optimizer")
        if self.world.replicas > 1 and "shard_data" not in done:
            share_out(sch, self.strategy, self._gathered())

    def _gathered(self) -> list[str]:
        """Paths of the blocks that `gathered_blocks` names."""
        blocks = self.outline.blocks
        named = indices_of(self.strategy.gathered_blocks or "none", len(blocks))
        return [blocks[index] for index in named]

    def _make_data(self) -> list[list[Batch]]:
        """For each step of the cycle this replica's micro-batches; for a pipeline, these as one batch."""
        steps: list[Batch] = []
        held = 0
        while len(steps) < MAX_STEPS_OF_DATA:
            mine = self._share_of(len(steps))
            held += num_bytes(mine)
            steps.append(mine)
            if held + num_bytes(mine) > MAX_BYTES_OF_DATA:
                break
        self._resident = held <= MAX_BYTES_OF_DATA
        if self._resident:
            steps = [to_device(each, self.device) for each in steps]
        elif self.device.type == "cuda":
            steps = [each_tensor(each, lambda tensor: tensor.pin_memory()) for each in steps]
        return [self.micro_batches(each) for each in steps]

    def _share_of(self, step: int) -> Batch:
        """This replica's samples of a step, on the CPU."""
        share, replica = self.micro_batch * self.grad_accum, self.world.dp_rank
        # Made for all replicas and then cut, so that the samples do not depend on their number.
        whole = make_batch(self.workload, self.samples_per_step, self.seed_of(step))
        mine = batch_slice(whole, replica * share, (replica + 1) * share)
        return each_tensor(mine, lambda tensor: tensor.clone()) if self.world.dp > 1 else mine


def checked_strategy(workload: Workload, config: Mapping[str, Any], ranks: int = 1) -> Strategy:
    """The strategy of a configuration of a workload on so many ranks.

    The samples of a step are the workload's global batch, unless both `micro_batch` and `grad_accum` are knobs.

    Raises:
        WorkloadError: a knob has a value that it cannot have, or the configuration breaks one of
            `redline.knobs.rules.RULES`.
    """
    try:
        strategy = Strategy.of(config, devices=ranks, global_batch=workload.global_batch)
    except UsageError as error:
        raise WorkloadError(str(error)) from None
    context = RuleContext(
        devices=ranks,
        seq_len=workload.seq_len,
        tokens=workload.seq_len is not None,
        own_loss=workload.loss is not None,
        experts=experts_of(workload) if strategy.ep > 1 else None,
    )
    own_schedule = workload.schedule is not None and not isinstance(workload.schedule, StandardSchedule)
    if why := refusal(strategy, context, [rule for rule in RULES if not (rule.of_stages and own_schedule)]):
        raise WorkloadError(why)
    return strategy


@contextmanager
def streams_kept(device: "torch.device") -> Iterator[None]:
    """PyTorch's, NumPy's and Python's global generators are as they were at the end."""
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
def seeded(seed: int, device: "torch.device") -> Iterator[None]:
    """Within it these generators are seeded."""
    import numpy
    import torch

    with streams_kept(device):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        yield
