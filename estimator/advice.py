"""Changes of an estimate request of which no configuration fits, tried one at a time: those that help."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import RedlineError
from .plans import fastest
from .request import EstimateRequest

SHORTEST = 256
"""Tokens below which a shorter sequence is not proposed."""
HALVINGS = 3
DOUBLINGS = 6
"""Numbers of shorter sequences and of larger numbers of devices that are tried."""
ADAPTERS = "r=16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change with which a configuration is predicted to fit."""

    options: str
    """As options of the command line."""
    memory_mib: float
    """Predicted memory of the fastest configuration."""

    def __str__(self) -> str:
        return f"{self.options} ({self.memory_mib / 1024:.1f} GiB)"


def helpful(
    ask: Callable[[Mapping[str, Any]], EstimateRequest],
    base_arguments: Mapping[str, Any],
    *,
    devices: int,
    seq_len: int | None,
) -> list[Change]:
    """Returns the changes that make something fit, the least intrusive first; of shorter sequences and more devices the first
    that does.

    Args:
        ask: returns the request with some of its arguments replaced.
        base_arguments: the arguments of the request.
        devices, seq_len: those of the request.
    """
    changes = []
    for family in _families(base_arguments, devices, seq_len):
        for options, arguments in family:
            try:
                request = ask(arguments)
                best = fastest(request.estimator, request.space)
            except RedlineError:  # this change is not possible for the model
                continue
            if best is not None:
                changes.append(Change(options=options, memory_mib=best.estimate.peak_memory_mib))
                break
    return changes


def _families(
    base_arguments: Mapping[str, Any], devices: int, seq_len: int | None
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Yields lists of changes of one kind, by their options and their arguments."""
    if "lossy" not in (base_arguments.get("allow") or ()):
        yield [("--allow lossy", {"allow": (*(base_arguments.get("allow") or ()), "lossy")})]
    if seq_len is not None:
        lengths = [seq_len >> halving for halving in range(1, HALVINGS + 1)]
        yield [(f"--seq-len {length}", {"seq_len": length}) for length in lengths if length >= SHORTEST]
    adapters = base_arguments.get("lora")
    if not adapters:
        texts = (ADAPTERS, f"{ADAPTERS},quantize=4bit")
        yield [(f"--lora {adapter}", {"lora": adapter}) for adapter in texts]
    elif "quantize" not in str(adapters):
        yield [(f"--lora {adapters},quantize=4bit", {"lora": f"{adapters},quantize=4bit"})]
    counts = [devices << doubling for doubling in range(1, DOUBLINGS + 1)]
    yield [(f"--devices {count}", {"devices": count}) for count in counts]
