"""The probe of a candidate: passes one fixed batch through the built model for its loss, logits and gradients; and the
first optimizer step, which must move all trained parameters.

Notation:

 symbol | meaning |
---|---|
 P | samples of the probe, the same in every configuration |
 k | samples of this replica, P / dp of them, the same on all its ranks |
 T, V | positions of a sample and logits of a position |
 R | random projections |

Each replica first trains on its k samples as in a step. If that drew random numbers (dropout), the pass is repeated
without randomness, and only the change of the logits by the first pass is kept. Each rank reports its part; sums over
ranks are made when all parts have arrived (`runners.numerics_check.together`). There are few samples, so that a probe
is cheap, and they run in smaller micro-batches than training's. The first step covers the full size (`first_step`).

Parameters that are initialized to all zeros or all ones are perturbed for the probe: while a bias is zero it could be
added twice, and while the outer half of an adapter is zero the inner one could be left out, without an effect on the
results.
"""

import contextlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..models.batches import batch_slice, each_tensor, make_batch, to_device
from ..models.workload import Batch
from ..results.probe import Computed, Probe
from .gradients import computed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .training import Training


PERTURBATION = 2.0**-5
"""Size of the perturbation: representable in every format, around 0 and around 1."""


@contextlib.contextmanager
def perturbed(training: "Training") -> Iterator[None]:
    """Sets such parameters to a pattern around their value, the same in every configuration; all ranks enter."""
    import torch

    from ..schedule.parallel.sharding import local, owner, region_of

    names = training.outline.names
    held = [(names[name], name, param) for name, param in training.model.named_parameters() if name in names]
    changed = []
    with torch.no_grad():
        constant = _constants(training, {key: local(param) for key, _, param in held})
        for key, name, param in held:
            if key in constant:
                region = region_of(*owner(training.model, name), param)
                # Random signs of the whole parameter, of which each rank takes its part.
                generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
                signs = 2.0 * torch.randint(2, tuple(region.shape), generator=generator) - 1
                for box, part in region.parts(param):
                    part.copy_(constant[key] + PERTURBATION * signs[box.of_whole])
                changed.append((param, constant[key]))
    try:
        yield
    finally:
        with torch.no_grad():
            for param, value in changed:
                local(param).fill_(value)


