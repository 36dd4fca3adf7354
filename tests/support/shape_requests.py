"""Estimate requests of models that are given by shape numbers alone, which need no tracing."""

from collections.abc import Mapping, Sequence
from typing import Any

from redline.base.device import float8_obstacle
from redline.estimator import Estimator, Hardware, Shape
from redline.estimator.request import EstimateRequest, machine_of, settled, without_knobs
from redline.estimator.survey import device_of
from redline.estimator.trainers import find_trainer
from redline.knobs.rules import RuleContext
from redline.models import parallel
from redline.models.families.standard import Support
from redline.models.request import TrainingRequest
from redline.models.spaces import declare_precision, micro_batches, ratios, require_rules
from redline.space import Space


def shape_request(
    shape: Shape,
    hardware: str | Hardware,
    *,
    framework: str = "redline",
    assume: Mapping[str, Any] | None = None,
    memory_limit_mib: float | None = None,
    **arguments: Any,
) -> EstimateRequest:
    """As `estimate_request`, of shape numbers."""
    trainer = find_trainer(framework).assuming(assume or {})
    request = TrainingRequest(shape.name, **arguments)
    machine, devices = machine_of(hardware, request.devices)
    length, total = request.seq_len or 4096, request.global_batch or 4 * devices
    space, notes = request.space_or(lambda allow: shape_space(shape, machine, devices, total, length, allow))
    space = settled(space, trainer)
    setup = trainer.planned(
        machine,
        devices=devices,
        seq_len=length,
        global_batch=total,
        memory_limit_mib=memory_limit_mib,
        **without_knobs(space),
    )
    return EstimateRequest(
        name=shape.name,
        estimator=Estimator(shape, machine, setup, framework=trainer.name),
        space=space,
        hardware=machine,
        devices=devices,
        global_batch=total,
        trains={"model": shape.name},
        notes=notes,
        framework=trainer,
    )


def shape_space(
    shape: Shape,
    hardware: Hardware,
    devices: int,
    global_batch: int,
    seq_len: int,
    allow: Sequence[str] = (),
) -> Space:
    """The standard knobs for a model given by shape numbers only.

    Raises:
        SpaceError: no number of replicas divides the global batch.
    """
    device = device_of(hardware)
    space = Space()
    kv_heads = shape.kv_heads or shape.heads

    def uncut(ranks: int) -> str | None:
        even = kv_heads % ranks == 0 and shape.heads % ranks == 0
        return None if even else f"{ranks} ranks must divide the {kv_heads} key and value heads"

    def undivided(stages: int) -> str | None:
        return None if stages <= shape.layers else f"{stages} stages need as many of {shape.layers} layers"

    def apart(sp: int, cp: int, tp: int) -> str | None:
        even = sp == 1 or shape.heads % (sp * tp) == 0
        return None if even else f"tp * sp, {tp} * {sp}, must divide the {shape.heads} attention heads"

    support = Support(tp=uncut, sequences=apart, pp=undivided, sequence_parallel=None)
    spread = parallel.declare(
        space,
        global_batch,
        device,
        devices,
        support,
        any_batch=False,
        seq_len=seq_len,
        own_loss=False,
        experts=shape.experts > 0,
    )
    sizes = sorted({size for dp in spread.replicas for size in micro_batches(global_batch // dp)})
    micro = space.choice("micro_batch", sizes, help="sequences in one forward pass of one replica", monotone_memory=1)
    space.choice(
        "checkpoint_ratio",
        ratios(shape.layers),
        help="share of the blocks that are recomputed",
        monotone_memory=-1,
    )
    float8 = not float8_obstacle(device)
    parameters = shape.facts(precision="bf16", attention="sdpa", fusion=False).parameters
    declare_precision(space, device, parameters, lossy="lossy" in allow, float8=float8)
    space.flag("fusion", help="compile each repeated block")
    together = micro * space["dp"] if devices > 1 else micro
    space.derive("grad_accum", global_batch // together, help="micro-batches per optimizer step")
    parallel.compose(space, device, devices, support)
    context = RuleContext(
        devices=devices,
        global_batch=global_batch,
        seq_len=seq_len,
        blocks=shape.layers,
        experts=(shape.experts,) if shape.experts else (),
    )
    require_rules(space, context)
    return space
