"""Estimate requests: a model, hardware, a training setup and a space."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.collection import without_collection
from ..models import Workload
from ..models.presets import ServerModel
from ..models.request import TrainingRequest, resolve
from ..space import Space
from .estimator import Estimator
from .facts.model_facts import FactsSource
from .facts.traced import TracedFacts
from .hardware import Hardware, find_hardware
from .resolved_cache import CachedFacts, ResolvedRequest, key_of, load, store
from .survey import device_of
from .trainers import Trainer, built, find_trainer


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """A resolved estimate request."""

    name: str
    estimator: Estimator
    """Predicts its configurations."""
    space: Space
    hardware: Hardware
    devices: int
    """Number of devices."""
    global_batch: int | None
    """Samples of a step; None if they vary with `grad_accum`."""
    trains: Mapping[str, Any] = field(default_factory=dict)
    """The training, in run.yaml's terms."""
    notes: tuple[str, ...] = ()
    """Assumptions."""
    framework: Trainer = field(default_factory=lambda: find_trainer("redline"))
    """The trainer."""


def estimate_request(
    target: str | Path | Workload | ServerModel,
    hardware: str | Path | Hardware | None = None,
    *,
    memory_limit_mib: float | None = None,
    framework: str = "redline",
    assume: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> EstimateRequest:
    """Resolves the arguments. Nothing is run; a model is traced when it is first estimated.

    Args:
        target: anything that `redline.workload` takes.
        hardware: a name in the table, a YAML file, or `Hardware`; None for this machine.
        memory_limit_mib: of a device; None for its memory.
        framework: the trainer: a name in `redline.estimator.trainers`, whose facts replace knobs of the same name.
        assume: facts of its software that differ: fields of `TrainingSetup`, such as `overlap_experts`.
        arguments: the other fields of `redline.models.request.TrainingRequest`; without `devices` those of this machine,
            or of a node, without `space` the default one of that hardware.

    Raises:
        UsageError: one of them is unknown or impossible.
    """
    trainer = find_trainer(framework).assuming(assume or {})
    request = TrainingRequest(target, **arguments)
    request.check_values()
    machine, count = machine_of(hardware, request.devices)
    notes = tuple(filter(None, (machine.note, machine.unmeasured)))
    source, resolved = _resolved(request, machine, count)
    source = (None if request.lora else built(resolved.trains.get("shape"), trainer)) or source
    space = settled(resolved.space, trainer)
    setup = trainer.planned(
        machine,
        devices=count,
        seq_len=resolved.seq_len,
        global_batch=resolved.global_batch,
        memory_limit_mib=memory_limit_mib,
        **without_knobs(space),
    )
    return EstimateRequest(
        name=resolved.name,
        estimator=Estimator(source, machine, setup, framework=trainer.name),
        space=space,
        hardware=machine,
        devices=count,
        global_batch=None if resolved.free_batch else resolved.global_batch,
        trains=dict(resolved.trains),
        notes=notes + resolved.notes,
        framework=trainer,
    )


def settled(space: Space, trainer: Trainer) -> Space:
    """A space in which knobs that a trainer's facts determine are fixed: at that value, or at the nearest one."""
    facts = trainer.setup
    names = [knob.name for knob in space.knobs if knob.name in facts and not knob.derived and len(knob.values) > 1]
    if not names:
        return space
    narrowed = space.copy()
    for name in names:
        values = narrowed[name].values
        usual = space.default()[name]
        near = (facts[name], "bf16" if name == "precision" else usual, usual)
        narrowed.fix(name, next(candidate for candidate in near if candidate in values))
    return narrowed


def _resolved(request: TrainingRequest, machine: Hardware, devices: int) -> tuple[FactsSource, ResolvedRequest]:
    """The source of the facts of a request's model, and the rest of the resolved request, from the cache or resolved."""
    device = device_of(machine)
    key = key_of(request, device, devices)
    cached = None if key is None else load(key, ResolvedRequest)
    if cached is not None:

        def remake() -> TracedFacts:
            return TracedFacts(resolve(request, device, devices).workload, machine.operators, machine.liger)

        return CachedFacts(cached.model_id, machine.operators, machine.liger, remake), cached
    with without_collection():
        answer = resolve(request, device, devices)
    resolved = ResolvedRequest.of(answer)
    if key is not None:
        store(key, resolved)
    return TracedFacts(answer.workload, machine.operators, machine.liger), resolved


def machine_of(
    hardware: str | Path | Hardware | None, devices: int | None, settle: Callable[[], None] = lambda: None
) -> tuple[Hardware, int]:
    """The hardware of a name, a file or this machine (None), and the number of its devices.

    `settle` is called before this machine is measured, if it has to be.
    """
    if hardware is not None:
        found_hardware = find_hardware(hardware)
        return found_hardware, devices or 1
    from ..base.device import detect
    from .measuring import this_machine

    device = detect()
    hardware_here, count = this_machine(settle=settle), devices or device.count
    return hardware_here.shared(count) if device.type == "cpu" else hardware_here, count


def without_knobs(space: Space) -> dict[str, Any]:
    """Values of knobs that a space lacks: a space without `precision` trains in float32."""
    return {} if "precision" in space.by_name else {"precision": "fp32"}
