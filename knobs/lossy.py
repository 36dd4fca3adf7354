"""Lossy values of knobs, which trade accuracy for speed: a configuration with one trains a different model.

They are in a space only if the user requested them. run.yaml lists under `asked.lossy`, for each knob with lossy
values, those in its space; `Trial.lossy` uses this list.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .text import config_text


class _Above(Mapping[Any, str]):
    """All numbers above 0 as lossy values, with one reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getitem__(self, value: Any) -> str:
        if not isinstance(value, int | float) or not value > 0:
            raise KeyError(value)
        return self._reason

    def __iter__(self) -> Iterator[Any]:
        return iter(())  # infinitely many

    def __len__(self) -> int:
        return 0


LOSSY: Mapping[str, Mapping[Any, str]] = {
    "precision": {
        "bf16_pure": "there are no fp32 master weights",
        "fp8": "matrix products are computed in 8 bits",
        "fp8_rowwise": "matrix products are computed in 8 bits",
    },
    "reduce_dtype": {"bf16": "gradients are rounded to bf16 before replicas average them"},
    "capacity_factor": _Above("experts drop the rows beyond their capacity"),
}
"""Values of the standard knobs whose training deviates from float32, with the reason: small updates are lost, operands
or sums are rounded coarsely, or tokens miss some of their experts. Autocast (`bf16`, `fp16`) keeps fp32 weights and
sums.
"""

Lossy = Mapping[str, Sequence[Any]]
"""Lossy values by knob."""


def lossy_of(document: Mapping[str, Any] | None) -> Lossy:
    """Lossy values of a run, from its run.yaml; none if it does not list them."""
    request = (document or {}).get("asked")
    listed = request.get("lossy") if isinstance(request, Mapping) else None
    if not isinstance(listed, Mapping):
        return {}
    return {str(name): tuple(values) for name, values in listed.items() if isinstance(values, list | tuple)}


def lossy_in(config: Mapping[str, Any], lossy: Lossy) -> tuple[str, ...]:
    """Knobs of a configuration with a lossy value."""
    return tuple(name for name, values in lossy.items() if name in config and config[name] in values)


def lossy_values(config: Mapping[str, Any], knobs: Iterable[str]) -> str:
    """Formats the values of these knobs, as `precision=bf16_pure`; empty for no knobs."""
    return config_text({name: config[name] for name in knobs}, between=", ")


def exactness(knobs: Iterable[str]) -> str:
    """Describes configurations without lossy values of these knobs; empty for no knobs."""
    return "without lossy values" if set(knobs) else ""
