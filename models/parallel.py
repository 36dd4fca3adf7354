"""Parallel knobs of the default space, and their constraints."""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ..base.device import Device
from ..base.errors import SpaceError
from ..knobs.meaning import FLOAT8, PIPELINE_SCHEDULES
from ..knobs.rules import sequence_refusal
from ..knobs.strategy import OFFLOADS
from ..space import Expression, Space
from .families.standard import Support

PIPELINES = tuple(PIPELINE_SCHEDULES)
"""Orders of a pipeline's micro-batches."""
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
"""Model chunks of a pipeline rank that published recipes use; a default space has those for which the model has blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Possible numbers of replicas."""

    replicas: tuple[int, ...]
    """Ascending."""
    default_dp: int
    """The largest possible number: plain data parallelism if the global batch allows it."""


def declare(
    space: Space,
    total: int,
    device: Device,
    devices: int,
    support: Support,
    *,
    any_batch: bool,
    seq_len: int | None,
    own_loss: bool,
    experts: bool = False,
) -> Spread:
    """Adds `tp`, `sp`, `cp`, `pp`, `dp`, `etp`, `ep`, `zero`, `hsdp`, `sequence_parallel`, `virtual_stages` and
    `pipeline_schedule` if there are several devices, with a constraint for each degree that the model or the host
    does not support.

    `tp`, `sp`, `cp` and `pp` do not declare an effect on memory: the savings of a higher degree in weights or
    activations may be lost in activations (a first stage keeps several micro-batches, a replica has more samples) or
    because fewer replicas share the state (ZeRO).

    Args:
        total: samples of one optimizer step over all devices.
        device: kind of device, and number of devices of a host.
        any_batch: True if the samples of a step are not given, so that any number of replicas can share them.
        own_loss: True if the loss is not the model's own.

    Raises:
        SpaceError: no number of replicas divides the global batch, or the model supports one replica alone and no other use of
            the devices.
    """
    if devices == 1:
        return Spread(replicas=(1,), default_dp=1)
    degrees = divisors(devices)
    refused = {
        "tp": {degree: _beyond_host(degree, devices, device) or support.tp(degree) for degree in degrees[1:]},
        "sp": {
            degree: _no_sequences(degree, 1, support, seq_len, own_loss)
            or _beyond_host(degree, devices, device, "heads")
            for degree in degrees[1:]
        },
        "cp": {degree: _no_sequences(1, degree, support, seq_len, own_loss) for degree in degrees[1:]},
        "pp": {degree: support.pp(degree) for degree in degrees[1:]},
    }
    incompatible = _incompatible(degrees[1:], refused, devices, device, support, seq_len)
    combinations = _combinations(devices, refused, incompatible, None if any_batch else total)
    if not combinations:
        raise SpaceError(_cannot_share(total, devices, refused))
    if support.replicas:
        combinations = [combination for combination in combinations if combination.ranks == devices]
        if not combinations:
            raise SpaceError(f"{devices} devices would be replicas, but {support.replicas}")
    plain = min(
        combinations, key=lambda combination: (combination.ranks, combination.pp, combination.cp, combination.sp)
    )
    padded = [(tp, support.padding(tp)) for tp in sorted({combination.tp for combination in combinations})]
    notes = "".join(f"; at {degree} {note}" for degree, note in padded if note)
    tp = space.choice("tp", degrees, default=plain.tp, others=(), help=f"tensor-parallel degree{notes}")
    help_text = "ranks that share a sequence, and heads in attention (Ulysses)"
    sp = space.choice("sp", degrees, default=plain.sp, others=(), help=help_text)
    help_text = (
        "ranks of a ring, each with a piece of a sequence, among which keys and values go round (ring attention)"
    )
    cp = space.choice("cp", degrees, default=plain.cp, others=(), help=help_text)
    pp = space.choice("pp", degrees, default=plain.pp, others=(), help="pipeline stages")
    space.derive("dp", devices // (tp * sp * cp * pp), help="data-parallel replicas")
    if support.replicas:
        space.require(space["dp"] == 1, support.replicas)
    for knob, reasons in zip((tp, sp, cp, pp), refused.values(), strict=True):
        for reason in dict.fromkeys(reason for reason in reasons.values() if reason):
            space.require(~knob.isin([degree for degree in degrees[1:] if reasons[degree] == reason]), reason)
    for pair, reason in incompatible.items():
        (name, value), (other_name, other_value) = pair
        space.require((space[name] != value) | (space[other_name] != other_value), reason)
    if experts and any(devices > combination.pp for combination in combinations):
        shared = replicas(space) > 1
        if any(combination.tp > 1 for combination in combinations):
            help_text = (
                "ranks of a layer that each expert is cut over: 0 for tp, 1 for whole experts, which they share too"
            )
            etp = space.choice("etp", [0, 1], default=0, others=degrees[1:], help=help_text)
            space.require((etp == 0) | (tp > 1), "etp must be 0 where no ranks share a layer")
            shared = shared | (etp == 1)
        help_text = "neighbours among the replicas that share the experts of a mixture (expert parallelism)"
        space.choice("ep", degrees, default=1, when=shared, others=(), help=help_text)
    dps = sorted({devices // combination.ranks for combination in combinations})
    if dps[-1] > 1 or any(combination.sp * combination.cp > 1 for combination in combinations):
        _zero(space)
    _hsdp(space, sorted({(combination.tp, combination.pp) for combination in combinations}), devices, device)
    if any(combination.tp > 1 for combination in combinations):
        space.flag(
            "sequence_parallel",
            when=tp > 1,
            help="activations between tensor-parallel regions are cut along the sequence",
        )
    if any(combination.pp > 1 for combination in combinations):
        _pipeline(space, support, [degree for degree in degrees[1:] if not refused["pp"][degree]])
    return Spread(replicas=tuple(dps), default_dp=devices // plain.ranks)


class _Combination(NamedTuple):
    """A combination of degrees."""

    tp: int
    sp: int
    cp: int
    pp: int

    @property
    def ranks(self) -> int:
        """Devices of a replica with its own samples."""
        return prod(self)


_Refused = dict[str, dict[int, str | None]]
_Incompatible = dict[tuple[tuple[str, int], tuple[str, int]], str]
"""Reason why two knobs cannot have these values together."""


def replicas(space: Space) -> Expression:
    """Number of ranks with the same weights: replicas with their own samples, times ranks that share these."""
    return space["dp"] * space["sp"] * space["cp"]


def _combinations(
    devices: int, refused: _Refused, incompatible: _Incompatible, total: int | None
) -> list[_Combination]:
    """Possible degrees whose replicas share `total` samples; None allows any number of replicas."""
    degrees = {
        name: [degree for degree in divisors(devices) if not refused[name].get(degree)] for name in _Combination._fields
    }
    return [
        combination
        for combination in (_Combination(*degrees_of_knobs) for degrees_of_knobs in product(*degrees.values()))
        if devices % combination.ranks == 0
        and (("tp", combination.tp), ("sp", combination.sp)) not in incompatible
        and (("sp", combination.sp), ("cp", combination.cp)) not in incompatible
        and (total is None or total % (devices // combination.ranks) == 0)
    ]


def _no_sequences(sp: int, cp: int, support: Support, seq_len: int | None, own_loss: bool) -> str | None:
    """Reason why this number of ranks cannot share sequences; None if they can."""
    return support.sequences(sp, cp, 1) or sequence_refusal(seq_len, sp, cp, own_loss=own_loss)


def _incompatible(
    degrees: list[int], refused: _Refused, devices: int, device: Device, support: Support, seq_len: int | None
) -> _Incompatible:
    """Reasons why some degrees, each of them possible, cannot be combined."""
    reasons: _Incompatible = {}
    for degree, sp in product(degrees, repeat=2):
        if devices % (degree * sp) or refused["sp"][sp]:
            continue
        if not refused["tp"][degree]:
            reason = support.sequences(sp, 1, degree) or _beyond_host(degree * sp, devices, device, "a layer or heads")
            if reason:
                reasons[("tp", degree), ("sp", sp)] = reason
        if not refused["cp"][degree] and (refusal := sequence_refusal(seq_len, sp, degree)):
            reasons[("sp", sp), ("cp", degree)] = refusal
    return reasons


def _zero(space: Space) -> None:
    space.choice(
        "zero",
        [0, 1, 2, 3],
        when=replicas(space) > 1,
        others=(),
        help="ZeRO stage: what the replicas share of optimizer state, gradients, parameters",
        # ZeRO 2 has the updated shards in addition to the gathered weights, which on few replicas
        # takes more memory than ZeRO 1; on a CPU gathered weights can take more than sharding saves.
        monotone_memory=0,
    )


def no_hsdp(devices: int, device: Device) -> str:
    """Reason why the default space lacks `hsdp` on these devices: replicas must be on several hosts, and several of
    them on each.
    """
    per_host = _per_host(devices, device)
    if device.type != "cuda":
        return "which ranks share a host is not known of CPUs"
    if per_host == devices:
        return f"the {devices} devices are on one host"
    if per_host == 1:
        return f"each of the {devices} devices is on its own host"
    return f"no replicas are both on several hosts and several on each host of {per_host}"


def _hsdp(space: Space, tp_pp: list[tuple[int, int]], devices: int, device: Device) -> None:
    """Adds `hsdp` if there are replicas on several hosts, and several of them on each.

    Args:
        ways: possible pairs of tp and pp.
    """
    per_host = _per_host(devices, device)
    groups = {
        devices // (pp * per_host)
        for tp, pp in tp_pp
        if tp < per_host < devices // pp and devices // pp % per_host == 0
    }
    if device.type != "cuda" or not groups:
        return
    tp, dp = space["tp"], space["dp"]
    knob = space.choice(
        "hsdp",
        sorted({1, *groups}),
        when=(dp > 1) & (space["zero"] >= 2),
        others=(),
        help="HSDP: groups of replicas, one per host, that have all shards and sum their gradients; 1: no groups",
        monotone_memory=1,
    )
    space.require(
        (knob == 1) | (tp * replicas(space) == per_host * knob),
        f"pieces are cut within a host, of {per_host} devices here, so there is a group for each host of replicas",
    )
    if any(tp == per_host for tp, _ in tp_pp):
        space.require((knob == 1) | (tp < per_host), "a host has one replica, so there is nothing to shard within it")


def compose(space: Space, device: Device, devices: int, support: Support) -> None:
    """Adds `offload`, and the model's requirements on combinations of parallel knobs. Call it last."""
    names = space.by_name
    if device.type == "cuda":
        space.choice("offload", OFFLOADS, others=(), help="state that is stored and updated in host memory")
    if "zero" in names and "pp" in names and support.zero_in_stages:
        space.require((space["zero"] < 2) | (space["pp"] == 1), support.zero_in_stages)
    if "sequence_parallel" in names and support.sequence_parallel:
        space.require(~space["sequence_parallel"], support.sequence_parallel)
    if "tp" in names and set(FLOAT8) & {*space["precision"].values, *(space["precision"].others or ())}:
        not_float8 = ~space["precision"].isin(FLOAT8)
        for tp in divisors(devices)[1:]:
            if not support.tp(tp) and (reason := support.float8(tp)):
                space.require(not_float8 | (space["tp"] != tp), reason)


def _pipeline(space: Space, support: Support, degrees: list[int]) -> None:
    """Adds `virtual_stages` and `pipeline_schedule`, and their constraints.

    Args:
        degrees: possible numbers of pipeline ranks above 1.
    """
    pp = space["pp"]
    # A reason that holds for the fewest ranks holds for more of them.
    possible = [many for many in VIRTUAL_STAGES if many <= 2 or not support.pp(degrees[0] * many)]
    virtual = space.choice(
        "virtual_stages",
        possible,
        when=pp > 1,
        others=(),
        help="model chunks of a pipeline rank, pp * virtual_stages in all",
    )
    space.choice(
        "pipeline_schedule",
        PIPELINES,
        when=pp > 1,
        others=(),
        help="order of the micro-batches: backward as soon as possible, or after all forwards (gpipe); over "
        "several chunks (interleaved); gradients of weights where a rank would wait (zero_bubble, zbv)",
    )
    if support.virtual_stages:
        space.require(virtual == 1, support.virtual_stages)
        return
    for degree in degrees:
        chunks = {many: support.pp(degree * many) for many in possible[1:]}
        for reason in dict.fromkeys(reason for reason in chunks.values() if reason):
            too_many = [many for many in chunks if chunks[many] == reason]
            space.require((pp != degree) | ~virtual.isin(too_many), reason)


def divisors(number: int) -> list[int]:
    """Divisors in ascending order, including 1 and the number."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _per_host(devices: int, device: Device) -> int:
    """Ranks on a host, if all hosts have the same, smallest possible number."""
    return max(divisor for divisor in divisors(devices) if divisor <= max(1, device.count))


def _beyond_host(ranks: int, devices: int, device: Device, share: str = "a layer") -> str | None:
    """Reason why neighbouring ranks would not be on one host; None if they are."""
    if device.type != "cuda":
        return None
    per_host = _per_host(devices, device)
    if per_host % ranks:
        return f"ranks that share {share} must be on one host, which has {per_host} of the {devices} devices"
    return None


def _cannot_share(total: int, devices: int, refused: _Refused) -> str:
    nearest = max(1, round(total / devices)) * devices
    message = (
        f"the global batch must be a multiple of the number of replicas, but {total} is not one of {devices}; "
        f"{nearest} is"
    )
    reasons_found = {reason for reasons in refused.values() for reason in reasons.values() if reason}
    if reasons_found:
        message += f". Fewer replicas are not possible: {'; '.join(sorted(reasons_found))}"
    return message
