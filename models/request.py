"""Requests of a training: its model, its devices and its space."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from ..base.device import Device
from ..base.errors import SpaceError, UsageError, unknown
from ..base.option import Option, check_options
from ..knobs.strategy import STANDARD, checked
from ..space import Space
from .architecture import Architecture
from .lora import check_lora
from .presets import ServerModel
from .resolve import workload as resolve_workload
from .samples import check_samples, free_accumulation, shared
from .spaces import check_knobs, checked_allowance, fix_knob, make_space, nothing_allowed, set_values, with_mixing
from .workload import Workload


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The model and its devices.

    Args:
        target: a model (preset, folder, config.json, hub id, or `file.py:name`), a `Workload`, a `Command`, or any
            callable `fn(config) -> throughput | Measurement`, which needs a `space`.
        devices: devices of one trial; by default all that are present.
        seq_len: tokens of a sample, in place of the workload's.
        global_batch: samples of an optimizer step, in place of the workload's.
        lora: train only adapters of a Hugging Face model, such as `r=16` or `r=16,alpha=32,target=q_proj+v_proj`; the
            other weights are frozen.
    """

    target: Any = field(kw_only=False)
    devices: Annotated[
        int | None, Option("Devices of one trial.  [default: all present]", type=int, least=1, metavar="N")
    ] = None
    seq_len: Annotated[
        int | None, Option("Sequence length, tokens.  [default: the model's]", type=int, least=1, metavar="N")
    ] = None
    global_batch: Annotated[
        int | None,
        Option(
            "Samples per optimizer step.  [default: the model's usual, or what the devices can share]",
            type=int,
            least=1,
            metavar="N",
        ),
    ] = None
    lora: Annotated[
        str | None,
        Option("Train adapters only: r, alpha, target=a+b, dropout.", check=check_lora, metavar="KNOB=V,..."),
    ] = None

    @property
    def names_model(self) -> bool:
        """True if the target is the name of a model, not of a Python file."""
        return isinstance(self.target, (str, Path)) and ".py" not in str(self.target)


@dataclass(frozen=True, kw_only=True)
class SpaceRequest:
    """The search space.

    Args:
        space: knobs and constraints, or a YAML file with them; by default the workload's own for the devices at hand.
        allow: `lossy` adds values that trade accuracy for speed to the default space, such as bf16 without fp32 master
            weights; the best without them is reported beside the winner.
        override: values of knobs, in place of the space's.
        fix: values of knobs that do not vary.
    """

    space: Annotated[
        Space | str | Path | None, Option("A space in YAML, instead of the model's own.", metavar="FILE")
    ] = field(default=None, kw_only=False)
    allow: Annotated[
        str | Sequence[str],
        Option("lossy: also values that trade accuracy for speed, such as bf16_pure.", metavar="NAME", many=True),
    ] = ()
    override: Annotated[
        Mapping[str, Sequence[Any]] | None,
        Option("The values of a knob.", flag="set", metavar="KNOB=A,B,...", many=True),
    ] = None
    fix: Annotated[Mapping[str, Any] | None, Option("A fixed knob.", metavar="KNOB=V", many=True)] = None

    @cached_property
    def given_space(self) -> Space | None:
        """The given space, read if it is a file; it must not be changed. None for the default one.

        Raises:
            SpaceError: the file does not contain a valid space.
            UsageError: it is neither a space nor a path.
        """
        if isinstance(self.space, (str, Path)):
            return Space.from_yaml(self.space)
        if self.space is not None and not isinstance(self.space, Space):
            kind = type(self.space).__name__
            raise UsageError(
                f"space must be a redline.Space or the path of its YAML, but got a {kind}: space = redline.Space(), then "
                "space.choice('micro_batch', [8, 16])"
            )
        return self.space

    def space_or(self, default: Callable[[tuple[str, ...]], Space]) -> tuple[Space, tuple[str, ...]]:
        """Returns a new space, with overridden and fixed knobs, and notes.

        Args:
            default: makes the space if none is given, with the allowed extensions.

        Raises:
            SpaceError: an unknown extension is allowed; the space has no such knob or value, or no configuration is
                left.
        """
        given_space = self.given_space
        allow = checked_allowance(self.allow, own_space=given_space is not None)
        space = default(allow) if given_space is None else given_space.copy()
        notes = nothing_allowed(space, allow)
        for knob, values in (self.override or {}).items():
            set_values(space, knob, values)
        for knob, value in (self.fix or {}).items():
            fix_knob(space, knob, value)
        return space, notes


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(SpaceRequest, ModelRequest):
    """The model, its devices and its search space."""

    def check_values(self) -> None:
        """Raises UsageError if a value is invalid by itself, or a knob is given that no default space has, before a
        model is built and traced. Neither torch nor transformers is imported.
        """
        check_options(self)
        checked_allowance(self.allow, own_space=self.given_space is not None)
        without_code = isinstance(self.target, ServerModel) or self.names_model
        if not without_code or self.space is not None:
            return
        fixed = {name: [value] for name, value in (self.fix or {}).items()}
        for name, values in [*(self.override or {}).items(), *fixed.items()]:
            if name not in STANDARD:
                raise SpaceError(unknown("knob", name, STANDARD))
            for value in values:
                checked(name, value)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A request resolved for known devices."""

    workload: Workload
    """The workload, with the global batch for these devices."""
    space: Space
    free_batch: bool
    """True if the samples per step vary with `grad_accum`, because no global batch was given."""
    notes: tuple[str, ...]


def resolve(request: TrainingRequest, device: Device, devices: int) -> Resolved:
    """Returns the workload and the space of a request, for a number of devices of a kind.

    Raises:
        UsageError: a value is unknown or impossible, or contradicts the rest.
    """
    sizes = {"seq_len": request.seq_len, "global_batch": request.global_batch}
    workload = resolve_workload(request.target, **sizes, lora=request.lora)
    notes = unread_fields(workload)
    accumulation = free_accumulation(workload, request.given_space, request.global_batch, request.override, request.fix)
    if accumulation is None:
        workload, batch_notes = shared(workload, devices, target=request.target, requested=request.global_batch)
        notes += batch_notes

    def default(allow: tuple[str, ...]) -> Space:
        return make_space(workload, device, devices=devices, grad_accum=accumulation, allow=allow)

    space, space_notes = request.space_or(default)
    own = request.given_space is not None or workload.space is not None
    if own:
        space_notes += check_knobs(workload, space)
    if own or accumulation is not None:
        space_notes += check_samples(workload, space, devices, request.global_batch)
    space_notes += with_mixing(workload, space)
    if isinstance(request.target, ServerModel) and isinstance(workload.model, Architecture):
        _check_attention(space, workload.model.attentions(device))
    return Resolved(workload=workload, space=space, free_batch=accumulation is not None, notes=notes + space_notes)


def unread_fields(workload: Workload) -> tuple[str, ...]:
    """Returns a note about the fields of a config.json that its class does not have, if there are any."""
    if not workload.unread:
        return ()
    return (f"not read, since the model's class has no such fields: {', '.join(workload.unread)}",)


def _check_attention(space: Space, available: Sequence[str]) -> None:
    """Refuses implementations of attention in a user's space that the default space does not have.

    Raises:
        UsageError: it has one.
    """
    knob = space.by_name.get("attention")
    for value in () if knob is None or knob.derived else knob.values:
        if value not in available:
            raise UsageError(f"{unknown('attention', str(value)[:80], available)} The space has it; take it out.")