def _constants(training: "Training", held: "Mapping[str, torch.Tensor]") -> dict[str, float]:
    """Parameters, by name, that are 0 or 1 everywhere, on every rank with a piece."""
    import torch

    names, values = sorted(set(training.outline.names.values())), (0.0, 1.0)
    flags = torch.ones(len(names), len(values))
    for index, name in enumerate(names):
        if name in held and held[name].numel():
            ends = [float(extreme) for extreme in held[name].detach().aminmax()]
            flags[index] = torch.tensor([ends == [value, value] for value in values])
    if training.world.size > 1:
        import torch.distributed as dist

        flags = flags.to(training.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return {
        name: value
        for name, row in zip(names, flags.tolist())
        for value, is_constant in zip(values, row)
        if is_constant and name in held
    }


PROJECTIONS = 16
"""R: enough for a change of the logits to show in one of them, few enough to keep with every trial."""
ROOMY = 8
"""Samples of a step per device from which the probe has two samples per device instead of one."""
LOSS_SCALES = (2.0**16, 2.0**11, 2.0**6)
"""Scales of the probe's loss for float16; the first one without an overflow is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePart:
    """One rank's contribution to a `Probe`."""

    share: Probe
    """Its share, without randomness: of loss and gradients, of each projection if it has logits, and of the
    parameters that it holds. Without noise, and without a first step.
    """
    changed: float
    """Its part of the squared change of the logits in training."""
    size: float
    """Its part of the squared logits."""
    by_batch: bool
    """True if training computes statistics over the samples of a micro-batch, like batch normalisation, or drops rows
    of experts by them, so that results depend on their number. Then only results without that can be compared.
    """
    rows: Mapping[str, list[int]] = field(default_factory=dict)
    """Number of its rows routed to each expert, by the path of the mixture; replicas and stages add up."""


def samples(world: int, global_batch: int) -> int:
    """P: one or two samples per rank, so that any number of replicas can share them."""
    return 2 * world if global_batch >= ROOMY * world else world


@dataclass(frozen=True, slots=True)
class Cut:
    """Assignment of a replica's samples to micro-batches: position j is sample j mod k."""

    size: int
    """Samples of a micro-batch."""
    count: int
    """Number of micro-batches."""

    @staticmethod
    def of(samples: int, micro: int, *, least: int, exact: bool) -> "Cut":
        """Returns the smallest cut in which every sample occurs equally often.

        Args:
            samples: k.
            micro: limit on the samples of a micro-batch.
            least: divisor of the number of micro-batches: the stages of a pipeline, or 2 if gradients are accumulated,
                so that accumulation is tested.
            exact: use only micro-batches of size `micro`, which code is compiled for.
        """
        sizes = [micro] if exact else range(1, micro + 1)
        ways = [
            Cut(size, count)
            for size in sizes
            for count in range(least, least * samples + 1, least)
            if size * count % samples == 0
        ]
        return min(ways, key=lambda cut: (cut.size * cut.count, cut.count))

    def positions(self, number: int, samples: int) -> "torch.Tensor":
        """Sample indices of a micro-batch."""
        import torch

        return torch.arange(number * self.size, (number + 1) * self.size) % samples


def take(training: "Training") -> ProbePart:
    """Probes a candidate before its first step, and restores weights, buffers and random streams.

    Every rank calls it.

    Raises:
        WorkloadError: the workload's batch or loss is invalid.
    """
    probed = _Probed(training)
    from ..schedule.parallel.experts import counted_rows, dropped_rows

    by_batch = any(getattr(module, "track_running_stats", False) for module in training.model.modules())
    by_batch = by_batch or dropped_rows(training.model) is not None

    counted = counted_rows(training.model, hooks=not training.compiled)
    with _undisturbed(training), perturbed(training), counted as rows:
        active_pass = None if by_batch else probed.run(as_trained=True)
        if active_pass is not None and not probed.agree(active_pass.random):
            quiet = active_pass
        else:
            with _at_rest(training):
                quiet = probed.run(as_trained=False)
    changed, size = probed.departure(active_pass or quiet, quiet)
    roundoff = training.precision.roundoff(training.model)
    names = training.outline.names
    frozen = {
        names[name]: not param.requires_grad for name, param in training.model.named_parameters() if name in names
    }
    share = Probe(
        quiet=quiet.computed,
        logits=probed.projected(quiet),
        noise_numbers=probed.noise_numbers(quiet),
        brought=tuple(name for name, _ in training.model.named_parameters() if name not in names),
        rates=_rates(training.model),
        trained=_starred(name for name, is_frozen in frozen.items() if not is_frozen),
        frozen=_starred(name for name, is_frozen in frozen.items() if is_frozen),
        names=training.outline.parameters,
        weights=sum(math.prod(training.outline.shapes[name]) for name in {*names.values()}),
        depth=training.outline.depth,
        roundoff=roundoff,
        # The roundoff of a user's loss is unknown.
        loss_roundoff=probed.loss_roundoff if training.workload.loss is None else roundoff,
    )
    sent = {path: counts.tolist() for path, counts in rows.items()}
    return ProbePart(share=share, changed=changed, size=size, by_batch=by_batch, rows=sent)


def _rates(model: "nn.Module") -> tuple[str, ...]:
    """Rates of dropout of modules in training mode, as in `Probe.rates`."""
    from ..schedule.random_state import rates_of
    from ..schedule.tree import join

    return _starred(
        f"{join(path, name)}={getattr(module, name) if module.training else 0.0:g}"
        for path, module in model.named_modules()
        for name in rates_of(module)
    )


def _starred(names: Iterable[str]) -> tuple[str, ...]:
    """Paths with a star for each number, unique, so that those of equal blocks are one."""
    return tuple(sorted({re.sub(r"(?<![^.])\d+(?=\.)", "*", name) for name in names}))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    computed: Computed
    logits: "torch.Tensor | None"
    """Projected over V, (positions, T, R), float32; None if this rank has none."""
    random: bool
    """True if random numbers were drawn."""


class _Probed:
    """A candidate's samples, and passes over them."""

    def __init__(self, training: "Training") -> None:
        self.training, world = training, training.world
        self.total = samples(world.size, training.workload.global_batch)
        self.num_own = self.total // world.dp
        self.first = world.dp_rank * self.num_own
        batch = make_batch(training.workload, self.total, training.seed_of(-1))
        self.share = batch_slice(batch, self.first, self.first + self.num_own)
        self.width = 0
        """V."""
        self.loss_roundoff = 0.0
        self._signs: dict[tuple[str, int], torch.Tensor] = {}

    def run(self, *, as_trained: bool) -> _Pass:
        """Runs one pass over the samples. The gradients are gone after it.

        Args:
            as_trained: run compiled code, for which micro-batches have the compiled size.
        """
        import torch

        from ..schedule.random_state import generator_states

        training = self.training
        cut = self._cut(as_trained)
        batches = self._batches(cut)
        seen: list[torch.Tensor] = []
        for scale in LOSS_SCALES if training.precision.scaled else (None,):
            seen.clear()
            states_before = generator_states()
            with training.precision.scaling(scale):
                loss = training.passes(batches, watch=lambda output: self._see(output, cut.size, seen))
            drew = any(
                not torch.equal(before, after) for before, after in zip(states_before, generator_states(), strict=True)
            )
            computed_pass = computed(training, loss, self.total, scale or 1.0)
            training.optimizer.zero_grad(set_to_none=True)
            # All ranks repeat the pass if any overflowed, or their collectives would not match.
            if scale is None or not self.agree(not math.isfinite(computed_pass.gradient)):
                break
        return _Pass(computed=computed_pass, logits=torch.cat(seen) if seen else None, random=drew)

    def _cut(self, as_trained: bool) -> Cut:
        training, pp = self.training, self.training.world.pp
        exact = as_trained and training.compiled
        # Uncompiled code keeps more activations than compiled code.
        micro = 1 if training.compiled and not exact else training.micro_batch
        accumulates = training.grad_accum > 1 and not exact
        return Cut.of(self.num_own, micro, least=pp if pp > 1 else 2 if accumulates else 1, exact=exact)

    def _batches(self, cut: Cut) -> list[Batch]:
        """Micro-batches on the device; for a pipeline, one batch."""
        training = self.training
        pipeline = training.model.__dict__.get("pipeline")
        if pipeline is not None:
            pipeline.micro_batches = cut.count
            cut = Cut(cut.size * cut.count, 1)
        picked = [cut.positions(number, self.num_own) for number in range(cut.count)]
        return [to_device(each_tensor(self.share, itemgetter(positions)), training.device) for positions in picked]

    def agree(self, flag: bool) -> bool:
        """True if a flag is set on any rank."""
        if self.training.world.size == 1:
            return flag
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(float(flag), device=self.training.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor)

    def projected(self, at_rest: _Pass) -> tuple[float, ...]:
        """This rank's part of the projections over samples, positions and logits."""
        if at_rest.logits is None:
            return ()
        import torch

        over, positions = at_rest.logits.shape[:2]
        samples = self.first + torch.arange(over, device=at_rest.logits.device) % self.num_own
        by_sample = self._sign("samples", self.total)[samples].double()
        # Ranks that share sequences have a piece of each.
        world, sharing = self.training.world, self.training.world.sharing
        by_position = sharing.piece(self._sign("positions", positions * sharing.ranks), 0).double()
        projections = torch.einsum("jtr,jr,tr->r", at_rest.logits.double(), by_sample, by_position)
        copies = over / self.num_own
        # The sum grows as the root of the number of terms. Ranks that share a layer have the same values.
        scale = 1.0 / world.tp / copies / math.sqrt(self.total * positions * sharing.ranks * self.width)
        return tuple((projections * scale).tolist())

    def departure(self, active_pass: _Pass, at_rest: _Pass) -> tuple[float, float]:
        """This rank's part of the squared change of the logits in training, and of the squared logits."""
        if active_pass.logits is None or at_rest.logits is None:
            return 0.0, 0.0
        quiet = at_rest.logits.unflatten(0, (-1, self.num_own)).mean(0)
        if active_pass is at_rest:
            return 0.0, float(quiet.square().mean())
        change = active_pass.logits.unflatten(0, (-1, self.num_own)) - quiet
        return float(change.square().mean()), float(quiet.square().mean())

    def noise_numbers(self, at_rest: _Pass) -> int:
        """Upper bound on the number of values in `departure`: at most the number of projections per position."""
        if at_rest.logits is None:
            return 0
        return self.total * at_rest.logits.shape[1] * self.training.world.sharing.ranks * min(self.width, PROJECTIONS)

    def _see(self, output: Any, size: int, seen: "list[torch.Tensor]") -> None:
        """Projects the logits of a micro-batch over V, which may be sharded over ranks."""
        import torch

        from ..base._torch import format_of_losses
        from ..schedule.forward import logits_of, loss_of
        from ..schedule.parallel.collectives import all_reduce
        from ..schedule.parallel.vocabulary import SplitLogits
        from ..schedule.primitives.fused_loss import FusedLogits

        loss = output if isinstance(output, torch.Tensor) else loss_of(output)
        if loss is not None:
            self.loss_roundoff = torch.finfo(format_of_losses(loss)).eps / 2
        logits, axis = logits_of(output), None
        if logits is None or logits.dim() < 2 or logits.shape[0] != size:
            return  # unknown which of them belong to which sample
        self.width, columns = logits.shape[-1], logits.shape[-1]
        pieces: Iterable[torch.Tensor]
        if isinstance(logits, FusedLogits):
            # Computed as in the loss, a few tokens at a time.
            axis, self.width, pieces = logits.product.axis, logits.product.vocabulary, logits.chunks()
        elif isinstance(logits, SplitLogits):
            axis, self.width = logits.axis, logits.vocabulary
            pieces = [logits.as_subclass(torch.Tensor).detach()]
        else:
            pieces = [logits.detach()]
        low = 0 if axis is None else axis.rank * columns
        signs = self._sign("logits", self.width)[low : low + columns]
        with torch.no_grad(), torch.autocast(self.training.device.type, enabled=False):
            # Signs are exact in any format. Padding columns of a piece have none.
            columns = signs.shape[0]
            projections = torch.cat([(piece[..., :columns] @ signs.to(piece.dtype)).float() for piece in pieces])
            projections = projections if axis is None else all_reduce(projections, axis)
            seen.append(projections.reshape(size, -1, PROJECTIONS))

    def _sign(self, axis: str, count: int) -> "torch.Tensor":
        import torch

        if (axis, count) not in self._signs:
            generator = torch.Generator().manual_seed(zlib.crc32(axis.encode()))
            bits = torch.randint(2, (count, PROJECTIONS), generator=generator)
            self._signs[axis, count] = (2.0 * bits - 1).to(self.training.device)
        return self._signs[axis, count]


@contextlib.contextmanager
def _undisturbed(training: "Training") -> Iterator[None]:
    """Restores random streams, buffers and the pipeline's number of micro-batches at the end."""
    from .training import undone

    pipeline = training.model.__dict__.get("pipeline")
    usual = None if pipeline is None else pipeline.micro_batches
    try:
        with undone(training):
            yield
    finally:
        if pipeline is not None:
            pipeline.micro_batches = usual


@contextlib.contextmanager
def _at_rest(training: "Training") -> Iterator[None]:
    """Disables randomness and statistics over the batch, and runs compiled code as written.

    Code is compiled for training mode; for another mode it would be compiled again, which takes long.
    """
    import torch

    from ..schedule.random_state import quiet

    as_written = torch.compiler.set_stance("force_eager") if training.compiled else contextlib.nullcontext()
    with quiet(training.model, training=False), as_written:
        yield


SAMPLED = 4096
"""Number of elements of a tensor that are checked for a gradient."""
WATCHED = 64
"""Number of these elements whose update is checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """Observations of one rank."""

    computed: Computed
    """Its share of loss and gradients, on the samples of a step."""
    still: tuple[str, ...]
    """Parameters on this rank with a gradient that the step did not change."""


def first_step(training: "Training") -> "tuple[torch.Tensor, StepPart | None]":
    """Runs `training.step()` and observes it.

    Returns:
        Result of the step, and the observations, or None if the step was skipped, as float16 may do.
    """
    loss = training.passes()
    scale = training.precision.loss_scale
    # Dropout changes the gradient of a parameter by more than a fault does.
    computed_step = replace(computed(training, loss, training.samples_per_step, scale), parameters=())
    watched = _watched(training)
    training.update()
    if training.precision.loss_scale < scale:
        return loss, None
    return loss, StepPart(computed=computed_step, still=_unchanged(training, watched))


_Watched = list[tuple[str, Any, slice, Any, Any]]


def _watched(training: "Training") -> _Watched:
    """Name, parameter, stride, observed elements and their values, for every parameter with a gradient."""
    from ..schedule.parallel.sharding import local

    watched: _Watched = []
    for name, param in training.model.named_parameters():
        if param.grad is None:
            continue
        weight, gradient = local(param.detach()).reshape(-1), local(param.grad).reshape(-1)
        # An odd stride also covers the columns of a matrix.
        stride = slice(None, None, weight.numel() // SAMPLED | 1)
        weight, gradient = weight[stride].float(), gradient[stride].float()
        # Elements that an update moves most likely: in a narrow format a small update does not change a large weight.
        promise = gradient.abs() / (weight.abs() + 1e-8)
        best = promise.topk(min(WATCHED, promise.numel())).indices
        best = best[gradient[best] != 0]
        if best.numel():
            watched.append((name, param, stride, best, weight[best]))
    return watched


def _unchanged(training: "Training", watched: _Watched) -> tuple[str, ...]:
    """Names of parameters that did not move. Weights in a narrow format move only if they are small, so those of a
    block are reported only if none of them moved.
    """
    import torch

    from ..schedule.parallel.sharding import local

    if not watched:
        return ()
    moved = [
        (local(param.detach()).reshape(-1)[stride][best].float() != values).any()
        for _, param, stride, best, values in watched
    ]
    groups: dict[Any, list[tuple[str, bool]]] = {}
    for (name, param, *_), has_moved in zip(watched, torch.stack(moved).tolist()):
        group = training.outline.group(name) if param.element_size() < 4 else name
        groups.setdefault(group, []).append((name, has_moved))
    still = [members for members in groups.values() if not any(moved for _, moved in members)]
    return tuple(name for members in still for name, _ in members)
