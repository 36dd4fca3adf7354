"""What is estimated: a model, on some hardware, trained somehow, over a space."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..models import Workload
from ..models.global_batch import shared, too_few
from ..models.spaces import checked_allowance, make_space, nothing_allowed
from ..models.spaces import fix as fix_knob
from ..space import Space
from .estimator import Estimator
from .hardware import Hardware, find_hardware
from .model_facts import Shape
from .planning import device_of, shape_space
from .setup import TrainingSetup
from .uncollected import uncollected

DEFAULT_SEQ_LEN = 4096
"""Tokens of a sequence of a model of which only shape numbers are given."""
SAMPLES_A_DEVICE = 4
"""Where only shape numbers are given and no global batch: sequences of a step for each device."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is estimated, resolved."""

    name: str
    """What the model is called."""
    estimator: Estimator
    """Predicts its configurations."""
    space: Space
    """What may vary."""
    hardware: Hardware
    """On what."""
    devices: int
    """How many of it."""
    workload: Workload | None = None
    """The workload, where it is one."""
    notes: tuple[str, ...] = ()
    """What was assumed."""


@uncollected()
def ask(
    target: str | Path | Workload | Shape,
    hardware: str | Path | Hardware | None = None,
    *,
    devices: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    data: str | Path | None = None,
    lora: str | None = None,
    space: Space | None = None,
    allow: str | Sequence[str] = (),
    override: Mapping[str, Sequence[Any]] | None = None,
    fix: Mapping[str, Any] | None = None,
    memory_limit_mib: float | None = None,
) -> Question:
    """What the arguments come to. Nothing is run; a model is traced when it is first estimated.

    Args:
        target: whatever `redline.workload` takes, or the shape of a model one does not have.
        hardware: a name in the table, a YAML file, or `Hardware`; None for this machine.
        devices: how many of it; None for those of this machine, or of a node.
        seq_len, global_batch, data, lora: as in `redline.tune`.
        space: what may vary; None for the default space of that hardware and so many devices.
        allow: `lossy` adds values that trade accuracy for speed to the default space.
        override: values of knobs, in place of the space's.
        fix: knobs that do not vary.
        memory_limit_mib: of a device; None for what it has.

    Raises:
        UsageError: one of them is unknown or impossible.
    """
    for what, value in (("devices", devices), ("seq_len", seq_len), ("global_batch", global_batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{what} must be a whole number of at least 1, but got {value!r}")
    allow = checked_allowance(allow, own_space=space is not None)
    machine, count = machine_of(hardware, devices)
    notes: tuple[str, ...] = (machine.note,) if machine.note else ()
    if isinstance(target, Shape):
        if lora is not None or data is not None:
            raise UsageError("lora and data belong to a model, not to shape numbers")
        length, total = seq_len or DEFAULT_SEQ_LEN, global_batch or SAMPLES_A_DEVICE * count
        if global_batch is None:
            notes += (f"global batch: {total}, {SAMPLES_A_DEVICE} sequences a device, since none was given",)
        notes += too_few(total, count)
        made = (
            space.copy()
            if space is not None
            else shape_space(target, machine, count, total, length, allow)
        )
        workload, name = None, target.name
    else:
        from ..models import workload as resolve

        workload = resolve(target, seq_len=seq_len, global_batch=global_batch, data=data, lora=lora)
        workload, said = shared(workload, count, target=target, asked=global_batch)
        notes += said
        device = device_of(machine)
        made = (
            space.copy() if space is not None else make_space(workload, device, devices=count, allow=allow)
        )
        length, total, name = workload.seq_len, workload.global_batch, workload.name
    notes += nothing_allowed(made, allow)
    for knob, values in (override or {}).items():
        made.override(knob, values)
    for knob, value in (fix or {}).items():
        fix_knob(made, knob, value)
    setup = TrainingSetup(
        devices=count,
        seq_len=length,
        global_batch=total,
        memory_limit_mib=memory_limit_mib,
        **without_knobs(made),
    )
    return Question(
        name=name,
        estimator=Estimator(workload if workload is not None else target, machine, setup),
        space=made,
        hardware=machine,
        devices=count,
        workload=workload,
        notes=notes,
    )


def machine_of(
    hardware: str | Path | Hardware | None, devices: int | None, settle: Callable[[], None] = lambda: None
) -> tuple[Hardware, int]:
    """The hardware of a name, a file or this machine (None), and how many devices of it there are to be.

    `settle` is called before this machine is measured, where it has to be.
    """
    if hardware is not None:
        found = find_hardware(hardware)
        return found, devices or 1
    from ..device import detect
    from .measuring import this_machine

    device = detect()
    made, count = this_machine(settle=settle), devices or device.count
    if device.type == "cpu" and count > 1:
        # Ranks share the cores and the memory's bandwidth that were measured as one.
        made = made.but(
            tflops={name: max(rate / count, 1e-4) for name, rate in made.tflops.items()},
            memory_gb_per_s=made.memory_gb_per_s / count,
            memory_gib=made.memory_gib / count,
            devices_per_node=count,
        )
    return made, count


def without_knobs(space: Space) -> dict[str, Any]:
    """What a configuration without a knob has: a space that lacks `precision` trains in float32."""
    names = {knob.name for knob in space.knobs}
    out: dict[str, Any] = {}
    if "precision" not in names:
        out["precision"] = "fp32"
    return out
